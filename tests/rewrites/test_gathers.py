"""K and V gathered from pools: the pool and the ids reach the operator where the ids number the keys, else the copy."""

import operator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from attnpatch.graph import shape
from attnpatch.testing.recording import RecordingBackend, check_rewrite, clones, record
from attnpatch.testing.tolerance import assert_same_function, run_float64
from tests.combinations import in_turn

B, H, HKV, D, DV = 2, 6, 2, 16, 24
PAGES, BLOCKS, PAGE = 9, 3, 4
S, GROUP = BLOCKS * PAGE, H // HKV


def repeat_kv(x):
    b, heads, s, d = x.shape
    return x[:, :, None].expand(b, heads, GROUP, s, d).reshape(b, heads * GROUP, s, d)


def eager(q, k, v, mask=None):
    scores = q @ k.transpose(-1, -2) * 0.25
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def sdpa(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25)


def pool(*sizes, used):
    """A pool of which nothing but ``used`` may be read."""
    x = torch.full(sizes, torch.nan)
    x[used.flatten()] = torch.randn(used.numel(), *sizes[1:])
    return x


def table(dtype=torch.int64):
    return torch.randperm(PAGES)[: B * BLOCKS].reshape(B, BLOCKS).to(dtype)


def slots(ids):
    return (ids[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)


def query(rows=1):
    return torch.randn(B, H, rows, D)


def of_operator(recording):
    """The one operator of a graph: the shapes of its k, v and block table."""
    (node,) = recording.named("attention")
    ids = node.kwargs.get("block_table")
    return *(tuple(shape(x)) for x in node.args[1:3]), None if ids is None else tuple(shape(ids))


def check_paged(function, *args, page, ids=(B, BLOCKS), gone=("index_select", "embedding", "index"), **kwargs):
    """``function`` is rewritten to a call on pages of ``page`` keys, and none of its gathers is left."""
    recording = check_rewrite(function, *args, **kwargs)
    assert recording.reasons == []
    k, v, found = of_operator(recording)
    assert (k[1:3], v[1:3], found) == ((HKV, page), (HKV, page), ids)
    assert recording.sites[0].mask.endswith(", pages")
    assert recording.sites[0].num_kv_heads == HKV
    gathers = [n for n in recording.named("getitem") if any(x in n.all_input_nodes[1:] for x in n.all_input_nodes)]
    assert (recording.named(*gone), gathers) == ([], [])
    return recording


def check_gathered(function, *args, **kwargs):
    """``function`` is rewritten, and what it gathers stays gathered."""
    recording = check_rewrite(function, *args, **kwargs)
    assert recording.reasons == []
    assert of_operator(recording)[2] is None
    assert "pages" not in recording.sites[0].mask
    return recording


HEADS_FIRST = {
    "permute_reshape": lambda pool, ids: pool[ids].permute(0, 2, 1, 3, 4).reshape(B, HKV, S, -1),
    "transpose_flatten": lambda pool, ids: pool[ids].transpose(1, 2).flatten(2, 3),
    "tuple": lambda pool, ids: pool[(ids,)].transpose(1, 2).reshape(B, HKV, S, -1),
    "whole_dimensions_behind": lambda pool, ids: pool[ids, :, :].transpose(1, 2).reshape(B, HKV, S, -1),
    "ellipsis_behind": lambda pool, ids: pool[ids, ...].transpose(1, 2).reshape(B, HKV, S, -1),
    "ellipsis_in_front": lambda pool, ids: pool[..., ids, :, :, :].transpose(1, 2).reshape(B, HKV, S, -1),
    "aten_index": lambda pool, ids: torch.ops.aten.index(pool, [ids]).transpose(1, 2).reshape(B, HKV, S, -1),
    "flat_ids": lambda pool, ids: (
        pool[ids.flatten()].view(B, BLOCKS, HKV, PAGE, -1).transpose(1, 2).reshape(B, HKV, S, -1)
    ),
    "index_select": lambda pool, ids: (
        torch.index_select(pool, 0, ids.view(-1)).view(B, BLOCKS, HKV, PAGE, -1).transpose(1, 2).reshape(B, HKV, S, -1)
    ),
    "embedding": lambda pool, ids: (
        F.embedding(ids, pool.view(PAGES, -1)).view(B, BLOCKS, HKV, PAGE, -1).transpose(1, 2).reshape(B, HKV, S, -1)
    ),
    "torch_embedding": lambda pool, ids: (
        torch.embedding(pool.view(PAGES, -1), ids).view(B, BLOCKS, HKV, PAGE, -1).transpose(1, 2).reshape(B, HKV, S, -1)
    ),
    "heads_outside": lambda pool, ids: pool.transpose(0, 1)[:, ids].transpose(0, 1).reshape(B, HKV, S, -1),
    "ids_of_blocks_first": lambda pool, ids: pool[ids.T].permute(1, 2, 0, 3, 4).reshape(B, HKV, S, -1),
    "contiguous": lambda pool, ids: pool[ids].transpose(1, 2).contiguous().view(B, HKV, S, -1).contiguous(),
}
"""Gathers from a pool [pages, kv heads, page, width]."""


@pytest.mark.parametrize(("gather", "attend"), in_turn(HEADS_FIRST, [eager, sdpa]))
def test_pages_with_heads_first(gather, attend):
    def function(q, k_pool, v_pool, ids):
        return attend(q, repeat_kv(gather(k_pool, ids)), repeat_kv(gather(v_pool, ids)))

    ids = table()
    pools = [pool(PAGES, HKV, PAGE, width, used=ids) for width in (D, DV)]
    check_paged(function, query(), *pools, ids, page=PAGE)


TOKENS_FIRST = {
    "view": lambda pool, ids: pool[ids].view(B, -1, HKV, pool.shape[-1]).transpose(1, 2),
    "flatten": lambda pool, ids: pool[ids].flatten(1, 2).permute(0, 2, 1, 3),
    "index_select": lambda pool, ids: pool.index_select(0, ids.flatten()).view(B, S, HKV, -1).transpose(1, 2),
    "by_token": lambda pool, ids: pool.view(PAGES * PAGE, HKV, -1)[slots(ids)].transpose(1, 2),
    "by_token_flat": lambda pool, ids: pool.flatten(0, 1)[slots(ids).flatten()].view(B, S, HKV, -1).transpose(1, 2),
}
"""Gathers from a pool [pages, page, kv heads, width]."""


@pytest.mark.parametrize("rows", [1, 5], ids=["decode", "append"])
@pytest.mark.parametrize("attend", [eager, sdpa])
@pytest.mark.parametrize("gather", TOKENS_FIRST, ids=str)
def test_pages_with_tokens_first(gather, attend, rows):
    def function(q, k_pool, v_pool, ids):
        k, v = (TOKENS_FIRST[gather](pool, ids) for pool in (k_pool, v_pool))
        return attend(q, repeat_kv(k), repeat_kv(v))

    ids = table()
    pools = [pool(PAGES, PAGE, HKV, width, used=ids) for width in (D, DV)]
    page, size = (1, (B, S)) if gather.startswith("by_token") else (PAGE, (B, BLOCKS))
    check_paged(function, query(rows), *pools, ids, page=page, ids=size)


@pytest.mark.parametrize("ids", [table(torch.int32), table()[:, ::2], table()[:, 1:2], table().T.contiguous().T])
def test_ids(ids):
    """Of both dtypes, with any strides, one block."""

    def function(q, k_pool, v_pool, ids):
        k, v = (pool[ids].transpose(1, 2).reshape(B, HKV, -1, D) for pool in (k_pool, v_pool))
        return eager(q, repeat_kv(k), repeat_kv(v))

    pools = [pool(PAGES, HKV, PAGE, D, used=ids) for _ in range(2)]
    check_paged(function, query(), *pools, ids, page=PAGE, ids=tuple(ids.shape))


def test_negative_ids_count_from_the_end():
    """``k[:, :, [-4, ..., -1]]`` of one sequence are its last keys."""

    def function(q, k, v):
        last = torch.arange(-4, 0)
        return sdpa(q, repeat_kv(k[:, :, last]), repeat_kv(v[:, :, last]))

    pools = [torch.randn(1, HKV, S, D) for _ in range(2)]
    check_paged(function, query()[:1], *pools, page=1, ids=(1, 4))


def test_one_sequence():
    def function(q, k_pool, v_pool, ids):
        k, v = (pool[ids].transpose(0, 1)[None].reshape(1, HKV, S, D) for pool in (k_pool, v_pool))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    ids = table()[0]
    pools = [pool(PAGES, HKV, PAGE, D, used=ids) for _ in range(2)]
    check_paged(function, query()[:1], *pools, ids, page=PAGE, ids=(1, BLOCKS))


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_dynamic_shapes(attend):
    def function(q, k_pool, v_pool, ids):
        k, v = (pool[ids].transpose(1, 2).reshape(ids.shape[0], HKV, -1, D) for pool in (k_pool, v_pool))
        return attend(q, repeat_kv(k), repeat_kv(v))

    ids = table()
    pools = [pool(PAGES, HKV, PAGE, D, used=ids) for _ in range(2)]
    recording = check_rewrite(function, query(5), *pools, ids, dynamic=True)
    assert recording.masks == ["none, pages"]


@pytest.mark.parametrize("attend", [eager, sdpa])
def test_flat_ids_of_sizes_known_only_at_run_time(attend):
    """PagedCache's spelling: the ids are flattened for index_select, and batch and blocks told apart again."""

    def function(q, k_pool, v_pool, ids):
        pages = (x.index_select(0, ids.flatten()).unflatten(0, ids.shape) for x in (k_pool, v_pool))
        k, v = (x.transpose(1, 2).flatten(2, 3) for x in pages)
        return attend(q, k, v)

    ids = table()
    pools = [pool(PAGES, HKV, PAGE, D, used=ids) for _ in range(2)]
    recording = check_rewrite(function, query(5)[:, :HKV], *pools, ids, dynamic=True)
    assert recording.masks == ["none, pages"]
    assert recording.named("index_select") == []


def test_scales_of_one_sequence():
    """A batch of 1 has no axis in the scales, and one in the codes."""

    def function(q, k, v, s, ids):
        k, v = ((x[ids].float() * s[ids]).transpose(1, 2).flatten(2, 3) for x in (k, v))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    codes = (torch.randn(2, PAGES, HKV, PAGE, D) * 40).clamp(-127, 127).to(torch.int8)
    recording = check_rewrite(function, query()[:1], *codes, torch.rand(PAGES, HKV, PAGE, 1) * 0.05, table()[:1])
    assert recording.masks == ["none, pages, int8 K, int8 V"]


REPEATS = {
    "pool": lambda pool, ids: pool.repeat_interleave(GROUP, 1)[ids].transpose(1, 2).reshape(B, H, S, D),
    "pages": lambda pool, ids: pool[ids].repeat_interleave(GROUP, 2).transpose(1, 2).reshape(B, H, S, D),
    "keys": lambda pool, ids: pool[ids].transpose(1, 2).reshape(B, HKV, S, D).repeat_interleave(GROUP, 1),
    "other_order": lambda pool, ids: pool[ids].transpose(1, 2).reshape(B, HKV, S, D).repeat(1, GROUP, 1, 1),
    "none": lambda pool, ids: pool[ids].transpose(1, 2).reshape(B, HKV, S, D),
}


@pytest.mark.parametrize("repeat", REPEATS.values(), ids=REPEATS)
def test_repeats_before_and_after(repeat):
    def function(q, k_pool, v_pool, ids):
        k, v = repeat(k_pool, ids), repeat(v_pool, ids)
        return eager(q[:, : k.shape[1]], k, v)

    ids = table()
    pools = [pool(PAGES, HKV, PAGE, D, used=ids) for _ in range(2)]
    check_paged(function, query(), *pools, ids, page=PAGE)


def both(make):
    """Attention on K and V that ``make`` takes out of one pool."""

    def function(q, pools, ids):
        k, v = make(pools, ids)
        return eager(q, *(repeat_kv(x.transpose(1, 2).reshape(B, HKV, S, D)) for x in (k, v)))

    return function


ONE_POOL = {
    "first_dimension": (0, lambda pools, ids: (pools[0][ids], pools[1][ids])),
    "second_dimension": (1, lambda pools, ids: (pools[:, 0][ids], pools[:, 1][ids])),
    "unbind": (1, lambda pools, ids: (x[ids] for x in pools.unbind(1))),
    "after": (1, lambda pools, ids: (pools[ids][:, :, 0], pools[ids][:, :, 1])),
    "unbind_after": (1, lambda pools, ids: pools[ids].unbind(2)),
    "select_after": (1, lambda pools, ids: (pools[ids].select(2, 0), pools[ids].select(2, -1))),
    "outside_after": (0, lambda pools, ids: (pools[:, ids][0], pools[:, ids][1])),
    "last_dimension_after": (4, lambda pools, ids: pools[ids].unbind(-1)),
}


@pytest.mark.parametrize(("dim", "make"), ONE_POOL.values(), ids=ONE_POOL)
def test_one_pool_for_k_and_v(dim, make):
    ids = table()
    pools = torch.stack([pool(PAGES, HKV, PAGE, D, used=ids) for _ in range(2)], dim)
    check_paged(both(make), query(), pools, ids, page=PAGE)


def test_ids_computed_twice():
    def function(q, k_pool, v_pool, ids):
        k, v = (pool.flatten(0, 1)[slots(ids)].transpose(1, 2) for pool in (k_pool, v_pool))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    ids = table()
    pools = [pool(PAGES, PAGE, HKV, D, used=ids) for _ in range(2)]
    check_paged(function, query(), *pools, ids, page=1, ids=(B, S))


MASKS = {
    "length": lambda rows, keys, n: keys < n[:, None, None, None],
    "causal": lambda rows, keys, n: keys <= rows + n[:1],
    "window": lambda rows, keys, n: (keys <= rows + n[:1]) & (keys > rows + n[:1] - 4),
    "padding": lambda rows, keys, n: (torch.arange(S) < n[:, None])[:, None, None, :].expand(B, 1, len(rows), S),
}


@pytest.mark.parametrize(("mask", "attend"), in_turn(MASKS, [sdpa, eager]))
def test_masks(mask, attend):
    """A mask counts the keys of the sequence, not the rows of the pool."""

    def function(q, k_pool, v_pool, ids, n):
        k, v = (pool[ids].transpose(1, 2).reshape(B, HKV, S, D) for pool in (k_pool, v_pool))
        visible = mask(torch.arange(2)[:, None], torch.arange(S)[None, :], n)
        return attend(q, repeat_kv(k), repeat_kv(v), torch.where(visible, 0.0, -torch.inf))

    ids = table()
    pools = [pool(PAGES, HKV, PAGE, D, used=ids) for _ in range(2)]
    recording = check_paged(function, query(2), *pools, ids, torch.tensor([5, 9]), page=PAGE)
    assert "streamed" not in recording.masks[0]


def test_two_layers_share_the_arranged_ids():
    def function(q, k_pool, v_pool, ids):
        for _ in range(2):
            k, v = (x.index_select(0, ids).transpose(0, 1)[None] for x in (k_pool, v_pool))
            q = sdpa(q, repeat_kv(k), repeat_kv(v))
        return q

    ids = table()[0]
    recording = check_rewrite(function, query()[:1], *(pool(PAGES, HKV, D, used=ids) for _ in range(2)), ids)
    first, second = recording.named("attention")
    assert first.kwargs["block_table"] is second.kwargs["block_table"]
    assert recording.named("remainder") == []  # index_select takes no negative ids


def test_enable_gqa():
    def function(q, k_pool, v_pool, ids):
        k, v = (x[ids].transpose(1, 2).reshape(B, HKV, S, -1) for x in (k_pool, v_pool))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    ids = table()
    pools = [pool(PAGES, HKV, PAGE, width, used=ids) for width in (D, DV)]
    check_paged(function, query(3), *pools, ids, page=PAGE)


def test_logsumexp_beside():
    def function(q, k_pool, v_pool, ids):
        k, v = (repeat_kv(x[ids].transpose(1, 2).reshape(B, HKV, S, -1)) for x in (k_pool, v_pool))
        scores = q @ k.mT * 0.25
        return torch.cat([scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)], -1)

    ids = table()
    pools = [pool(PAGES, HKV, PAGE, width, used=ids) for width in (D, DV)]
    recording = check_rewrite(function, query(3), *pools, ids)
    (node,) = recording.named("attention_lse")
    assert (recording.masks, shape(node.kwargs["block_table"])) == (["none, pages"], (B, BLOCKS))


def test_einsum_without_rows():
    def function(q, k_pool, v_pool, ids):
        k, v = (x[ids].view(B, S, HKV, -1) for x in (k_pool, v_pool))
        p = torch.einsum("bgnd,bsgd->bgns", q, k).softmax(-1)
        return torch.einsum("bgns,bsgd->bgnd", p, v)

    ids = table()
    pools = [pool(PAGES, PAGE, HKV, width, used=ids) for width in (D, DV)]
    check_paged(function, torch.randn(B, HKV, GROUP, D), *pools, ids, page=PAGE)


def test_bmm():
    def function(q, k_pool, v_pool, ids):
        k, v = (x[ids].transpose(1, 2).reshape(B, HKV, S, -1).repeat_interleave(GROUP, 1) for x in (k_pool, v_pool))
        p = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1)
        return torch.bmm(p, v.flatten(0, 1)).view(B, H, -1, DV)

    ids = table()
    pools = [pool(PAGES, HKV, PAGE, width, used=ids) for width in (D, DV)]
    check_paged(function, query(3), *pools, ids, page=PAGE)


def test_one_kv_head_without_a_dimension():
    def function(q, k_pool, v_pool, ids):
        k, v = (x[slots(ids)][:, None].expand(B, H, S, -1) for x in (k_pool, v_pool))
        return sdpa(q, k, v)

    ids = table()
    pools = [pool(PAGES * PAGE, width, used=slots(ids)) for width in (D, DV)]
    recording = check_rewrite(function, query(3), *pools, ids)
    assert of_operator(recording) == ((PAGES * PAGE, 1, 1, D), (PAGES * PAGE, 1, 1, DV), (B, S))


# Writes


def check_writes(function, *args):
    """Output and arguments after two runs are those of the original; returns the recording."""
    backend = RecordingBackend()
    compiled = torch.compile(function, backend=backend, dynamic=False)
    ours, theirs = clones(args), clones(args)
    exact = [x.double() if x.is_floating_point() else x for x in clones(args)]
    with torch.no_grad():
        for _ in range(2):
            y, original, y64 = compiled(*ours), function(*theirs), run_float64(function, *exact)
            assert_same_function(y, original, y64)
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert (len(backend.graphs), backend.reasons) == (1, [])
    return backend


def write_index_copy(x, at, new):
    x.flatten(0, 1).index_copy_(0, at, new)


def write_by_index(x, at, new):
    x.view(PAGES * PAGE, HKV, D)[at] = new


def write_index_put(x, at, new):
    x.index_put_((at // PAGE, at % PAGE), new)


@pytest.mark.parametrize("write", [write_index_copy, write_by_index, write_index_put])
@pytest.mark.parametrize("attend", [eager, sdpa])
def test_a_write_before_the_gather_stays_before(attend, write):
    def function(q, k_pool, v_pool, ids, at, new):
        write(k_pool, at, new)
        write(v_pool, at, new * 2)
        k, v = (pool[ids].view(B, S, HKV, D).transpose(1, 2) for pool in (k_pool, v_pool))
        return attend(q, repeat_kv(k), repeat_kv(v))

    ids, new = table(), torch.randn(B, HKV, D)
    pools = [pool(PAGES, PAGE, HKV, D, used=ids) for _ in range(2)]
    backend = check_writes(function, query(), *pools, ids, ids[:, -1] * PAGE + 3, new)
    assert of_operator(backend)[2] == (B, BLOCKS)


@pytest.mark.parametrize("name", ["k", "v", "ids"])
@pytest.mark.parametrize("attend", [eager, sdpa])
def test_a_write_after_the_gather_keeps_the_gather(attend, name):
    def function(q, k_pool, v_pool, ids, new):
        k, v = (pool[ids].view(B, S, HKV, D).transpose(1, 2) for pool in (k_pool, v_pool))
        if name == "ids":
            ids.copy_(ids.roll(1, 1))
        else:
            (k_pool if name == "k" else v_pool).index_copy_(0, ids[0, :1], new[None])
        return attend(q, repeat_kv(k), repeat_kv(v))

    ids = table()
    pools = [pool(PAGES, PAGE, HKV, D, used=ids) for _ in range(2)]
    backend = check_writes(function, query(), *pools, ids, torch.randn(PAGE, HKV, D))
    assert of_operator(backend)[2] is None


def test_a_write_between_the_two_gathers_keeps_them():
    def function(q, k_pool, v_pool, ids):
        k = k_pool[ids].view(B, S, HKV, D).transpose(1, 2)
        ids.copy_(ids.roll(1, 1))
        v = v_pool[ids].view(B, S, HKV, D).transpose(1, 2)
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    ids = table()
    backend = check_writes(function, query(), *(pool(PAGES, PAGE, HKV, D, used=ids) for _ in range(2)), ids)
    assert of_operator(backend)[2] is None


def test_a_write_through_a_view_taken_before_is_seen():
    """The gather reads a view that is older than the write: it sees what was written, and so must the operator."""

    def function(q, k_pool, v_pool, ids, at, new):
        views = [x.view(PAGES * PAGE, HKV, D) for x in (k_pool, v_pool)]
        write_index_put(k_pool, at, new)
        k, v = (view[slots(ids)].transpose(1, 2) for view in views)
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    ids, new = table(), torch.randn(B, HKV, D)
    pools = [pool(PAGES, PAGE, HKV, D, used=ids) for _ in range(2)]
    backend = check_writes(function, query(), *pools, ids, ids[:, -1] * PAGE + 3, new)
    assert of_operator(backend)[2] == (B, S)


def put(x, new):
    x[:, :, -1] = new


WRITES = {
    "setitem": put,
    "copy_of_a_view": lambda x, new: x[:, :, -1].copy_(new),
    "scaled_view": lambda x, new: x.unbind(2)[0].mul_(3.0),
    "foreach": lambda x, new: torch._foreach_mul_([x], 3.0),
    "operator": lambda x, new: x.__ipow__(2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("early", [True, False], ids=["pages", "keys"])
def test_a_write_into_what_was_gathered_is_not_lost(early, write):
    """New keys put into the copy are not in the pool."""

    def gathered(pool, ids, new):
        x = pool[ids]
        if early:
            write(x, new)
        x = x.transpose(1, 2).reshape(B, HKV, S, D)
        if not early:
            write(x, new)
        return x

    def function(q, k_pool, v_pool, ids, new):
        return sdpa(q, *(repeat_kv(gathered(pool, ids, new)) for pool in (k_pool, v_pool)))

    ids = table()
    pools = [pool(PAGES, HKV, PAGE, D, used=ids) for _ in range(2)]
    backend = check_writes(function, query(), *pools, ids, torch.randn(D))
    assert of_operator(backend)[2] is None


def test_a_write_into_both_of_one_pool_is_not_lost():
    """K and V are parts of what was gathered, and written before they are taken out of it."""

    def function(q, pools, ids, new):
        both = pools[ids]
        both[:, -1] = new
        k, v = (x.transpose(1, 2).reshape(B, HKV, S, D) for x in both.unbind(2))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    ids = table()
    backend = check_writes(function, query(), pool(PAGES, 2, HKV, PAGE, D, used=ids), ids, torch.randn(D))
    assert of_operator(backend)[2] is None


@pytest.mark.parametrize("name", ["ifloordiv", "imod", "ixor", "ilshift", "irshift", "ipow"])
def test_ids_written_by_an_operator_after_the_gather(name):
    def function(q, k_pool, v_pool, ids):
        k, v = (x[ids].transpose(1, 2).reshape(B, HKV, S, D) for x in (k_pool, v_pool))
        getattr(operator, name)(ids, 2)
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    given = query(), *(torch.randn(PAGES, HKV, PAGE, D) for _ in range(2)), table() % 3
    check_gathered(function, *given)


# What must stay gathered


def test_k_and_v_gathered_by_different_ids():
    def function(q, k_pool, v_pool, k_ids, v_ids):
        k, v = (p[ids].transpose(1, 2).reshape(B, HKV, S, D) for p, ids in ((k_pool, k_ids), (v_pool, v_ids)))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    ids = table()
    pools = [pool(PAGES, HKV, PAGE, D, used=ids) for _ in range(2)]
    check_gathered(function, query(), *pools, ids, ids.flip(1))


def test_k_alone_gathered():
    def function(q, k_pool, v, ids):
        return sdpa(q, repeat_kv(k_pool[ids].transpose(1, 2).reshape(B, HKV, S, D)), repeat_kv(v))

    ids = table()
    check_gathered(function, query(), pool(PAGES, HKV, PAGE, D, used=ids), torch.randn(B, HKV, S, D), ids)


def test_an_empty_pool():
    def function(q, k_pool, v_pool, ids):
        return sdpa(q, *(x[ids].transpose(1, 2).reshape(B, HKV, 0, D) for x in (k_pool, v_pool)))

    recording = record(
        function, query()[:, :HKV], *torch.zeros(2, 0, HKV, PAGE, D), torch.zeros(B, 0, dtype=torch.int64)
    )
    assert of_operator(recording)[2] is None


def test_pools_of_different_sizes():
    def function(q, k_pool, v_pool, ids):
        k, v = (x[ids].transpose(1, 2).reshape(B, HKV, S, D) for x in (k_pool, v_pool))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    ids = table()
    pools = [pool(PAGES + extra, HKV, PAGE, D, used=ids) for extra in (0, 1)]
    check_gathered(function, query(), *pools, ids)


NOT_KEYS = {
    "batch": lambda x: x[torch.tensor([1, 0])],
    "batch_index_select": lambda x: x.index_select(0, torch.tensor([1, 1])),
    "heads": lambda x: x[:, torch.tensor([1, 0])],
    "keys_of_each_sequence": lambda x: x[:, :, torch.tensor([3, 0, 7])],
    "bool": lambda x: x[:, :, torch.arange(S) % 2 == 0],
    "features": lambda x: x[..., torch.arange(D - 1, -1, -1)],
    "sequences_and_keys": lambda x: x[torch.arange(B)[:, None], :, torch.tensor([[3, 0, 7], [1, 2, 4]])].transpose(
        1, 2
    ),
    "flip": lambda x: x.flip(2),
}


@pytest.mark.parametrize("pick", NOT_KEYS.values(), ids=NOT_KEYS)
def test_what_is_no_gather_of_the_keys(pick):
    """A reordered batch (beam search), a choice of heads, keys picked alike for all sequences."""

    def function(q, k, v):
        return sdpa(q, repeat_kv(pick(k)), repeat_kv(pick(v)))

    args = query(), torch.randn(B, HKV, S, D), torch.randn(B, HKV, S, D)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_gathered(function, *args)


def test_a_pool_that_the_layout_would_copy():
    """A width that is split around the page: the pool as [pages, heads, page, width] would be a copy of all of it."""

    def function(q, k_pool, v_pool, ids):
        k, v = (x[ids].permute(0, 2, 1, 4, 3, 5).reshape(B, HKV, S, D) for x in (k_pool, v_pool))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    ids = table()
    check_gathered(function, query(), *(pool(PAGES, HKV, D // 8, PAGE, 8, used=ids) for _ in range(2)), ids)


def test_an_embedding_that_changes_its_weight():
    def function(q, k_pool, v_pool, ids):
        k, v = (
            F.embedding(ids, x.view(PAGES, -1), max_norm=1.0).view(B, BLOCKS, HKV, PAGE, D) for x in (k_pool, v_pool)
        )
        return sdpa(q, *(repeat_kv(x.transpose(1, 2).reshape(B, HKV, S, D)) for x in (k, v)))

    recording = record(function, query(), *(torch.randn(PAGES, HKV, PAGE, D) for _ in range(2)), table())
    assert (recording.reasons, of_operator(recording)[2]) == ([], None)


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_gradients_need_the_gather(wanted):
    """There is no backward to a pool; nor can q have one of such a call."""

    def function(q, k_pool, v_pool, ids):
        k, v = (x[ids].transpose(1, 2).reshape(B, HKV, S, D) for x in (k_pool, v_pool))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    ids = table()
    q, k, v = query(), *(torch.randn(PAGES, HKV, PAGE, D) for _ in range(2))
    leaf = {"q": q, "k": k, "v": v}[wanted].requires_grad_()
    backend = RecordingBackend()
    (ours,) = torch.autograd.grad(torch.compile(function, backend=backend)(q, k, v, ids).square().sum(), leaf)
    (theirs,) = torch.autograd.grad(function(q, k, v, ids).square().sum(), leaf)
    torch.testing.assert_close(ours, theirs)
    assert of_operator(backend)[2] is None


# transformers' continuous batching


def hf_layer(window=1):
    """What its attention function is given: a module, and a cache of one layer."""
    cache_module = pytest.importorskip("transformers.generation.continuous_batching.cache")
    cache = SimpleNamespace(
        layer_index_to_group_indices={0: (0, 0)}, sliding_windows={0: window}, sentinel_index=PAGES * PAGE - 1
    )
    cache.update = cache_module.PagedAttentionCache.update.__get__(cache)
    return SimpleNamespace(layer_idx=0, num_key_value_groups=GROUP, sliding_window=None), cache


def hf_function(name, window=1):
    module, cache = hf_layer(window)
    integration = pytest.importorskip(f"transformers.integrations.{name}_paged")
    attend = getattr(
        integration, {"sdpa": "sdpa_attention_paged_forward", "eager": "eager_paged_attention_forward"}[name]
    )

    def function(q, new_k, new_v, k_pool, v_pool, reads, writes, mask):
        cache.key_cache, cache.value_cache = [k_pool], [v_pool]
        indices = {"read_index": [reads], "write_index": [writes]}
        return attend(module, q, new_k, new_v, mask, scaling=0.25, cache=cache, **indices)[0]

    return function


def hf_args(name, rows=3, keys=11):
    """Packed queries of one batch, a pool of tokens, and where in it they read and write."""
    order = torch.randperm(PAGES * PAGE - 1)[:keys]
    pools = [pool(PAGES * PAGE, HKV, D, used=order) for _ in range(2)]
    visible = torch.arange(keys)[None, :] <= torch.arange(rows)[:, None] + keys - rows
    mask = visible if name == "sdpa" else torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    new = [torch.randn(1, HKV, rows, D) for _ in range(2)]
    return torch.randn(1, H, rows, D), *new, *pools, order, order[-rows:], mask[None, None]


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_continuous_batching(name):
    """``paged|sdpa`` and ``paged|eager``: what is written is read back by id, page size 1."""
    backend = check_writes(hf_function(name), *hf_args(name))
    assert of_operator(backend) == ((PAGES * PAGE, HKV, 1, D), (PAGES * PAGE, HKV, 1, D), (1, 11))
    assert backend.named("index_select") == []


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_continuous_batching_with_a_window(name):
    """Old keys are read, new ones scattered among them, and only then is the pool written: no pool holds all keys."""
    *args, reads, writes, mask = hf_args(name)
    reads = torch.cat([reads[:-3], torch.full((3,), PAGES * PAGE - 1)])
    args[4][-1], args[3][-1] = 0.0, 0.0
    backend = check_writes(hf_function(name, window=8), *args, reads, writes, mask)
    assert of_operator(backend)[2] is None
    assert len(backend.named("masked_scatter_")) == 2
