"""attnpatch::cache_write as a torch operator: its schema, its errors, and graphs that contain it."""

import math

import pytest
import torch
from torch.testing._internal.optests import opcheck

from attnpatch import ops
from attnpatch.kernels.cache_write import reference
from attnpatch.writing import CacheWrite

B, H, N, D, DV, CAPACITY, PAGE, PAGES = 2, 3, 4, 8, 16, 12, 4, 7
TABLE = torch.tensor([[6, 2, 5], [1, 4, 3]], dtype=torch.int32)


def arguments(paged=False, quantised=False, positions=None):
    outer = (PAGES, H, PAGE) if paged else (B, H, CAPACITY)
    caches = [torch.full((*outer, width), math.nan) for width in (D, DV)]
    scales = [None, None]
    if quantised:
        caches = [torch.zeros_like(x, dtype=torch.int8) for x in caches]
        scales = [torch.full(outer, math.nan) for _ in range(2)]
    k, v = torch.randn(B, H, N, D), torch.randn(B, H, N, DV)
    positions = torch.tensor([3, 0, 11, 12]) if positions is None else positions
    return CacheWrite(*caches, k, v, positions, TABLE if paged else None, *scales)


def copied(write):
    return CacheWrite(*(None if x is None else x.clone() for x in write))


def written(write):
    return [x for x in (*write[:2], *write[6:]) if x is not None]


def assert_written(write, expected):
    """What ``expected`` holds before the write is written here by the reference."""
    reference.cache_write(*expected)
    for x, y in zip(written(write), written(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    assert (~written(write)[-1].isnan()).any()


KINDS = {
    "dense": {},
    "paged": {"paged": True},
    "quantised": {"quantised": True},
    "both": dict.fromkeys(("paged", "quantised"), True),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_writes_in_place_and_returns_nothing(kind):
    write = arguments(**kind)
    expected = copied(write)
    assert ops.cache_write(*write) is None
    assert_written(write, expected)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_opcheck(kind):
    opcheck(torch.ops.attnpatch.cache_write.default, tuple(arguments(**kind)))


def test_opcheck_sees_an_undeclared_write():
    """That the check above can fail: an operator of the same kind that declares one of its two writes."""

    def add_one(x, y):
        x.add_(1)
        y.add_(1)

    library = torch.library.Library("attnpatch_test", "DEF")
    library.define("half(Tensor(a!) x, Tensor y) -> ()", tags=[torch.Tag.pt2_compliant_tag])
    library.impl("half", add_one, "CPU")
    torch.library.register_fake("attnpatch_test::half", lambda x, y: None, lib=library)
    with pytest.raises(Exception, match="test_schema failed with Argument y is not defined as mutable but was mutated"):
        opcheck(torch.ops.attnpatch_test.half.default, (torch.zeros(3), torch.zeros(3)))


def test_no_gradient_passes():
    write = arguments()
    k = write.k.clone().requires_grad_()
    ops.cache_write(*write._replace(k=k))
    assert not write.k_cache.requires_grad
    assert torch.equal(write.k_cache[:, :, 3], k[:, :, 0])


def step(k_cache, v_cache, k, v, position, table, k_scale, v_scale):
    """What a model's layer does: compute k, write it, read the cache, write the next token, read again."""
    k = k * 2
    ops.cache_write(k_cache, v_cache, k, v, position, table, k_scale, v_scale)
    before = k_cache.float().nan_to_num(7.0).sum(-1) + v_cache.float().nan_to_num(7.0).sum(-1)
    ops.cache_write(k_cache, v_cache, k + 1, v, position + 1, table, k_scale, v_scale)
    return before, k_cache.float().nan_to_num(7.0).sum(-1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor", "attnpatch"])
@pytest.mark.parametrize("kind", [KINDS["dense"], KINDS["both"]], ids=["dense", "both"])
def test_compiled(backend, kind):
    """The order of writes and reads is kept, and the caches written are the caller's."""
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    ours, expected = (arguments(**kind, positions=torch.tensor(2)) for _ in range(2))
    expected = copied(ours)
    for position in (2, 5, 7):
        ours, expected = (x._replace(positions=torch.tensor(position)) for x in (ours, expected))
        with torch.no_grad():
            found, wanted = compiled(*ours), step(*expected)
        torch.testing.assert_close(found, wanted)
        for x, y in zip(written(ours), written(expected), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_views_of_one_tensor(backend):
    """Keys and values of one fused projection into the two halves of one cache."""

    def write(cache, qkv, position):
        q, k, v = qkv.unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        ops.cache_write(cache[0], cache[1], k, v, position)
        return q + cache[0][:, :, :N]

    ours, qkv = torch.full((2, B, H, CAPACITY, D), math.nan), torch.randn(B, N, 3 * H * D)
    expected = ours.clone()
    with torch.no_grad():
        found = torch.compile(write, backend=backend, fullgraph=True)(ours, qkv, torch.tensor(0))
        wanted = write(expected, qkv, torch.tensor(0))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    assert (~ours.isnan()).sum() == 2 * B * H * N * D


def test_dynamic_lengths_compile_once():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ops.cache_write, backend=counter, dynamic=True, fullgraph=True)
    for n in (5, 7, 9):
        write = arguments()._replace(positions=torch.tensor(1))
        write = write._replace(k=torch.randn(B, H, n, D), v=torch.randn(B, H, n, DV))
        expected = copied(write)
        compiled(*write)
        assert_written(write, expected)
    assert counter.frame_count == 1


def wrong(**changes):
    return lambda: arguments()._replace(**changes)


def pages(**changes):
    return lambda: arguments(paged=True)._replace(**changes)


def codes(**changes):
    return lambda: arguments(quantised=True)._replace(**changes)


K, SCALE = torch.zeros(B, H, N, D), torch.zeros(B, H, CAPACITY)
INT8 = torch.zeros(B, H, CAPACITY, D, dtype=torch.int8)

ERRORS = {
    "dimensions": (wrong(k=K[0]), "must have 4 dimensions; they have 4, 4, 3, 4"),
    "batch of k and v": (wrong(k=K[:1]), r"k and v must share .*; got \(1, 3, 4\) and \(2, 3, 4\)"),
    "capacities": (wrong(k_cache=torch.zeros(B, H, 5, D)), r"agree in all but the last .*\(2, 3, 5, 8\)"),
    "heads": (
        lambda: arguments()._replace(k_cache=torch.zeros(B, 1, CAPACITY, D), v_cache=torch.zeros(B, 1, CAPACITY, DV)),
        "k has 3 heads of width 8, k_cache 1 of width 8",
    ),
    "width": (wrong(v_cache=torch.zeros(B, H, CAPACITY, 9)), "v has 3 heads of width 16, v_cache 3 of width 9"),
    "dtype": (wrong(k=K.half()), "k is torch.float16, k_cache torch.float32: cast k, or quantise the cache"),
    "sequences": (
        lambda: arguments()._replace(k_cache=torch.zeros(5, H, CAPACITY, D), v_cache=torch.zeros(5, H, CAPACITY, DV)),
        "k_cache must have a row for each of the 2 sequences of k; got 5. Pages need a block_table",
    ),
    "positions' dtype": (wrong(positions=torch.tensor(1.0)), r"positions must be int32 or int64 .*; got torch.float32"),
    "positions' shape": (wrong(positions=torch.zeros(B, 1, dtype=torch.long)), r"\[num_tokens=4\] .*; got .*\(2, 1\)"),
    "table's dtype": (pages(block_table=TABLE.float()), r"block_table must be int32 or int64 \[batch=2, num_blocks\]"),
    "table's rows": (pages(block_table=TABLE[:1]), r"block_table must be .*; got torch.int32 \(1, 3\)"),
    "no block": (pages(block_table=TABLE[:, :0]), r"a block and a page a row at least; block_table is \(2, 0\)"),
    "no rows": (
        lambda: arguments(paged=True)._replace(k_cache=torch.zeros(5, H, 0, D), v_cache=torch.zeros(5, H, 0, DV)),
        r"a page a row at least; .*k_cache \(5, 3, 0, 8\)",
    ),
    "no scale": (wrong(k_cache=INT8), r"a torch.int8 k_cache needs k_scale: float32 of shape \(2, 3, 12\)"),
    "a scale too many": (wrong(v_scale=SCALE), "v_scale is for a quantised v_cache; this one is torch.float32"),
    "scale's shape": (
        codes(k_scale=SCALE[:, :1]),
        r"k_scale must be float32 of shape \(2, 3, 12\).*got .*\(2, 1, 12\)",
    ),
    "scale's dtype": (codes(v_scale=SCALE.half()), "v_scale must be float32 .*; got torch.float16"),
    "codes given": (
        codes(k=K.to(torch.int8)),
        "k must be float16, bfloat16 or float32 to be quantised here; got torch.int8",
    ),
    "expanded cache": (
        wrong(k_cache=torch.zeros(1, H, CAPACITY, D).expand(B, -1, -1, -1)),
        "k_cache .* it is expanded",
    ),
    "expanded scale": (codes(v_scale=torch.zeros(B, H, 1).expand_as(SCALE)), r"v_scale .* \(3, 1, 0\): it is expanded"),
    "device": (wrong(k_cache=torch.zeros(B, H, CAPACITY, D, device="meta")), "k_cache is on meta, k on cpu"),
}


@pytest.mark.parametrize(("make", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(make, message):
    write = make()
    for _ in range(2):  # a refusal is not remembered as a success
        with pytest.raises(ValueError, match=message):
            ops.cache_write(*write)


def test_the_device_of_every_tensor_is_checked():
    """After a write of the same shapes, all on one device, has gone through."""
    write = arguments(paged=True)
    ops.cache_write(*write)
    with pytest.raises(ValueError, match="positions is on meta, k on cpu"):
        torch.ops.attnpatch.cache_write(*write._replace(positions=write.positions.to("meta")))
