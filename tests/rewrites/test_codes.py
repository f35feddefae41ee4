"""K and V unpacked of TBQ4 codes: the operator gets codes and norms, or the report says why it does not."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import attnpatch
from attnpatch import tbq4
from attnpatch.graph import is_tensor, op, shape, value
from attnpatch.kernels import dense as kernels_dense
from attnpatch.kernels.tiled import backend as tiled_backend
from attnpatch.tbq4 import LEVELS, STEP, blocks_of, rotation
from attnpatch.tbq4.codec import SIGNS
from attnpatch.testing.recording import RecordingBackend, clones, record
from attnpatch.testing.tolerance import assert_same_function, run_float64
from tests.caches.conftest import generate, make_model

B, H, HKV, S, D, DV = 2, 6, 2, 12, 24, 16
GROUP = H // HKV
UNPACKS = ("and", "rshift", "bitwise_right_shift", "remainder", "floordiv", "floor_divide")


def repeat_kv(x):
    b, heads, s, d = x.shape
    return x[:, :, None].expand(b, heads, GROUP, s, d).reshape(b, heads * GROUP, s, d)


def eager(q, k, v):
    return (q @ k.transpose(-1, -2) * 0.1).softmax(-1) @ v


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.1)


def codes(width, *rows):
    """Codes and norms of random vectors."""
    return tbq4.encode(torch.randn(*(rows or (B, HKV, S)), width))


def args(rows=5, dtype=torch.float32, width=D, width_v=DV):
    return torch.randn(B, H, rows, width).to(dtype), *codes(width), *codes(width_v)


# Steps of unpacking


def levels():
    return torch.tensor([level * STEP for level in LEVELS])


def nibbles(c):
    return torch.stack((c & 15, c >> 4), dim=-1).flatten(-2)


def with_norms(y, norms):
    """Each block times its norm."""
    pieces = y.split(blocks_of(y.shape[-1]), dim=-1)
    return torch.cat([x * n for x, n in zip(pieces, norms.to(y.dtype).split(1, dim=-1), strict=True)], dim=-1)


def own_rotation(y):
    return rotation(y.shape[-1], y.device, torch.float32).to(y.dtype)


def unpack(c, norms, unpacked=nibbles, table=levels, scaled=with_norms, turned=lambda y: y @ own_rotation(y)):
    """attnpatch.tbq4.decode, written out."""
    return turned(scaled(table()[unpacked(c).long()], norms))


def of_operator(recording):
    """The one operator of a graph: the dtypes of its k and v, and of their scales."""
    (node,) = recording.named("attention")
    scales = (node.kwargs.get(name) for name in ("k_scale", "v_scale"))
    return *(value(x).dtype for x in node.args[1:3]), *(None if x is None else value(x).dtype for x in scales)


def check_same(function, *args, exact=None, **options):
    recording = record(function, *args, **options)
    with torch.no_grad():
        original = function(*clones(args))
    assert recording.output.dtype == original.dtype
    assert_same_function(recording.output, original, run_float64(exact or function, *clones(args)))
    assert recording.reasons == []
    return recording


def check_codes(function, *args, k=True, v=True, **options):
    """``function`` is rewritten to a call on codes and norms, and unpacks nothing."""
    recording = check_same(function, *args, **options)
    kinds = [torch.uint8 if packed else args[0].dtype for packed in (k, v)]
    assert recording.masks == [", ".join(["none", *(f"TBQ4 {name}" for name, x in (("K", k), ("V", v)) if x)])]
    assert of_operator(recording) == (*kinds, *(torch.float16 if packed else None for packed in (k, v)))
    assert recording.named(*UNPACKS, "embedding", "cat", "stack") == []
    ((dispatches, _),) = recording.collector.graphs[0].runs
    assert [(x.backend, "is TBQ4 codes" in x.reason) for x in dispatches] == [("cpu.tiled", True)]
    return recording


def check_unpacked(function, *args, reason, **options):
    """``function`` is rewritten, attention reads what it unpacks, and the report says why."""
    recording = check_same(function, *args, **options)
    assert of_operator(recording)[0].is_floating_point
    assert recording.named(*UNPACKS) != []
    (mask,) = recording.masks
    assert mask.startswith(("none, K unpacked: ", "none, K and V unpacked: ")), mask
    assert reason in mask, mask
    return recording


# As attnpatch.tbq4.decode unpacks


def decode(c, norms, q):
    """attnpatch.tbq4.decode; it takes no norms in float64."""
    if norms.dtype == torch.float64:
        return unpack(c, norms).to(q.dtype)
    return tbq4.decode(c, norms, 2 * c.shape[-1], q.dtype)


@pytest.mark.parametrize(
    ("attend", "dtype"), [(eager, torch.float32), (sdpa, torch.float32), (sdpa, torch.bfloat16), (eager, torch.float16)]
)
def test_decode(attend, dtype):
    def function(q, kc, kn, vc, vn):
        return attend(q, repeat_kv(decode(kc, kn, q)), repeat_kv(decode(vc, vn, q)))

    check_codes(function, *args(dtype=dtype))


@pytest.mark.parametrize("width", [8, 40, 192])
def test_blocks(width):
    def function(q, kc, kn, vc, vn):
        return sdpa(q, repeat_kv(decode(kc, kn, q)), repeat_kv(decode(vc, vn, q)))

    check_codes(function, *args(width=width, width_v=width))


@pytest.mark.parametrize(("attend", "packed"), [(eager, "k"), (sdpa, "v")])
def test_one_of_both(attend, packed):
    def function(q, c, norms, dense):
        x = decode(c, norms, q)
        return attend(q, *(repeat_kv(x) for x in ((x, dense) if packed == "k" else (dense, x))))

    given = (torch.randn(B, H, 5, D), *codes(D), torch.randn(B, HKV, S, D))
    check_codes(function, *given, k=packed == "k", v=packed == "v")


def test_8_bit_keys_and_packed_values():
    def function(q, k, ks, vc, vn):
        return sdpa(q, repeat_kv(k.float() * ks), repeat_kv(decode(vc, vn, q)))

    q, *_, vc, vn = args()
    k, ks = (torch.randn(B, HKV, S, D) * 40).to(torch.int8), torch.rand(B, HKV, S, 1) * 0.05
    recording = check_same(function, q, k, ks, vc, vn)
    assert of_operator(recording) == (torch.int8, torch.uint8, torch.float32, torch.float16)
    assert recording.masks == ["none, int8 K, TBQ4 V"]


def test_a_part_of_buffers_with_room():
    """What is stored and no more: the rest of the buffers is NaN."""

    def function(q, kc, kn, vc, vn):
        k, v = (decode(c[:, :, :S], norms[:, :, :S], q) for c, norms in ((kc, kn), (vc, vn)))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    q, *stored = args()
    buffers = [torch.cat([x, x.new_full((*x.shape[:2], 4, x.shape[3]), 7)], dim=2) for x in stored]
    for norms in buffers[1::2]:
        norms[:, :, S:] = torch.nan
    check_codes(function, q, *buffers)


def test_buffers_that_are_written_before():
    def function(q, new, kc, kn, vc, vn):
        attnpatch.ops.cache_write(kc, vc, new, new, torch.tensor([3], device=q.device), None, kn, vn)
        return sdpa(q, repeat_kv(decode(kc, kn, q)), repeat_kv(decode(vc, vn, q)))

    def exact(q, new, *stored):
        for x, part in zip(stored, encoded * 2, strict=True):
            x[:, :, 3:4] = part
        return sdpa(q, *(repeat_kv(decode(c, norms, q)) for c, norms in (stored[:2], stored[2:])))

    given = (torch.randn(B, H, 5, D), torch.randn(B, HKV, 1, D), *codes(D), *codes(D))
    encoded = tbq4.encode(given[1])
    check_codes(function, *given, exact=exact)


def test_codes_and_norms_repeated_each():
    def function(q, kc, kn, vc, vn):
        return sdpa(q, *(decode(repeat_kv(c), repeat_kv(n), q) for c, n in ((kc, kn), (vc, vn))))

    recording = check_codes(function, *args())
    assert recording.sites[0].num_kv_heads == HKV


def test_tokens_before_heads():
    def function(q, kc, kn, vc, vn):
        return sdpa(q, *(repeat_kv(decode(c, n, q).transpose(1, 2)) for c, n in ((kc, kn), (vc, vn))))

    stored = (*codes(D, B, S, HKV), *codes(DV, B, S, HKV))
    (node,) = check_codes(function, args()[0], *stored).named("attention")
    assert [shape(x) for x in node.args[1:3]] == [(B, HKV, S, D // 2), (B, HKV, S, DV // 2)]


def test_any_number_of_keys():
    def function(q, kc, kn, vc, vn):
        return eager(q, repeat_kv(decode(kc, kn, q)), repeat_kv(decode(vc, vn, q)))

    backend, q = RecordingBackend(), args()[0]
    compiled = torch.compile(function, backend=backend)
    for length in (S, S + 1, S + 5):
        stored = (*codes(D, B, HKV, length), *codes(D, B, HKV, length))
        with torch.no_grad():
            assert_same_function(compiled(q, *stored), function(q, *stored), run_float64(function, q, *stored))
    assert backend.masks == ["none, TBQ4 K, TBQ4 V"] * 2
    assert isinstance(shape(backend.named("attention")[1].args[1])[2], torch.SymInt)


def test_pages():
    """Pools of codes and of norms that one table numbers."""

    def function(q, kc, kn, vc, vn, ids):
        k, v = (decode(*(x[ids].transpose(1, 2).flatten(2, 3) for x in (c, n)), q) for c, n in ((kc, kn), (vc, vn)))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    ids = torch.randperm(9)[: B * 3].reshape(B, 3)
    recording = check_same(function, args()[0], *codes(D, 9, HKV, 4), *codes(DV, 9, HKV, 4), ids)
    assert recording.masks == ["none, pages, TBQ4 K, TBQ4 V"]
    (node,) = recording.named("attention")
    assert shape(node.kwargs["k_scale"]) == (9, HKV, 4, len(blocks_of(D)))


def lowered(function, *args):
    """A graph of ATen operators."""
    tbq4.decode(*codes(D), D, torch.float32), tbq4.decode(*codes(DV), DV, torch.float32)  # constants are real tensors
    graph = make_fx(function)(*args)
    for node in graph.graph.nodes:  # each in a fake mode of its own
        node.meta.clear()
    return graph


def test_aten():
    def function(q, kc, kn, vc, vn):
        k, v = (decode(c, n, q).flatten(0, 1) for c, n in ((kc, kn), (vc, vn)))
        return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 0.1).softmax(-1), v)

    given = (torch.randn(B * HKV, 5, D), *args()[1:])
    graph, report = attnpatch.rewrite(lowered(function, *given), given)
    assert [site.mask for site in report.sites] == ["none, TBQ4 K, TBQ4 V"]
    assert not {"and", "rshift", "index", "mm"} & {op(node) for node in graph.graph.nodes}
    assert_same_function(graph(*given), function(*given), run_float64(function, *given))


def test_export():
    """Its checks of dtypes do not keep the unpacking alive."""

    class Model(torch.nn.Module):
        def forward(self, q, kc, kn, vc, vn):
            return sdpa(q, repeat_kv(decode(kc, kn, q)), repeat_kv(decode(vc, vn, q)))

    given = args()
    exported = torch.export.export(Model(), given).module()
    graph, report = attnpatch.rewrite(exported, given)
    assert [site.mask for site in report.sites] == ["none, TBQ4 K, TBQ4 V"]
    assert not {"and", "rshift", "index", "matmul"} & {op(node) for node in graph.graph.nodes}
    assert_same_function(graph(*given), Model()(*given), run_float64(Model(), *given))


# Written out


def check_both(one, *, width=32, **options):
    """K and V unpacked by ``one(codes, norms)``."""

    def function(q, kc, kn, vc, vn):
        return eager(q, repeat_kv(one(kc, kn).to(q.dtype)), repeat_kv(one(vc, vn).to(q.dtype)))

    return check_codes(function, *args(width=width, width_v=16), **options)


NIBBLES = {
    "low_first": nibbles,
    "of_integers": lambda c: torch.stack((c.int() % 16, c.int() // 16), dim=-1).flatten(-2),
    "reshaped": lambda c: torch.stack((c.bitwise_and(15), c >> 4), dim=-1).reshape(*c.shape[:-1], -1),
    "shifted_tensor": lambda c: (c[..., None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15).flatten(-2),
    "repeated": lambda c: c.repeat_interleave(2, -1) >> torch.tensor([0, 4] * c.shape[-1], dtype=torch.uint8) & 15,
}


@pytest.mark.parametrize("unpacked", NIBBLES.values(), ids=NIBBLES)
def test_nibbles(unpacked):
    """K has two blocks, V has one."""
    recording = check_both(lambda c, n: unpack(c, n, unpacked), width=24)
    assert recording.named("index_select", "matmul") == []


ORDERS = {
    "high_first": lambda c: torch.stack((c >> 4, c & 15), dim=-1).flatten(-2),
    "halves": lambda c: torch.cat((c & 15, c >> 4), dim=-1),
    "halves_high_first": lambda c: torch.stack((c >> 4, c & 15), dim=-2).flatten(-2),
    "halves_transposed": lambda c: nibbles(c).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2),
    "permuted": lambda c: nibbles(c)[..., torch.arange(2 * c.shape[-1] - 1, -1, -1)],
}


@pytest.mark.parametrize("order", ["halves", "permuted"])
def test_other_orders_without_a_rotation_turn_q(order):
    """The operator rotates what the codes stand for, so q and the output are rotated too."""
    recording = check_both(lambda c, n: unpack(c, n, ORDERS[order], turned=lambda y: y))
    assert len(recording.named("matmul")) == 2


@pytest.mark.parametrize("unpacked", ORDERS.values(), ids=ORDERS)
def test_other_orders_before_the_rotation_turn_q(unpacked):
    """What is rotated is not what the operator rotates: the difference is an orthogonal matrix."""
    recording = check_both(lambda c, n: unpack(c, n, unpacked))
    assert len(recording.named("matmul")) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_channels_in_another_order_are_picked_from_q(dtype):
    def one(c, norms):
        return unpack(c, norms)[..., torch.tensor([*range(1, 2 * c.shape[-1]), 0])]

    def function(q, kc, kn, vc, vn):
        return eager(q, repeat_kv(one(kc, kn).to(q.dtype)), repeat_kv(one(vc, vn).to(q.dtype)))

    recording = check_codes(function, *args(dtype=dtype))
    assert (len(recording.named("index_select")), recording.named("matmul")) == (2, [])


LOOKUPS = {
    "index": lambda c, t: t[nibbles(c).int()],
    "index_select": lambda c, t: t.index_select(0, nibbles(c).flatten().long()).view(*c.shape[:-1], -1),
    "embedding": lambda c, t: F.embedding(nibbles(c).long(), t[:, None]).squeeze(-1),
    "by_byte": lambda c, t: torch.stack((t.repeat(16), t.repeat_interleave(16)), dim=-1)[c.long()].flatten(-2),
    "each_nibble": lambda c, t: torch.stack((t[(c & 15).long()], t[(c >> 4).long()]), dim=-1).flatten(-2),
}


@pytest.mark.parametrize("look", LOOKUPS.values(), ids=LOOKUPS)
def test_lookups(look):
    check_both(lambda c, n: own(with_norms(look(c, levels()), n)))


def own(y):
    return y @ own_rotation(y)


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [(2.0**9, torch.float32), (2.0**-5, torch.bfloat16), (1 / 104 / STEP, torch.float32)],
    ids=["integers", "smaller", "up to 1"],
)
def test_tables_times_a_factor(factor, dtype):
    """The factor goes to the scale of the scores, and to the output."""

    def one(c, norms):
        return unpack(c, norms, table=lambda: levels() * factor)

    def function(q, kc, kn, vc, vn):
        return eager(q, repeat_kv(one(kc, kn).to(q.dtype)), repeat_kv(one(vc, vn).to(q.dtype)))

    q, kc, kn, vc, vn = args(dtype=dtype)
    check_codes(function, q, kc, kn / factor, vc, vn / factor)


def butterflies(y):
    """The Hadamard product of every block as sums and differences, and the signs around it."""
    blocks = [_butterflies(x) for x in y.split(blocks_of(y.shape[-1]), dim=-1)]
    return torch.cat(blocks, dim=-1)


def _butterflies(y):
    n = y.shape[-1]
    s1, s2 = (torch.tensor(signs[:n], dtype=y.dtype) for signs in (S1, S2))
    y, span = y * s2, 1
    while span < n:
        y = y.unflatten(-1, (n // (2 * span), 2, span))
        y = torch.stack((y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]), dim=-2).flatten(-3)
        span *= 2
    return y * s1 / math.sqrt(n)


def signs(text):
    bits = int.from_bytes(bytes.fromhex(text), "little")
    return [-1.0 if bits >> i & 1 else 1.0 for i in range(128)]


S1, S2 = (signs(text) for text in SIGNS)


ROTATIONS = {
    "einsum": lambda y: torch.einsum("bhsd,de->bhse", y, own_rotation(y)),
    "matrix_on_the_left": lambda y: torch.einsum("ed,bhsd->bhse", own_rotation(y).T, y),
    "linear": lambda y: F.linear(y, own_rotation(y).T),
    "rows": lambda y: (y.flatten(0, 2) @ own_rotation(y)).view(y.shape),
    "butterflies": butterflies,
}


@pytest.mark.parametrize(("rotated", "width"), [*((name, 24) for name in ROTATIONS), ("butterflies", 128)])
def test_rotations(rotated, width):
    recording = check_both(lambda c, n: unpack(c, n, turned=ROTATIONS[rotated]), width=width)
    assert recording.named("matmul", "index_select") == []


def matrix(n):
    """Some orthogonal matrix."""
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0].tolist()


MATRICES = {n: matrix(n) for n in (DV, D, 32)}


def orthogonal(y):
    return y @ torch.tensor(MATRICES[y.shape[-1]], dtype=y.dtype)


OTHER_ROTATIONS = {
    "any": (orthogonal, eager, torch.float32),
    "any, SDPA": (orthogonal, sdpa, torch.bfloat16),
    "none": (lambda y: y, sdpa, torch.float32),
    "negative": (lambda y: -y, eager, torch.bfloat16),
}


@pytest.mark.parametrize(("turned", "attend", "dtype"), OTHER_ROTATIONS.values(), ids=OTHER_ROTATIONS)
def test_other_rotations_turn_q_and_the_output(turned, attend, dtype):
    def function(q, kc, kn, vc, vn):
        k, v = (unpack(c, n, turned=turned).to(q.dtype) for c, n in ((kc, kn), (vc, vn)))
        return attend(q, repeat_kv(k), repeat_kv(v))

    recording = check_codes(function, *args(dtype=dtype))
    assert [value(node.args[0]).dtype for node in recording.named("matmul")] == [torch.float32] * 2


def test_a_rotation_in_bfloat16_is_ours_times_a_factor():
    """All of its numbers are rounded alike in blocks of one size."""

    def rounded(y):
        return y @ rotation(y.shape[-1], y.device, torch.float32).bfloat16().to(y.dtype)

    def function(q, kc, kn, vc, vn):
        return eager(q, *(repeat_kv(unpack(c, n, turned=rounded)) for c, n in ((kc, kn), (vc, vn))))

    def exact(q, kc, kn, vc, vn):
        factor = float(torch.tensor(32**-0.5).bfloat16()) * 32**0.5
        k, v = (unpack(c, n) * f for c, n, f in ((kc, kn, factor), (vc, vn, 1.0)))
        return eager(q, repeat_kv(k), repeat_kv(v))

    check_codes(function, *args(width=32), exact=exact)


SCALED = {
    "repeated": lambda y, n: y * n.to(y.dtype).repeat_interleave(y.shape[-1] // n.shape[-1], -1),
    "of_blocks": lambda y, n: (y.unflatten(-1, (n.shape[-1], -1)) * n.to(y.dtype).unsqueeze(-1)).flatten(-2),
    "of_rows": lambda y, n: n[..., :1].float() * y,
}


@pytest.mark.parametrize("scaled", SCALED.values(), ids=SCALED)
def test_norms(scaled):
    check_both(lambda c, n: unpack(c, n, scaled=scaled))


def test_norms_of_two_blocks_of_128():
    check_both(lambda c, n: unpack(c, n, scaled=SCALED["of_blocks"]), width=256)


def test_norms_behind_the_rotation():
    check_both(lambda c, n: own(levels()[nibbles(c).long()]) * n.float())


def test_norms_that_are_computed():
    """Whatever they are computed of, they are a tensor of norms."""
    check_both(lambda c, n: unpack(c, n.roll(1, 2)))


def test_norms_without_a_dimension_of_blocks():
    def function(q, kc, kn, vc, vn):
        k, v = (unpack(c, n, scaled=lambda y, n: y * n[..., None].float()) for c, n in ((kc, kn), (vc, vn)))
        return eager(q, repeat_kv(k), repeat_kv(v))

    q, kc, kn, vc, vn = args(width=32)
    check_codes(function, q, kc, kn[..., 0], vc, vn[..., 0])


def test_k_and_v_differ():
    def function(q, kc, kn, vc, vn):
        k = unpack(kc, kn, ORDERS["high_first"], turned=orthogonal)
        return eager(q, repeat_kv(k), repeat_kv(unpack(vc, vn, table=lambda: levels() * 4)))

    recording = check_codes(function, *args(width=32))
    assert len(recording.named("matmul")) == 1


def test_a_batch_of_one_key():
    """Sizes of 1 are rows all the same."""

    def function(q, kc, kn, vc, vn):
        k, v = (unpack(c, n, NIBBLES["of_integers"]) for c, n in ((kc, kn), (vc, vn)))
        return sdpa(q, k, v)

    check_codes(function, torch.randn(1, 1, 5, D), *codes(D, 1, 1, 1), *codes(DV, 1, 1, 1))


def test_what_turns_q_is_known_to_inductor():
    def function(q, kc, kn, vc, vn):
        return eager(q, *(repeat_kv(unpack(c, n, turned=orthogonal)) for c, n in ((kc, kn), (vc, vn))))

    check_codes(function, *args(), rest="inductor")


def test_layers_share_what_turns_q():
    def function(q, kc, kn, vc, vn):
        for _ in range(2):
            k, v = (unpack(c, n, turned=orthogonal) for c, n in ((kc, kn), (vc, vn)))
            q = eager(q, repeat_kv(k), repeat_kv(v))
        return q

    recording = check_same(function, *args(width_v=D))
    assert recording.masks == ["none, TBQ4 K, TBQ4 V"] * 2
    assert len(recording.named("matmul")) == 4
    assert len({node.args[1] for node in recording.named("matmul")}) == 2


# K with a constant part


def centred(attend):
    def function(q, kc, kn, vc, vn, centre):
        k = decode(kc, kn, q) + centre
        return attend(q, repeat_kv(k), repeat_kv(decode(vc, vn, q)))

    return function


CENTRES = {"head": (eager, (1, HKV, 1, D)), "sequence": (sdpa, (B, HKV, 1, D)), "channel": (eager, (D,))}


@pytest.mark.parametrize(("attend", "sizes"), CENTRES.values(), ids=CENTRES)
def test_a_vector_added_to_all_keys_is_left_out(attend, sizes):
    """It moves all scores of a row by one number, which softmax forgets."""
    check_codes(centred(attend), *args(), torch.randn(*sizes) * 3)


def test_8_bit_keys_with_a_centre():
    def function(q, k, ks, centre, vc, vn):
        return sdpa(q, repeat_kv(centre + k.float() * ks), repeat_kv(decode(vc, vn, q)))

    q, *_, vc, vn = args()
    k, ks = (torch.randn(B, HKV, S, D) * 40).to(torch.int8), torch.rand(B, HKV, S, 1) * 0.05
    recording = check_same(function, q, k, ks, torch.randn(B, HKV, 1, D), vc, vn)
    assert recording.masks == ["none, int8 K, TBQ4 V"]


def softcapped(q, k, v):
    return ((q @ k.transpose(-1, -2) * 0.1 / 2).tanh() * 2).softmax(-1) @ v


def with_sinks(q, k, v):
    sinks = torch.full((B, H, q.shape[2], 1), 0.5, dtype=q.dtype)
    return torch.cat([q @ k.transpose(-1, -2) * 0.1, sinks], dim=-1).softmax(-1)[..., :-1] @ v


def with_lse(q, k, v):
    scores = q @ k.transpose(-1, -2) * 0.1
    return scores.softmax(-1) @ v * scores.logsumexp(-1, keepdim=True)


@pytest.mark.parametrize("attend", [softcapped, with_sinks, with_lse])
def test_a_vector_added_to_all_keys_stays_where_scores_need_it(attend):
    recording = check_same(centred(attend), *args(), torch.randn(B, HKV, 1, D))
    assert of_operator_lse(recording) == (torch.float32, torch.uint8)
    assert "K unpacked: a vector is added to all keys, and softcap, sinks or the logsumexp need" in recording.masks[0]


def of_operator_lse(recording):
    (node,) = recording.named("attention", "attention_lse")
    return tuple(value(x).dtype for x in node.args[1:3])


@pytest.mark.parametrize("attend", [softcapped, with_sinks, with_lse])
def test_codes_of_other_attentions(attend):
    def function(q, kc, kn, vc, vn):
        return attend(q, repeat_kv(decode(kc, kn, q)), repeat_kv(decode(vc, vn, q)))

    recording = check_same(function, *args())
    assert of_operator_lse(recording) == (torch.uint8, torch.uint8)


def test_a_vector_for_each_key_is_no_centre():
    recording = check_same(centred(eager), *args(), torch.randn(1, 1, S, D))
    assert of_operator(recording)[:2] == (torch.float32, torch.uint8)
    assert "K unpacked: l_centre_ in float32 is no constant" in recording.masks[0]


def test_a_vector_added_to_values_stays():
    def function(q, kc, kn, vc, vn, centre):
        return eager(q, repeat_kv(decode(kc, kn, q)), repeat_kv(decode(vc, vn, q) + centre))

    recording = check_same(function, *args(), torch.randn(DV))
    assert of_operator(recording)[:2] == (torch.uint8, torch.float32)
    assert "V unpacked: l_centre_ in float32 is no constant" in recording.masks[0]


# On a CPU


@pytest.mark.parametrize("pages", [False, True])
def test_the_cpu_decodes_tile_by_tile(monkeypatch, pages):
    """No more keys at once than a tile has, or their pages."""
    seen = []

    def spy(c, norms, *args):
        seen.append(c.shape[2])
        return tbq4.decode(c, norms, *args)

    monkeypatch.setattr(tiled_backend, "BLOCK_N", 5)
    monkeypatch.setattr(kernels_dense, "decode", spy)
    q, kc, kn, vc, vn = args(rows=1)
    table = torch.tensor([[2, 0, 1], [5, 4, 3]]) if pages else None
    if pages:
        kc, kn, vc, vn = (x.unflatten(2, (3, 4)).transpose(1, 2).flatten(0, 1) for x in (kc, kn, vc, vn))
    y = torch.ops.attnpatch.attention(q, kc, vc, 0.1, k_scale=kn, v_scale=vn, block_table=table)
    k, v = (decode(*(gathered(x, table) for x in both), q) for both in ((kc, kn), (vc, vn)))
    torch.testing.assert_close(y, sdpa(q, repeat_kv(k), repeat_kv(v)))
    assert len(seen) == 2 * 3
    assert max(seen) == (8 if pages else 5)


def gathered(pool, table):
    return pool if table is None else pool[table].transpose(1, 2).flatten(2, 3)


# Through a cache


CACHES = {
    "tbq4": ({}, "TBQ4 K, TBQ4 V"),
    "int8 K": ({"keys": "int8"}, "int8 K, TBQ4 V"),
    "K alone": ({"values": "dense"}, "TBQ4 K"),
    "not centred": ({"centre_keys": False}, "TBQ4 K, TBQ4 V"),
    "int8, not centred": ({"centre_keys": False, "keys": "int8"}, "int8 K, TBQ4 V"),
}


@pytest.mark.parametrize(("options", "words"), CACHES.values(), ids=CACHES)
def test_a_llama_decodes_on_codes(options, words, graphs):
    """The tokens of the same cache without patch; no tensor of a decode step is as large as an unpacked cache."""
    model = make_model(num_hidden_layers=1, attn_implementation="sdpa" if len(options) == 1 else "eager")
    expected = generate(model, attnpatch.TBQ4Cache(model, **options))
    attnpatch.patch(model, strict=True)
    cache = attnpatch.TBQ4Cache(model, **options)
    assert torch.equal(generate(model, cache), expected)
    (site,) = attnpatch.report(model).sites
    assert site.mask.split(" | ")[-1].endswith(words), site.mask
    capacity, width = cache.layers[0].key_buffer.shape[2], 16
    whole = [n for n in graphs[-1].graph.nodes if is_tensor(n) and shape(n)[-2:] == (capacity, width)]
    kept = [n for n in whole if value(n).dtype.is_floating_point and "value_buffer" not in n.name]
    assert kept == []
    assert {op(n) for n in graphs[-1].graph.nodes}.isdisjoint(UNPACKS[1:])


def test_a_chunk_after_other_chunks_is_read_as_it_was():
    """More than 64 tokens on what is stored: the report says that the past is unpacked for them."""
    model = make_model(num_hidden_layers=1)
    expected = generate(model, attnpatch.TBQ4Cache(model), length=140, prefill_chunk_size=70)
    attnpatch.patch(model, strict=True)
    assert torch.equal(generate(model, attnpatch.TBQ4Cache(model), length=140, prefill_chunk_size=70), expected)
    (site,) = attnpatch.report(model).sites
    first, chunk, step = site.mask.split(" | ")
    assert "TBQ4" not in first
    assert "K and V unpacked: new rows are put in as they are" in chunk
    assert step.endswith("TBQ4 K, TBQ4 V")


# What must stay unpacked

RESURRECTION = (0.0069, 0.0209, 0.0352, 0.0501, 0.0660, 0.0836, 0.1048, 0.1739)


def resurrection():
    """A table that is in use elsewhere, with twice the error."""
    return torch.tensor([*(-x for x in reversed(RESURRECTION)), *RESURRECTION])


def by_groups(c, norms):
    """A norm for every 8 channels."""
    return own((levels()[nibbles(c).long()].unflatten(-1, (-1, 8)) * norms[..., None].float()).flatten(-2))


def written(y):
    y = y + 0.0
    y[..., 0] = 1.0
    return y


NOT_TBQ4 = {
    "resurrection": (lambda c, n: unpack(c, n, table=resurrection), "other values than the levels of TBQ4"),
    "a level off": (lambda c, n: unpack(c, n, table=lambda: levels() + torch.tensor([0.0] * 15 + [1e-5])), "other"),
    "levels reversed in part": (lambda c, n: unpack(c, n, lambda c: nibbles(c) ^ 1), "other values than the levels"),
    "offset": (lambda c, n: unpack(c, n) + 0.5, "something is added to the levels"),
    "offset times norm": (lambda c, n: with_norms(levels()[nibbles(c).long()] + 0.01, n), "other values"),
    "no norms": (lambda c, n: unpack(c, n, scaled=lambda y, n: y), "no norms are read"),
    "norms twice": (lambda c, n: unpack(c, n, scaled=lambda y, n: with_norms(with_norms(y, n), n)), "norms are mult"),
    "levels squared": (lambda c, n: unpack(c, n, scaled=lambda y, n: with_norms(y * y, n)), "other values"),
    "three bits": (lambda c, n: unpack(c, n, lambda c: nibbles(c) & 7), "other values"),
    "both nibbles": (lambda c, n: unpack(c, n, lambda c: torch.cat([(c & 15) ^ (c >> 4)] * 2, -1)), "one of the two"),
    "to integers": (lambda c, n: own(with_norms(levels()[nibbles(c).long()] * 9, n).int().float()), "cast to int32"),
    "not orthogonal": (lambda c, n: unpack(c, n, turned=lambda y: y * torch.linspace(1, 2, y.shape[-1])), "linspace"),
    "stretched": (
        lambda c, n: unpack(c, n, turned=lambda y: y * (1 + torch.arange(y.shape[-1]) / 8)),
        "is not orthogonal",
    ),
    "a function": (lambda c, n: unpack(c, n).tanh(), None),
    "written into": (lambda c, n: written(unpack(c, n)), None),
}  # fmt: skip


@pytest.mark.parametrize(("one", "reason"), NOT_TBQ4.values(), ids=NOT_TBQ4)
def test_what_is_not_tbq4(one, reason):
    def function(q, kc, kn, vc, vn):
        return eager(q, repeat_kv(one(kc, kn)), repeat_kv(one(vc, vn)))

    if reason is not None:
        check_unpacked(function, *args(width=32), reason=reason)
        return
    recording = check_same(function, *args(width=32))
    assert of_operator(recording)[:2] == (torch.float32, torch.float32)


def test_only_the_side_that_is_not_tbq4_stays():
    def function(q, kc, kn, vc, vn):
        return eager(q, repeat_kv(unpack(kc, kn)), repeat_kv(unpack(vc, vn, table=resurrection)))

    recording = check_same(function, *args())
    assert of_operator(recording) == (torch.uint8, torch.float32, torch.float16, None)
    (mask,) = recording.masks
    assert mask == "none, TBQ4 K, V unpacked: codes stand for other values than the levels of TBQ4 times one factor"


UNKNOWN = {
    "table": lambda c, n, table, turn: unpack(c, n, table=lambda: table),
    "rotation": lambda c, n, table, turn: unpack(c, n, turned=lambda y: y @ turn),
}
REASONS = {"table": "the table l_table_ is no constant of the graph", "rotation": "l_turn_ are multiplied, and neither"}


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_tables_and_rotations_that_are_arguments(unknown):
    def function(q, kc, kn, vc, vn, table, turn):
        return eager(q, *(repeat_kv(UNKNOWN[unknown](c, n, table, turn)) for c, n in ((kc, kn), (vc, vn))))

    turn = rotation(32, torch.device("cpu"), torch.float32)
    given = (*args(width=32, width_v=32), levels(), turn)
    check_unpacked(function, *given, reason=REASONS[unknown])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_other_dtypes(dtype):
    def function(q, kc, kn, vc, vn):
        return eager(q, repeat_kv(unpack(kc, kn)), repeat_kv(unpack(vc, vn)))

    q, kc, kn, vc, vn = args()
    reason = f"l_norms_ in {str(dtype).removeprefix('torch.')} is no constant, and norms are float16"
    check_unpacked(function, q, kc, kn.to(dtype), vc, vn.to(dtype), reason=reason.replace("l_norms_", "l_kn_"))


def test_blocks_of_another_size():
    """A norm for every 8 channels."""

    def one(c, norms):
        y = levels()[nibbles(c).long()].unflatten(-1, (-1, 8)) * norms[..., None].float()
        return own(y.flatten(-2))

    def function(q, kc, kn, vc, vn):
        return eager(q, repeat_kv(one(kc, kn)), repeat_kv(one(vc, vn)))

    q, kc, _, vc, _ = args(width=32, width_v=32)
    norms = torch.rand(B, HKV, S, 4).half()
    reason = "l_kn_ has [4] norms for a vector of 32 channels, not 1"
    check_unpacked(function, q, kc, norms, vc, norms, reason=reason)


def test_nibbles_that_lie_under_the_norm_of_another_block():
    """Halves of 24 channels: the operator has a norm for bytes 0 to 7, and another for 8 to 11."""

    def function(q, kc, kn, vc, vn):
        return eager(q, *(repeat_kv(unpack(c, n, ORDERS["halves"])) for c, n in ((kc, kn), (vc, vn))))

    reason = "nibble 9 is multiplied with norm 1; blocks of 16, 8 channels give it norm 0"
    check_unpacked(function, *args(width_v=D), reason=reason)


def test_codes_of_two_tensors():
    def function(q, kc, kn, vc, vn):
        y = torch.stack((levels()[(kc & 15).long()], levels()[(vc >> 4).long()]), dim=-1).flatten(-2)
        return eager(q, *(repeat_kv(own(with_norms(y, n))) for n in (kn, vn)))

    check_unpacked(function, *args(width_v=D), reason="codes are read from both l_kc_ and ")


def test_a_head_dim_that_is_no_multiple_of_8():
    def function(q, kc, kn, vc, vn):
        return eager(q, *(repeat_kv(levels()[nibbles(c).long()] * n.float()) for c, n in ((kc, kn), (vc, vn))))

    c, norms = torch.randint(256, (B, HKV, S, 10), dtype=torch.uint8), torch.rand(B, HKV, S, 1).half()
    given = (torch.randn(B, H, 5, 20), c, norms, c.clone(), norms.clone())
    check_unpacked(function, *given, reason="head_dim 20 is not a positive multiple of 8")


def test_channels_that_are_not_last():
    """K is stored transposed, as some libraries do for the first product."""

    def function(q, kc, kn, vc, vn):
        y = levels()[torch.stack((kc & 15, kc >> 4), dim=3).flatten(2, 3).long()] * kn.float()
        return (q @ y.repeat_interleave(GROUP, 1) * 0.1).softmax(-1) @ repeat_kv(unpack(vc, vn))

    q, kc, kn, vc, vn = args(width=32)
    given = (q, kc.transpose(2, 3).contiguous(), kn.transpose(2, 3).contiguous(), vc, vn)
    recording = check_same(function, *given)
    assert of_operator(recording)[:2] == (torch.float32, torch.uint8)
    assert "K unpacked: the channels of y are not its last dimension" in recording.masks[0]


def test_float64():
    def function(q, kc, kn, vc, vn):
        return eager(q, *(repeat_kv(unpack(c, n).double()) for c, n in ((kc, kn), (vc, vn))))

    check_unpacked(function, *args(dtype=torch.float64), reason="codes are worked out in float32, and this is float64")


def test_gradients():
    def function(q, kc, kn, vc, vn):
        return eager(q, repeat_kv(unpack(kc, kn)), repeat_kv(unpack(vc, vn)))

    backend, (q, *stored) = RecordingBackend(), args()
    q.requires_grad_()
    (ours,) = torch.autograd.grad(torch.compile(function, backend=backend, dynamic=False)(q, *stored).square().sum(), q)
    (theirs,) = torch.autograd.grad(function(q, *stored).square().sum(), q)
    torch.testing.assert_close(ours, theirs)
    why = "there is no backward to pools and codes"
    assert backend.masks == [f"none, K and V unpacked: {why}"]


WRITTEN = {
    "codes": "K unpacked: l_kc_ is written in place",
    "norms": "K unpacked: l_kn_ is written in place",
    "table": "K and V unpacked: the table table is no constant of the graph",
}


@pytest.mark.parametrize(("attend", "changed"), [(eager, "codes"), (sdpa, "norms"), (eager, "table")])
def test_a_write_after_it_is_unpacked(attend, changed):
    def function(q, kc, kn, vc, vn):
        table = levels()
        k, v = (repeat_kv(unpack(c, n, table=lambda: table)) for c, n in ((kc, kn), (vc, vn)))
        {"codes": kc, "norms": kn, "table": table}[changed].zero_()
        return attend(q, k, v)

    recording = check_same(function, *args())
    assert of_operator(recording)[0] == torch.float32
    assert WRITTEN[changed] in recording.masks[0]


def test_new_keys_put_among_the_unpacked():
    """Prefill of many tokens: what is new is read as it was."""

    def function(q, new, kc, kn, vc, vn):
        k, v = (decode(c, n, q).index_copy(2, torch.arange(2), new) for c, n in ((kc, kn), (vc, vn)))
        return sdpa(q, repeat_kv(k), repeat_kv(v))

    q, *stored = args(width_v=D)
    check_unpacked(function, q, torch.randn(B, HKV, 2, D), *stored, reason="new rows are put in as they are")


def test_bytes_that_are_no_codes_are_not_spoken_of():
    """8 bits with a zero point, and masks of bytes."""

    def function(q, k, v, s):
        return sdpa(q, *(repeat_kv((x.float() - 128) * s) for x in (k, v)))

    k, v = (torch.randint(256, (B, HKV, S, D), dtype=torch.uint8) for _ in range(2))
    recording = check_same(function, torch.randn(B, H, 5, D), k, v, torch.rand(B, HKV, S, 1) * 0.01)
    assert recording.masks == ["none"]
