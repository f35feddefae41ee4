"""Codes of which some tokens are read as they were: two attentions and their merge, or a reason."""

import pytest
import torch

from attnpatch import tbq4
from attnpatch.graph import value
from attnpatch.recent import FIRST, rows_for, with_recent
from attnpatch.testing.recording import check_rewrite, record
from attnpatch.writing import cache_write
from tests.rewrites.test_codes import DV, HKV, D, H, repeat_kv, unpack

B, S, LENGTH, NEW, RECENT = 2, 40, 33, 3, 6
POSITION = LENGTH - NEW


def args(new=NEW, dtype=torch.float32, position=None, length=S):
    """q, codes and norms of K and of V, their rings, and the position of the first row."""
    torch.manual_seed(0)
    position = LENGTH - new if position is None else position
    k, v = torch.randn(B, HKV, length, D).to(dtype), torch.randn(B, HKV, length, DV).to(dtype)
    rings = [torch.zeros(B, HKV, rows_for(RECENT), x.shape[3], dtype=dtype) for x in (k, v)]
    cache_write(*rings, k[:, :, : position + new], v[:, :, : position + new], torch.tensor(0), ring_from=FIRST)
    q = torch.randn(B, H, new, D).to(dtype)
    return q, *tbq4.encode(k), *tbq4.encode(v), *rings, torch.tensor(position)


def decode(c, norms, width, dtype):
    """attnpatch.tbq4.decode; it takes no norms in float64."""
    return unpack(c, norms).to(dtype) if norms.dtype == torch.float64 else tbq4.decode(c, norms, width, dtype)


def read(kc, kn, vc, vn, k_ring, v_ring, position, new, dtype, decode=decode):
    k = with_recent(decode(kc, kn, D, dtype), k_ring.to(dtype), position, new)
    v = with_recent(decode(vc, vn, DV, dtype), v_ring.to(dtype), position, new)
    return repeat_kv(k), repeat_kv(v)


def places(q, k, position):
    """Positions of rows and keys."""
    rows, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    return position + rows[:, None], keys


def causal(q, k, v, position):
    i, j = places(q, k, position)
    return (q @ k.transpose(-1, -2)).masked_fill(j > i, torch.finfo(q.dtype).min).softmax(-1) @ v


def model(mask=lambda i, j: j <= i, bias=None, softcap=None, lse=False, sinks=None, **options):
    """Attention as models write it, on what ``mask`` shows."""

    def attend(q, kc, kn, vc, vn, k_ring, v_ring, position):
        k, v = read(kc, kn, vc, vn, k_ring, v_ring, position, q.shape[2], q.dtype, **options)
        scores = q @ k.transpose(-1, -2) * 0.1
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        i, j = places(q, k, position)
        scores = scores if bias is None else scores + bias(i, j)
        scores = scores.masked_fill(~mask(i, j), torch.finfo(q.dtype).min)
        if sinks is not None:
            scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(B, -1, q.shape[2], 1)], -1)
            return scores.softmax(-1)[..., :-1] @ v
        o = scores.softmax(-1) @ v
        return torch.cat([o, torch.logsumexp(scores, -1, keepdim=True)], -1) if lse else o

    return attend


PADDING = torch.ones(B, S, dtype=torch.bool)
PADDING[0, :7] = PADDING[1, [5, 31]] = False
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.01])
FREE = torch.rand(H, NEW, S, generator=torch.Generator().manual_seed(1)) > 0.4
MASKS = {
    "causal": model(),
    "a window": model(lambda i, j: (j <= i) & (j > i - 12)),
    "a window within the recent tokens": model(lambda i, j: (j <= i) & (j > i - 3)),
    "a window without a token": model(lambda i, j: (j <= i - 8) & (j > i - 12)),
    "padding": model(lambda i, j: (j <= i) & PADDING[:, None, None, :]),
    "chunks": model(lambda i, j: (j <= i) & (j // 16 == i // 16)),
    "chunks of few": model(lambda i, j: (j <= i) & (j // 4 == i // 4)),
    "an end": model(lambda i, j: (j <= i) & (j < 31)),
    "ALiBi": model(bias=lambda i, j: -SLOPES[:, None, None] * (i - j).abs()),
    "ALiBi and padding": model(
        lambda i, j: (j <= i) & PADDING[:, None, None, :], lambda i, j: -SLOPES[:, None, None] * (i - j).abs()
    ),
    "a mask": model(lambda i, j: (j <= i) & FREE),
    "a bias": model(bias=lambda i, j: FREE.float() * 2),
    "a softcap": model(softcap=2.0),
    "sinks": model(sinks=torch.randn(H, generator=torch.Generator().manual_seed(2))),
    "the logsumexp, too": model(lse=True),
}


def check(attend, *given, **options):
    recording = check_rewrite(attend, *given, **options)
    assert recording.reasons == []
    assert recording.named("with_recent", "rshift", "bitwise_right_shift", "embedding") == []
    codes, kept = recording.named("attention_lse")
    assert [value(x).dtype for x in codes.args[1:3]] == [torch.uint8] * 2
    assert [value(x).shape[2] for x in kept.args[1:3]] == [FIRST + RECENT - 1 + given[0].shape[2]] * 2
    assert len(recording.named("merge")) == 1
    (mask,) = recording.masks
    assert f"first 4 and last {RECENT} tokens as they were" in mask
    return recording


@pytest.mark.parametrize("attend", MASKS.values(), ids=MASKS)
def test_masks(attend):
    check(attend, *args())


@pytest.mark.parametrize("position", [0, 1, 3, 4, 5, 9, 10, 11, 37])
@pytest.mark.parametrize("name", ["causal", "padding", "ALiBi"])
def test_positions(name, position):
    """From sequences shorter than the first tokens to a full buffer; a row of padding alone gives zeros."""
    i, j = position + torch.arange(NEW)[:, None], torch.arange(S)
    seen = ((j <= i) & (PADDING[:, None] if name == "padding" else True)).any(-1)
    seen = seen[:, None] if name == "padding" else seen
    check(MASKS[name], *args(position=position), rows=seen)


@pytest.mark.parametrize("new", [1, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_and_lengths(new, dtype):
    check(model(), *args(new, dtype, position=70, length=140))


def swapped(c):
    """The higher nibble of a byte first."""
    return torch.stack((c >> 4, c & 15), dim=-1).flatten(-2)


TURNS = {
    "no rotation": {"turned": lambda y: y},
    "channels in another order": {"turned": lambda y: y, "unpacked": swapped},
    "a factor": {"turned": lambda y: y * 3.0},
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_what_codes_stand_for_turns_alone(turn):
    """Queries of the ring's tokens, and their output, are not turned."""
    check(model(decode=lambda c, n, d, dtype: unpack(c, n, **turn).to(dtype)), *args())


def test_one_of_both_is_dense():
    def attend(q, k, vc, vn, v_ring, position):
        v = with_recent(decode(vc, vn, DV, q.dtype), v_ring, position, q.shape[2])
        return causal(q, repeat_kv(k), repeat_kv(v), position)

    q, _, _, vc, vn, _, v_ring, position = args()
    recording = check_rewrite(attend, q, torch.randn(B, HKV, S, D), vc, vn, v_ring, position)
    codes, kept = recording.named("attention_lse")
    assert [value(x).dtype for x in codes.args[1:3]] == [torch.float32, torch.uint8]
    assert [value(x).shape[2] for x in kept.args[1:3]] == [FIRST + RECENT - 1 + NEW] * 2


def test_int8():
    def attend(q, k8, scale, v8, k_ring, v_ring, position):
        k, v = (
            with_recent((x * scale).to(q.dtype), ring, position, q.shape[2]) for x, ring in ((k8, k_ring), (v8, v_ring))
        )
        return causal(q, repeat_kv(k), repeat_kv(v), position)

    q, _, _, _, _, k_ring, v_ring, position = args()
    k8, v8 = (torch.randint(-99, 99, (B, HKV, S, width), dtype=torch.int8) for width in (D, DV))
    recording = check_rewrite(attend, q, k8, torch.rand(B, HKV, S, 1) / 99, v8, k_ring, v_ring, position)
    codes, kept = recording.named("attention_lse")
    assert [value(x).dtype for x in (*codes.args[1:3], *kept.args[1:3])] == [torch.int8] * 2 + [torch.float32] * 2


# What does not match


def unlike(q, kc, kn, vc, vn, k_ring, v_ring, position):
    """V keeps one token less."""
    k = with_recent(decode(kc, kn, D, q.dtype), k_ring, position, q.shape[2])
    v = with_recent(decode(vc, vn, DV, q.dtype), v_ring[:, :, :-1], position, q.shape[2])
    return causal(q, repeat_kv(k), repeat_kv(v), position)


def elsewhere(q, kc, kn, vc, vn, k_ring, v_ring, position):
    """V is read as if it were one token further."""
    k = with_recent(decode(kc, kn, D, q.dtype), k_ring, position, q.shape[2])
    v = with_recent(decode(vc, vn, DV, q.dtype), v_ring, position + 1, q.shape[2])
    return causal(q, repeat_kv(k), repeat_kv(v), position)


def beside_codes(q, kc, kn, vc, vn, k_ring, v_ring, position):
    k = with_recent(decode(kc, kn, D, q.dtype), k_ring, position, q.shape[2])
    return causal(q, repeat_kv(k), repeat_kv(decode(vc, vn, DV, q.dtype)), position)


def turned_around(q, kc, kn, vc, vn, k_ring, v_ring, position):
    """Which keys are recent is asked of another dimension."""
    k = decode(kc, kn, D, q.dtype).transpose(1, 2)
    k = with_recent(k, k_ring.transpose(1, 2)[:, :1].expand(-1, S, -1, -1)[:, :, :1].repeat(1, 1, 80, 1), position, 1)
    v = decode(vc, vn, DV, q.dtype)
    return causal(q, repeat_kv(k.transpose(1, 2)), repeat_kv(v), position)


def overwritten(q, kc, kn, vc, vn, k_ring, v_ring, position):
    """The ring of V is cleared after it is read."""
    k, v = read(kc, kn, vc, vn, k_ring, v_ring, position, q.shape[2], q.dtype)
    v_ring.zero_()
    return causal(q, k, v, position)


UNLIKE = {
    unlike: "other tokens of K than of V are kept as they were",
    elsewhere: "other tokens of K than of V are kept as they were",
    beside_codes: "tokens of one of K and V are kept as they were, and the other is codes or in pages",
    turned_around: "the keys of k_1 are not its dimension 2",
    overwritten: "v_ring_ is written in place",
}


@pytest.mark.parametrize(("attend", "reason"), UNLIKE.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_not_read_so(attend, reason):
    """Attention then reads what is multiplied out, which is right, and the report says why."""
    recording = check_rewrite(attend, *args())
    assert reason in recording.masks[0], recording.masks
    assert recording.named("with_recent", "rshift") != []


def test_no_codes():
    """Tokens of a dense K put in the place of others of it: attention on what that makes."""

    def attend(q, k, ring, position):
        k = with_recent(k, ring, position, q.shape[2])
        return (q @ k.transpose(-1, -2)).softmax(-1) @ k

    ring = torch.randn(1, 2, rows_for(RECENT), D)
    recording = check_rewrite(attend, torch.randn(1, 2, NEW, D), torch.randn(1, 2, S, D), ring, torch.tensor(POSITION))
    assert len(recording.named("attention")) == len(recording.named("with_recent")) == 1
    assert record(attend, torch.randn(1, 2, NEW, D), torch.randn(1, 2, S, D), ring, torch.tensor(3)).masks == ["none"]
