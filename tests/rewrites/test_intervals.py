"""Masks whose rows see one run of keys: chunks, documents, blocks that look ahead, prefixes."""

import pytest
import torch
import torch.nn.functional as F

from attnpatch.testing.recording import check_rewrite

B, H, S, D = 2, 2, 12, 16


def attend(q, k, v, keep):
    scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill(~keep, -torch.inf)
    return scores.softmax(-1) @ v


def check(mask, words, *args, seqlen_q=S, seqlen_k=S):
    """``mask(q index column, k index row, *args)`` is lifted: fused, right, nothing of seqlen_q x seqlen_k left."""

    def function(q, k, v, *args):
        rows = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
        return attend(q, k, v, mask(rows, torch.arange(k.shape[2])[None, :], *args))

    qkv = (torch.randn(B, H, n, D) for n in (seqlen_q, seqlen_k, seqlen_k))
    recording = check_rewrite(function, *qkv, *args)
    assert recording.reasons == []
    assert recording.masks == [words]
    if "streamed" not in words:
        assert recording.square_nodes(seqlen_q, seqlen_k) == []


def test_chunks():
    check(lambda q, k: (k <= q) & (k // 5 == q // 5), "causal, chunk 5")


def test_chunks_on_a_longer_cache():
    check(lambda q, k: (k <= q) & (k // 5 == q // 5), "causal, chunk 5", seqlen_q=4, seqlen_k=11)


def test_chunks_counted_from_the_first_real_token():
    pads = torch.tensor([0, 3])
    check(
        lambda q, k, p: (k <= q) & ((k - p[:, None, None, None]) // 5 == (q - p[:, None, None, None]) // 5),
        "causal, chunk 5",
        pads,
    )


def test_documents():
    """Ids that count the restarts of positions never fall."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5, 6]])

    def mask(q, k, positions):
        ids = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        return (k <= q) & (ids[:, None, :, None] == ids[:, None, None, :])

    check(mask, "causal, documents", positions)


def test_ids_that_may_repeat_are_streamed():
    ids = torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 2, 1, 1, 1]])
    check(lambda q, k, ids: ids[:, None, :, None] == ids[:, None, None, :], "streamed mask [1, 1, 12, 12]", ids)


def image_ids(kinds):
    is_image = kinds == 1
    start = is_image & ~F.pad(is_image, (1, 0), value=0)[:, :-1]
    return torch.where(is_image, torch.cumsum(start.int(), dim=1) - 1, -1)


KINDS = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]])


def test_blocks_look_ahead():
    """Images of a multimodal decoder: causal, and both ways within an image."""

    def mask(q, k, kinds):
        ids = image_ids(kinds)
        row, key = ids[:, None, :, None], ids[:, None, None, :]
        return (k <= q) | ((row == key) & (row >= 0))

    check(mask, "causal or blocks", KINDS)


def test_blocks_look_beyond_a_window():
    def mask(q, k, kinds):
        ids = image_ids(kinds)
        row, key = ids[:, None, :, None], ids[:, None, None, :]
        return ((k <= q) & (k > q - 3)) | ((row == key) & (row >= 0))

    check(mask, "(causal and window 3) or blocks", KINDS)


def test_prefix_of_each_sequence():
    lengths = torch.tensor([4, 7])
    check(lambda q, k, n: (k <= q) | (k < n[:, None, None, None]), "causal or prefix per sequence", lengths)


def test_prefix_of_a_fixed_length():
    check(lambda q, k: (k <= q) | (k < 5), "causal or prefix 5")


NESTED = {
    "(causal or prefix 5), chunk 4": lambda q, k: ((k <= q) | (k < 5)) & (k // 4 == q // 4),
    "chunk 4 or (causal and chunk 6)": lambda q, k: (k // 4 == q // 4) | ((k <= q) & (k // 6 == q // 6)),
    "(causal and window 3) or (causal and chunk 6)": lambda q, k: (
        ((k <= q) & (k > q - 3)) | ((k <= q) & (k // 6 == q // 6))
    ),
    "causal or bounded left": lambda q, k: (k <= q) | (k >= q - 3),
}


@pytest.mark.parametrize("words", NESTED)
def test_words_say_what_is_nested_in_what(words):
    check(NESTED[words], words)


def test_a_prefix_of_each_row_is_bounded_and_no_prefix():
    lengths = torch.tensor([3, 4, 4, 5, 5, 5, 7, 8, 9, 10, 11, 12])
    check(lambda q, k, n: (k < n[:, None]) & (k <= q), "causal, bounded", lengths)


def test_two_runs_apart_are_streamed():
    """A sink of the first tokens beside a window is no single run."""
    check(lambda q, k: (k <= q) & ((k < 2) | (k > q - 3)), "causal, streamed mask [12, 12]")


def test_valid_length_of_each_sequence():
    lengths = torch.tensor([12, 7])
    check(lambda q, k, n: (k < n[:, None, None, None]) & (q >= 0), "prefix per sequence", lengths)


@pytest.mark.parametrize("size", [1, 2, 12, 50])
def test_chunk_sizes(size):
    check(lambda q, k: k // size == q // size, f"chunk {size}")


def test_mask_built_by_vmap():
    """Multimodal decoders build the mask of their sliding layers by vmap over a function of indices."""

    def mask(q, k, kinds):
        ids = image_ids(kinds)

        def visible(b, i, j):
            return ((j <= i) & (j > i - 3)) | ((ids[b, i] == ids[b, j]) & (ids[b, i] >= 0))

        over_keys = torch.vmap(visible, in_dims=(None, None, 0))
        over_rows = torch.vmap(over_keys, in_dims=(None, 0, None))
        return torch.vmap(over_rows, in_dims=(0, None, None))(torch.arange(B), q[:, 0], k[0])[:, None]

    check(mask, "(causal and window 3) or blocks", KINDS)


def test_chunks_of_one_new_token():
    """The only row has no index in the mask, and the keys of a sliding cache do not begin at 0."""
    pads = torch.tensor([0, 3])
    check(
        lambda q, k, p: (k <= q) & ((k + 4 - p[:, None, None, None]) // 5 == (q + 4 - p[:, None, None, None]) // 5),
        "causal, chunk 5",
        pads,
        seqlen_q=1,
    )


def test_documents_of_one_row():
    ids = torch.tensor([[0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]] * B)

    def mask(q, k, ids):
        ids = (ids > 0).cumsum(-1)
        return ids[:, None, -1:, None] == ids[:, None, None, :]

    check(mask, "documents", ids, seqlen_q=1)


def test_chunks_of_one_new_token_without_padding():
    """Both edges are the same for every sequence: numbers, not tensors."""
    check(lambda q, k: (k <= q) & (k // 5 == q // 5), "causal, chunk 5", seqlen_q=1)


def test_a_sum_over_the_batch_is_no_numbering_of_documents():
    flags = torch.tensor([[1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0], [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]])

    def mask(q, k, flags):
        ids = (flags == 1).cumsum(0)
        return ids[:, None, :, None] == ids[:, None, None, :]

    check(mask, "streamed mask [2, 1, 12, 12]", flags)


def test_a_sum_that_wraps_is_no_numbering_of_documents():
    def mask(q, k, flags):
        ids = ((flags == 1).cumsum(-1) * 100).to(torch.uint8).long()
        return ids[:, None, :, None] == ids[:, None, None, :]

    check(mask, "streamed mask [2, 1, 12, 12]", torch.ones(B, S, dtype=torch.long))


def test_blocks_with_a_hole_made_after_their_numbering_are_streamed():
    def mask(q, k, kinds):
        is_image = kinds == 1
        start = is_image & ~F.pad(is_image, (1, 0), value=0)[:, :-1]
        numbers = torch.cumsum(start.int(), dim=1) - 1
        is_image[:, 2] = False
        ids = torch.where(is_image, numbers, -1)
        row, key = ids[:, None, :, None], ids[:, None, None, :]
        return (k <= q) | ((row == key) & (row >= 0))

    check(mask, "streamed mask [2, 1, 12, 12]", KINDS)


def test_blocks_on_a_static_cache():
    """The ids are padded to the capacity of the cache."""

    def mask(q, k, kinds):
        ids = F.pad(image_ids(kinds), (0, 5), value=-1)
        rows = ids[:, None, :S, None]
        return (k <= q) | ((rows == ids[:, None, None, :]) & (rows >= 0))

    def function(q, k, v, kinds):
        return attend(q, k, v, mask(torch.arange(S)[:, None], torch.arange(S + 5)[None, :], kinds))

    recording = check_rewrite(function, *(torch.randn(B, H, n, D) for n in (S, S + 5, S + 5)), KINDS)
    assert (recording.reasons, recording.masks) == ([], ["causal or blocks"])


def test_ids_padded_with_a_block_of_their_own_are_streamed():
    """Padding with 0 repeats the number of the first block."""

    def function(q, k, v, kinds):
        ids = F.pad(image_ids(kinds), (0, 5), value=0)
        rows, keys = ids[:, None, :S, None], ids[:, None, None, :]
        causal = torch.arange(S + 5)[None, :] <= torch.arange(S)[:, None]
        return attend(q, k, v, causal | ((rows == keys) & (rows >= 0)))

    recording = check_rewrite(function, *(torch.randn(B, H, n, D) for n in (S, S + 5, S + 5)), KINDS)
    assert recording.masks == [f"streamed mask [2, 1, {S}, {S + 5}]"]
