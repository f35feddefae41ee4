"""K and V unpacked of integers of 4 bits: the operator gets codes, scales and shifts, or the report says why not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch.graph import shape, value
from attnpatch.tbq4.codec import pack
from attnpatch.testing.recording import record
from tests.rewrites.test_codes import (
    HKV,
    NIBBLES,
    ORDERS,
    UNPACKS,
    B,
    H,
    S,
    check_same,
    check_unpacked,
    eager,
    nibbles,
    repeat_kv,
    sdpa,
)

D, GROUPS = 32, 2


def integers(x, groups=GROUPS, dtype=torch.float32):
    """Codes, scales and zero points of vectors, ``(integer - zero) * scale``."""
    wide = x.unflatten(-1, (groups, -1))
    low, high = wide.amin(-1), wide.amax(-1)
    scale = ((high - low) / 15).to(dtype)
    zero = (-low / scale).to(dtype)
    codes = (wide / scale[..., None] + zero[..., None]).round().clamp(0, 15).to(torch.uint8)
    return pack(codes.flatten(-2)), scale, zero


def stored(width=D, groups=GROUPS, dtype=torch.float32, rows=(B, HKV, S)):
    return integers(torch.randn(*rows, width), groups, dtype)


def args(rows=3, dtype=torch.float32, **options):
    return torch.randn(B, H, rows, options.get("width", D)).to(dtype), *stored(**options), *stored(**options)


def grouped(codes, scale, unpacked=nibbles):
    """Integers by group."""
    return unpacked(codes).to(scale.dtype).unflatten(-1, (scale.shape[-1], -1))


def by_zero(codes, scale, zero):
    return ((grouped(codes, scale) - zero[..., None]) * scale[..., None]).flatten(-2)


def by_shift(codes, scale, shift, unpacked=nibbles):
    return (grouped(codes, scale, unpacked) * scale[..., None] + shift[..., None]).flatten(-2)


def attends(one, attend=eager):
    def function(q, *kv):
        return attend(q, *(repeat_kv(one(*x).to(q.dtype)) for x in (kv[: len(kv) // 2], kv[len(kv) // 2 :])))

    return function


def check_integers(function, *given, mask="none, int4 K, int4 V", **options):
    """``function`` is rewritten to a call on codes, scales and shifts, and unpacks nothing."""
    recording = check_same(function, *given, **options)
    assert recording.masks == [mask]
    (node,) = recording.named("attention")
    assert [value(x).dtype for x in node.args[1:3]] == [torch.uint8] * 2
    for side in "kv":
        assert value(node.kwargs[f"{side}_scale"]).dtype == value(node.kwargs[f"{side}_shift"]).dtype
    assert recording.named(*UNPACKS, "cat", "flatten") == []
    return recording


FORMS = {
    "zero points": by_zero,
    "shifts": by_shift,
    "shifts on the left": lambda c, s, t: (t[..., None] + s[..., None] * grouped(c, s)).flatten(-2),
    "shifts taken away": lambda c, s, t: (grouped(c, s) * s[..., None] - t[..., None]).flatten(-2),
    "products of zero points": lambda c, s, z: (grouped(c, s) * s[..., None] - (z * s)[..., None]).flatten(-2),
    "around 8": lambda c, s, t: ((grouped(c, s) - 8) * s[..., None] + t[..., None]).flatten(-2),
    "fifteenths": lambda c, s, t: (grouped(c, s) / 15 * s[..., None] + t[..., None]).flatten(-2),
    "looked up": lambda c, s, z: ((torch.arange(16.0)[nibbles(c).long()].unflatten(-1, (GROUPS, -1)) - z[..., None])
                                  * s[..., None]).flatten(-2),
    "repeated": lambda c, s, z: (nibbles(c) - z.repeat_interleave(D // GROUPS, -1)) * s.repeat_interleave(
        D // GROUPS, -1),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("attend", [eager, sdpa])
def test_forms(form, attend):
    check_integers(attends(form, attend), *args())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_shifts_are_taken_as_they_are(dtype):
    recording = check_integers(attends(lambda c, s, t: by_shift(c, s.float(), t.float()).to(dtype)), *args(dtype=dtype))
    assert recording.named("mul") == []


def test_half_precision():
    check_integers(attends(by_zero, sdpa), *args(dtype=torch.float16))


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_groups(groups):
    recording = check_integers(attends(by_zero), *args(groups=groups))
    (node,) = recording.named("attention")
    assert shape(node.kwargs["k_scale"]) == (B, HKV, S, groups)


def test_scales_of_all_keys():
    """They broadcast; zero points are of a key each."""
    check_integers(attends(lambda c, s, t: by_shift(c, s.mean(2, keepdim=True), t)), *args())


def test_one_group_without_an_axis():
    def one(c, s, z):
        return (nibbles(c) - z[..., None]) * s[..., None]

    kv = [x.squeeze(-1) if i % 3 else x for i, x in enumerate(args(groups=1)[1:])]
    check_integers(attends(one), args()[0], *kv)


def test_no_zero_point():
    check_integers(attends(lambda c, s, _: ((grouped(c, s) - 7.5) * s[..., None]).flatten(-2)), *args())
    check_integers(attends(lambda c, s, _: ((grouped(c, s) - 8) * s[..., None]).flatten(-2)), *args())
    check_integers(attends(lambda c, s, _: (grouped(c, s) * s[..., None]).flatten(-2)), *args())


@pytest.mark.parametrize("unpacked", NIBBLES.values(), ids=NIBBLES)
def test_nibbles(unpacked):
    check_integers(
        attends(lambda c, s, z: ((grouped(c, s, unpacked) - z[..., None]) * s[..., None]).flatten(-2)), *args()
    )


def test_high_nibbles_first():
    """Within their group: channels of q and of the output change places."""
    order = ORDERS["high_first"]
    function = attends(lambda c, s, z: ((grouped(c, s, order) - z[..., None]) * s[..., None]).flatten(-2))
    assert len(check_integers(function, *args()).named("index_select")) == 2


def test_halves_of_one_group():
    order = ORDERS["halves"]
    function = attends(lambda c, s, z: ((grouped(c, s, order) - z[..., None]) * s[..., None]).flatten(-2))
    check_integers(function, *args(groups=1))


def test_beside_other_forms():
    def function(q, kc, ks, kz, v):
        return eager(q, repeat_kv(by_zero(kc, ks, kz)), repeat_kv(v))

    recording = check_same(function, *args()[:4], torch.randn(B, HKV, S, D))
    assert recording.masks == ["none, int4 K"]


def test_tokens_before_heads():
    function = attends(lambda *x: by_zero(*x).transpose(1, 2))
    check_integers(function, args()[0], *stored(rows=(B, S, HKV)), *stored(rows=(B, S, HKV)))


def test_pages():
    def function(q, ids, *pools):
        k, v = (by_zero(*(x[ids].transpose(1, 2).flatten(2, 3) for x in y)) for y in (pools[:3], pools[3:]))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    ids = torch.randperm(9)[: B * 3].reshape(B, 3)
    pools = (*stored(rows=(9, HKV, 4)), *stored(rows=(9, HKV, 4)))
    recording = check_same(function, args()[0], ids, *pools)
    assert recording.masks == ["none, pages, int4 K, int4 V"]


def test_a_part_of_buffers_with_room():
    """What is stored and no more: scales of the rest are NaN."""
    q, *kv = args()
    buffers = [torch.cat([x, torch.full_like(x[:, :, :4], 7 if x.dtype == torch.uint8 else torch.nan)], 2) for x in kv]
    check_integers(attends(lambda *x: by_zero(*(y[:, :, :S] for y in x))), q, *buffers)


REFUSED = {
    "squares": (
        lambda c, s, z: (grouped(c, s) * grouped(c, s) - z[..., None]).flatten(-2),
        "norms are float16",
    ),
    "groups as rows": (
        lambda c, s, z: ((nibbles(c).reshape(-1, D // GROUPS) - z.reshape(-1, 1)) * s.reshape(-1, 1)).reshape(
            *c.shape[:-1], -1),
        "reshape",
    ),
    "levels of no table": (
        lambda c, s, z: (torch.arange(16.0)[nibbles(c).long()].unflatten(-1, (GROUPS, -1)) * s[..., None]
                         + (nibbles(c) % 3).unflatten(-1, (GROUPS, -1)) * s[..., None]).flatten(-2),
        "norms are float16",
    ),
    "no scale": (lambda c, s, z: (grouped(c, s) - z[..., None]).flatten(-2), "other numbers than one scale"),
    "two scales": (
        lambda c, s, z: (grouped(c, s) * s[..., None] * z[..., None]).flatten(-2),
        "norms are multiplied with each other",
    ),
    "a constant": (lambda c, s, z: by_zero(c, s, z) + 1.0, "a constant is added"),
    "zero points of another group": (lambda c, s, z: by_zero(c, s, z[..., torch.tensor([1, 0])]), "of another group"),
    "shifts of another group": (
        lambda c, s, z: by_shift(c, s, z[..., torch.tensor([1, 0])]),
        "other groups of channels than scales",
    ),
    "halves of two groups": (
        lambda c, s, z: ((grouped(c, s, ORDERS["halves"]) - z[..., None]) * s[..., None]).flatten(-2),
        "no runs of channels in the order of their nibbles",
    ),
    "fewer zero points": (
        lambda c, s, z: (grouped(c, s) * s[..., None] + z[..., :1, None]).flatten(-2),
        "other groups of channels than scales",
    ),
    "one nibble twice": (
        lambda c, s, z: by_shift(c, s, z, lambda c: torch.stack((c & 15, c & 15), -1).flatten(-2)),
        "channels share an integer",
    ),
    "half of a unit in the last place of large numbers": (
        lambda c, s, z: ((grouped(c, s) * 1e7) * (s[..., None] * 1e-7) + 0.5).flatten(-2),
        "a constant is added",
    ),
    "a rotation": (
        lambda c, s, z: by_zero(c, s, z) @ torch.tensor(ORTHOGONAL),
        "a matrix is behind them",
    ),
}  # fmt: skip
ORTHOGONAL = torch.linalg.qr(torch.randn(D, D))[0].tolist()


@pytest.mark.parametrize(("one", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_such_integer_stays(one, reason):
    check_unpacked(attends(one), *args(), reason=reason)


def test_codes_of_a_byte_each_stay():
    """Nothing says that they are below 16."""
    q, c, s, z = args()[:4]
    recording = record(lambda q, c, s, z: eager(q, *(repeat_kv(by_zero_of_bytes(c, s, z)),) * 2), q, nibbles(c), s, z)
    assert recording.masks == ["none"]


def test_nibbles_read_as_signed_stay():
    def signed(c):
        return torch.stack(((c << 4).view(torch.int8) >> 4, c.view(torch.int8) >> 4), -1).flatten(-2)

    recording = check_same(attends(lambda c, s, z: by_shift(c, s, z, signed)), *args())
    assert recording.masks == ["none"]


def by_zero_of_bytes(codes, scale, zero):
    return ((codes.to(scale.dtype).unflatten(-1, (GROUPS, -1)) - zero[..., None]) * scale[..., None]).flatten(-2)


def test_what_is_written_after_it_is_read():
    def one(c, s, z):
        x = by_zero(c, s, z)
        s.mul_(2.0)
        return x

    recording = check_same(attends(one), *args())
    assert "is written in place" in recording.masks[0]


@settings(max_examples=10, deadline=None)
@given(
    size=st.sampled_from([8, 16, 20]),
    groups=st.sampled_from([1, 2, 3]),
    form=st.sampled_from(["zero points", "shifts"]),
    order=st.permutations(range(4)),
    rows=st.integers(1, 3),
)
def test_any_layout(size, groups, form, order, rows):
    back = [order.index(dim) for dim in range(4)]
    codes, scale, third = stored(size * groups, groups)
    if form != "zero points":
        third = -third * scale
    kv = [x.permute(order).contiguous().permute(back) for x in (codes, scale, third)] * 2
    check_integers(attends(FORMS[form]), torch.randn(B, H, rows, size * groups), *kv)


def test_a_static_cache_that_is_written_before():
    """A step of decoding."""

    def function(q, position, *tensors):
        for buffer, x in zip(tensors[:6], tensors[6:], strict=True):
            buffer.index_copy_(2, position, x)
        k, v = (repeat_kv(by_zero(*x)) for x in (tensors[:3], tensors[3:6]))
        visible = torch.arange(S, device=q.device)[None, :] <= position[:, None]
        return (q @ k.transpose(-1, -2) * 0.1).masked_fill(~visible, -torch.inf).softmax(-1) @ v

    new = (*stored(rows=(B, HKV, 1)), *stored(rows=(B, HKV, 1)))
    q, *buffers = args(rows=1)
    check_integers(function, q, torch.tensor([7]), *buffers, *new, mask="prefix, int4 K, int4 V")
