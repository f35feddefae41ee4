"""Autocast casts what a product multiplies outside of the graph: attention runs in the product's dtype."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import attnpatch
from attnpatch.graph import value
from attnpatch.testing.recording import check_rewrite, record

B, H, KV, S, D = 2, 4, 2, 12, 16
LOW = torch.bfloat16


def qkv(*dtypes, heads=(H, KV, KV)):
    """Float32 but for the dtypes given; what rotary embeddings, caches and projections make of a float32 model."""
    dtypes = dtypes or (torch.float32, torch.float32, LOW)
    return tuple(torch.randn(B, h, S, D).to(dtype) for h, dtype in zip(heads, dtypes, strict=True))


def repeated(x):
    return x[:, :, None].expand(B, KV, H // KV, S, D).reshape(B, H, S, D)


def causal(dtype=torch.float32):
    hidden = torch.full((S, S), torch.finfo(dtype).min, dtype=dtype).triu(1)
    return hidden[None, None].expand(B, 1, S, S)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=causal())


def eager(q, k, v):
    scores = q @ repeated(k).transpose(2, 3) * D**-0.5 + causal()
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ repeated(v)


def einsum(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, repeated(k)) * D**-0.5 + causal()
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), repeated(v))


def baddbmm(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, repeated(k), repeated(v)))
    scores = torch.baddbmm(causal()[0].expand(B * H, S, S), q, k.mT, alpha=D**-0.5)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (B, H))


def check(function, *args, dtype=LOW):
    """Rewritten under autocast, ``function`` is the same, its one attention in the dtype that autocast has."""
    with torch.autocast("cpu", dtype):
        return check_rewrite(function, *args)


def ran_in(recording, low=LOW):
    """Dtypes of the fused sites as reported; q, k and v must have them where the operator runs."""
    assert recording.reasons == []
    for node, site in zip(recording.named("attention"), recording.sites, strict=True):
        assert {str(value(x).dtype) for x in node.args[:3]} == {f"torch.{site.dtype}"}
    return [site.dtype for site in recording.sites]


@pytest.mark.parametrize("function", [sdpa, eager, einsum, baddbmm], ids=lambda f: f.__name__)
def test_the_dtype_of_autocast(function):
    recording = check(function, *qkv())
    assert ran_in(recording) == ["bfloat16"]
    assert recording.masks == ["causal"]
    assert recording.sites[0].num_kv_heads == KV, "the cast hides no repeat"
    assert recording.square_nodes(S, S) == []


def test_float16():
    recording = check(sdpa, *qkv(torch.float32, LOW, torch.float16), dtype=torch.float16)
    assert ran_in(recording) == ["float16"]


def test_float64_is_not_cast():
    assert ran_in(check(eager, *qkv(*[torch.float64] * 3))) == ["float64"]


def in_a_region(function, enabled=True):
    def inside(*args):
        with torch.autocast("cpu", LOW, enabled=enabled):
            return function(*args)

    return inside


def test_a_region_inside_the_graph():
    recording = check_rewrite(in_a_region(eager), *qkv(*[torch.float32] * 3))
    assert len(recording.named("enter_autocast", "_enter_autocast")) == 1
    assert ran_in(recording) == ["bfloat16"]


def test_a_region_without_autocast():
    recording = check(in_a_region(eager, enabled=False), *qkv(*[torch.float32] * 3))
    assert ran_in(recording) == ["float32"]


def test_scores_without_autocast():
    """The wider of the two products: nothing is rounded that the original does not round."""

    def function(q, k, v):
        with torch.autocast("cpu", enabled=False):
            p = (q @ repeated(k).mT * D**-0.5).softmax(-1)
        return p @ repeated(v)

    assert ran_in(check(function, *qkv())) == ["float32"]


def test_dtypes_mixed_by_hand():
    def function(q, k, v):
        return (q @ repeated(k).mT * D**-0.5).float().softmax(-1) @ repeated(v)

    recording = check_rewrite(function, *qkv(torch.float16, torch.float16, torch.float32))
    assert ran_in(recording) == ["float32"]


def test_upcasts_are_still_dropped():
    def function(q, k, v):
        return ((q.float() @ k.float().mT * D**-0.5).softmax(-1) @ v.float()).to(LOW)

    assert ran_in(check_rewrite(function, *qkv(LOW, LOW, LOW, heads=(H, H, H)))) == ["bfloat16"]


def test_multihead_attention_in_a_region():
    """Torch's function is one node of the graph, whose inside is traced."""
    attend = nn.MultiheadAttention(H * D, H, batch_first=True).requires_grad_(False)

    def function(x):
        with torch.autocast("cpu", torch.float16):
            return attend(x, x, x, need_weights=False)[0]

    recording = record(function, torch.randn(B, S, H * D))
    assert ran_in(recording) == ["float16"]
    assert not torch.is_autocast_enabled("cpu")


def test_codes_stay_codes():
    def function(q, codes, scales, v):
        return (q @ (codes.float() * scales).mT).softmax(-1) @ v

    codes = torch.randint(-99, 99, (B, H, S, D), dtype=torch.int8)
    q, v = qkv(torch.float32, torch.float32, heads=(H, H))
    with torch.autocast("cpu", LOW):
        recording = check_rewrite(function, q, codes, torch.rand(B, H, S, 1) * 0.01, v)
    (node,) = recording.named("attention")
    assert [value(x).dtype for x in node.args[:3]] == [LOW, torch.int8, LOW]
    assert recording.sites[0].dtype == "bfloat16"


def test_a_pool_is_not_cast_as_a_whole():
    def function(q, k_pool, v_pool, table):
        k, v = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (k_pool, v_pool))
        return (q @ k.mT).softmax(-1) @ v

    pools = torch.randn(2, 64, 4, H, D).unbind()
    args = torch.randn(B, H, S, D), *pools, torch.arange(B * 3).view(B, 3)
    assert value(record(function, *args).named("attention")[0].kwargs["block_table"]) is not None
    recording = check(function, *args)
    assert ran_in(recording) == ["bfloat16"]
    assert "block_table" not in recording.named("attention")[0].kwargs
    assert max(value(n).numel() for n in recording.named("to")) == B * H * S * D


def test_a_refused_site_is_cast_by_autocast_alone():
    def function(q, k, v):
        p = (q @ repeated(k).mT * D**-0.5).softmax(-1)
        return p @ repeated(v), p

    args = qkv()
    with torch.autocast("cpu", LOW):
        recording, expected = record(function, *args), function(*args)
    assert "output_attentions" in recording.reasons[0]
    assert recording.after == recording.before
    torch.testing.assert_close(recording.output, expected, rtol=0, atol=0)


def test_the_operator_runs_as_given():
    """Products inside of a backend are not cast once more, in the backward neither."""
    q, k, v = (x.requires_grad_() for x in qkv(*[torch.float32] * 3))

    def run():
        o = attnpatch.attention(q, k, v, 0.25, softcap=5.0, backends="cpu.tiled")
        return (o, *torch.autograd.grad(o.sum(), (q, k, v)))

    expected = run()
    with torch.autocast("cpu", LOW):
        under_autocast = run()
    torch.testing.assert_close(under_autocast, expected, rtol=0, atol=0)


@contextmanager
def cuda_autocast():
    """What ``torch.autocast("cuda", LOW)`` sets, which refuses to without a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", LOW)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def test_on_a_gpu():
    """There softmax runs in float32, which the CPU's autocast leaves in bfloat16. Needs no GPU."""

    def function(q, k, v):
        return (q @ k.mT * D**-0.5).softmax(-1) @ v, F.scaled_dot_product_attention(q, k, v)

    with FakeTensorMode(), cuda_autocast():
        args = [torch.empty(B, H, S, D, device="cuda", dtype=dtype) for dtype in (torch.float32, torch.float32, LOW)]
        assert args[2].softmax(-1).dtype == torch.float32
        graph, report = attnpatch.rewrite(torch.fx.symbolic_trace(function), args)
    assert [(site.status, site.dtype) for site in report.sites] == [("fused", "bfloat16")] * 2
    operators = [n for n in graph.graph.nodes if n.target is torch.ops.attnpatch.attention.default]
    assert [value(x).dtype for n in operators for x in n.args[:3]] == [LOW] * 6
