"""attnpatch.attention: its checks, its fake, its gradients; and that it writes nothing."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import attnpatch
from attnpatch.kernels.reference import attention_reference
from attnpatch.ops import make_call
from attnpatch.testing.inputs import random_call
from attnpatch.testing.tolerance import assert_same_function

B, H, HKV, Q, K, D = 2, 4, 2, 5, 9, 8


def qkv(dtype=torch.float32, **changes):
    """q, k, v as a mapping; ``changes`` replace single ones."""
    call = random_call(B, H, HKV, Q, K, D, dtype=dtype)
    return {"q": call.q, "k": call.k, "v": call.v, "sm_scale": 0.3, **changes}


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


BAD = {
    "rank": ({"q": zeros(H, Q, D)}, "q, k and v must be .*; got 3, 4 and 4 dimensions"),
    "dtypes": ({"k": zeros(B, HKV, K, D, dtype=torch.float16)}, "must share one float dtype; got torch.float32, "),
    "integers": ({n: zeros(B, 2, 3, D, dtype=torch.int64) for n in "qkv"}, "must share one float dtype; got"),
    "devices": ({"v": zeros(B, HKV, K, D, device="meta")}, "must be on one device; got cpu, cpu and meta"),
    "batch": ({"k": zeros(3, HKV, K, D)}, "must share the batch size; got 2, 3 and 2"),
    "head_dim": ({"k": zeros(B, HKV, K, D + 1)}, "q and k must share head_dim; got 8 and 9"),
    "kv_heads": ({"v": zeros(B, 1, K, D)}, "k and v must have the same number of heads; got 2 and 1"),
    "group": ({"k": zeros(B, 3, K, D), "v": zeros(B, 3, K, D)}, "the 4 heads of q are not a multiple of the 3 heads"),
    "no_heads": ({"k": zeros(B, 0, K, D), "v": zeros(B, 0, K, D)}, "not a multiple of the 0 heads"),
    "kv_lengths": ({"v": zeros(B, HKV, K + 1, D)}, "k and v must have the same length; got 9 and 10"),
    "mask_shape": ({"attn_mask": zeros(Q, K + 1)}, r"attn_mask \(5, 10\) does not broadcast to .* = \(2, 4, 5, 9\)"),
    "mask_heads": ({"attn_mask": zeros(B, HKV, Q, K)}, r"attn_mask \(2, 2, 5, 9\) does not broadcast"),
    "mask_rank": ({"attn_mask": zeros(1, B, H, Q, K)}, "does not broadcast"),
    "mask_dtype": ({"attn_mask": zeros(Q, K, dtype=torch.int64)}, "or an additive float; got torch.int64"),
    "mask_device": ({"attn_mask": zeros(Q, K, device="meta")}, "attn_mask is on meta, q on cpu"),
    "padding_shape": ({"key_padding": zeros(B, Q, dtype=torch.bool)}, r"key_padding \(2, 5\) is not .* = \(2, 9\)"),
    "padding_batch": ({"key_padding": zeros(1, K, dtype=torch.bool)}, r"key_padding \(1, 9\) is not"),
    "padding_dtype": ({"key_padding": zeros(B, K)}, "key_padding must be a bool .*; got torch.float32"),
    "padding_rank": ({"key_padding": zeros(B, 1, K, dtype=torch.bool)}, "key_padding must be a bool"),
    "offset_dtype": ({"q_offset_tensor": torch.tensor(1.0)}, "q_offset_tensor must be int32 or int64"),
    "offset_shape": ({"q_offset_tensor": torch.tensor([1, 2, 3])}, r"of shape \[\] or \[batch=2\] on cpu"),
    "offset_device": ({"q_offset_tensor": torch.tensor(1, device="meta")}, "q_offset_tensor must be"),
    "backend": ({"backends": "cpu.fast"}, r"unknown backend 'cpu\.fast'"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(changes, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        attnpatch.attention(**qkv(**changes))


@pytest.mark.parametrize("name", ["rank", "batch", "head_dim", "group", "kv_lengths", "mask_shape", "padding_shape"])
def test_the_fake_makes_the_same_checks(name):
    """A graph with wrong shapes fails when it is traced, not when it runs."""
    changes, message = BAD[name]
    arguments = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in qkv(**changes).items()}
    with pytest.raises((ValueError, RuntimeError), match=message.replace("cpu", "meta")):
        attnpatch.attention(**arguments)


def test_no_backend_lists_every_refusal():
    with pytest.raises(attnpatch.NoBackend, match=r"q \(2, 4, 5, 8\).*cpu\.sdpa: softcap 2\.0 has no place"):
        attnpatch.attention(**qkv(softcap=2.0, backends="cpu.sdpa"))


TERMS = {
    "plain": {},
    "causal": {"window_right": 0, "q_offset": 4},
    "window": {"window_right": 0, "window_left": 2, "q_offset": 4},
    "offset_tensor": {"window_right": 0, "q_offset_tensor": torch.tensor(4)},
    "offset_sum": {"window_right": 0, "q_offset_tensor": torch.tensor([1, 3]), "q_offset": 1},
    "padding": {"key_padding": torch.arange(K)[None].expand(B, K) != 2},
    "bool_mask": {"attn_mask": torch.arange(Q * K).view(Q, K) % 3 != 0},
    "bias": {"attn_mask": torch.linspace(-2, 2, H * Q * K).view(1, H, Q, K)},
    "column_bias": {"attn_mask": torch.linspace(-2, 2, H * K).view(H, 1, K)},
    "softcap": {"softcap": 1.5},
    "everything": {
        "window_right": 0,
        "window_left": 3,
        "q_offset": 4,
        "key_padding": torch.arange(K)[None].expand(B, K) != 6,
        "attn_mask": torch.linspace(-2, 2, Q * K).view(Q, K),
        "softcap": 1.5,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_values(terms, dtype):
    arguments = qkv(dtype, **terms)
    call = make_call(**arguments)
    y = attnpatch.attention(**arguments)
    assert_same_function(y, attention_reference(call, dtype), attention_reference(call))


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_opcheck(terms):
    arguments = qkv(**terms)
    for name in "qkv":
        arguments[name].requires_grad_()
    torch.library.opcheck(torch.ops.attnpatch.attention.default, (), arguments)


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_opcheck_backward(terms):
    arguments = qkv(**terms)
    arguments = {"grad_o": torch.randn(B, H, Q, D), **arguments}
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.attnpatch.attention_backward.default, (), arguments, test_utils=utils)


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_nothing_is_written(terms):
    arguments = qkv(**terms)
    before = {n: x.clone() for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    attnpatch.attention(**arguments)
    assert all(torch.equal(arguments[n], x) for n, x in before.items())


def test_layout_of_the_output():
    y = attnpatch.attention(**qkv())
    assert y.shape == (B, H, Q, D)
    assert y.transpose(1, 2).is_contiguous()
    assert torch.ops.attnpatch.attention(*(x.to("meta") for x in list(qkv().values())[:3]), 0.3).stride() == y.stride()


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_gradients(terms):
    """q, k, v and an additive mask get the gradients of the definition."""
    arguments = qkv(torch.float64, **terms)
    mask = arguments.get("attn_mask")
    wanted = ["q", "k", "v"]
    if mask is not None and mask.is_floating_point():
        arguments["attn_mask"] = mask.double()
        wanted.append("attn_mask")
    leaves = {n: arguments[n].clone().requires_grad_() for n in wanted}
    arguments.update(leaves)
    grad_o = torch.randn(B, H, Q, D, dtype=torch.float64)
    ours = torch.autograd.grad(attnpatch.attention(**arguments), list(leaves.values()), grad_o)
    theirs = torch.autograd.grad(attention_reference(make_call(**arguments)), list(leaves.values()), grad_o)
    for name, a, b in zip(wanted, ours, theirs, strict=True):
        assert a.shape == leaves[name].shape
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


def test_gradients_of_many_row_blocks():
    """The backward works on 128 rows at a time."""
    call = random_call(1, 2, 1, 300, 310, 8, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in call[:3]]
    terms = {"window_right": 0, "q_offset": 10, "window_left": 40}
    grad_o = torch.randn(1, 2, 300, 8, dtype=torch.float64)
    ours = torch.autograd.grad(attnpatch.attention(*leaves, 0.3, **terms), leaves, grad_o)
    theirs = torch.autograd.grad(attention_reference(make_call(*leaves, 0.3, **terms)), leaves, grad_o)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_rows_without_a_key_are_zero():
    arguments = qkv(key_padding=torch.zeros(B, K, dtype=torch.bool))
    leaves = [arguments[n].requires_grad_() for n in "qkv"]
    attnpatch.attention(**arguments).sum().backward()
    assert all((leaf.grad == 0).all() for leaf in leaves)


def test_gradients_are_finite_beside_an_unwritten_cache_tail():
    arguments = qkv(key_padding=torch.arange(K)[None].expand(B, K) < 4)
    for name in "kv":
        arguments[name][:, :, 4:] = torch.nan
    leaves = [arguments[n].detach().requires_grad_() for n in "qkv"]
    arguments.update(dict(zip("qkv", leaves, strict=True)))
    attnpatch.attention(**arguments).sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_only_what_requires_a_gradient_gets_one():
    arguments = qkv()
    arguments["v"].requires_grad_()
    attnpatch.attention(**arguments).sum().backward()
    assert arguments["q"].grad is None
    assert arguments["v"].grad is not None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_whole(backend):
    arguments = qkv(window_right=0, q_offset=4)
    compiled = torch.compile(lambda **a: attnpatch.attention(**a) + 1.0, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(**arguments), attnpatch.attention(**arguments) + 1.0)


def test_backward_under_a_dispatch_mode():
    """FlopCounterMode, selective checkpointing: a mode switches autograd off inside kernels."""
    arguments = qkv(**TERMS["everything"])
    leaves = [arguments[n].requires_grad_() for n in "qkv"]
    with FlopCounterMode(display=False):
        ours = torch.autograd.grad(attnpatch.attention(**arguments).sum(), leaves)
    for a, b in zip(ours, torch.autograd.grad(attnpatch.attention(**arguments).sum(), leaves), strict=True):
        assert torch.equal(a, b)
