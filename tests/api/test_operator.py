"""The operators: their checks, their fakes, their gradients; and that they write nothing."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import attnpatch
from attnpatch import ops
from attnpatch.kernels.reference import attention_lse_reference, attention_reference
from attnpatch.masking import excluded
from attnpatch.ops import make_call
from attnpatch.testing.inputs import key_bounds, random_call
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
    "bounds_shape": ({"key_bounds": zeros(B, H, Q + 1, 3).int()}, r"key_bounds \(2, 4, 6, 3\) .* = \(2, 4, 5, 3\)"),
    "bounds_last": ({"key_bounds": zeros(Q, 2).int()}, r"key_bounds \(5, 2\) does not broadcast to"),
    "bounds_dtype": ({"key_bounds": zeros(Q, 3).long()}, "key_bounds must be int32; got torch.int64"),
    "bounds_device": ({"key_bounds": zeros(Q, 3, device="meta").int()}, "key_bounds is on meta, q on cpu"),
    "sinks_shape": ({"sinks": zeros(HKV)}, r"sinks must be a float \[num_heads=4\] on cpu; got torch.float32 \(2,\)"),
    "sinks_dtype": ({"sinks": zeros(H).int()}, "sinks must be a float .*; got torch.int32"),
    "sinks_device": ({"sinks": zeros(H, device="meta")}, "sinks must be .* on cpu; got .* on meta"),
    "slopes_shape": ({"alibi_slopes": zeros(1, H)}, r"\[num_heads=4\] or \[batch=2, num_heads\] .* \(1, 4\)"),
    "slopes_dtype": ({"alibi_slopes": zeros(H).double()}, "alibi_slopes must be a float32 .*; got torch.float64"),
    "slopes_device": ({"alibi_slopes": zeros(H, device="meta")}, "alibi_slopes must be .* on cpu; got .* on meta"),
    "backend": ({"backends": "cpu.fast"}, r"unknown backend 'cpu\.fast'"),
}  # fmt: skip


@pytest.mark.parametrize("operator", [ops.attention, ops.attention_lse])
@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(changes, message, operator):
    with pytest.raises((ValueError, RuntimeError), match=message):
        operator(**qkv(**changes))


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


ROW = torch.arange(Q)

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
    "bounds": {"key_bounds": key_bounds(ROW, ROW + 3)},
    "bounds_per_head": {"key_bounds": key_bounds(torch.arange(H)[:, None] - 1, ROW + 40)},
    "bounds_and_mask": {"key_bounds": key_bounds(0, ROW + 2, 0), "attn_mask": torch.arange(Q * K).view(Q, K) % 3 != 0},
    "bounds_hide_rows": {"key_bounds": key_bounds(ROW * 3, 7)},
    "sinks": {"sinks": torch.linspace(-2, 3, H)},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 1, H), "q_offset": 4},
    "alibi_per_sequence": {"alibi_slopes": torch.rand(B, H), "q_offset_tensor": torch.tensor([1, 3])},
    "everything": {
        "window_right": 0,
        "window_left": 3,
        "q_offset": 4,
        "key_padding": torch.arange(K)[None].expand(B, K) != 6,
        "attn_mask": torch.linspace(-2, 2, Q * K).view(Q, K),
        "softcap": 1.5,
        "key_bounds": key_bounds(2, ROW + 4, 0),
        "sinks": torch.linspace(-2, 3, H),
        "alibi_slopes": torch.linspace(0.1, 1, H),
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
def test_values_of_the_lse(terms):
    arguments = qkv(**terms)
    y, lse = ops.attention_lse(**arguments)
    y64, lse64 = attention_lse_reference(make_call(**arguments))
    assert (lse.dtype, lse.is_contiguous()) == (torch.float32, True)
    torch.testing.assert_close(y, y64.float())
    torch.testing.assert_close(lse, lse64.float())


@pytest.mark.parametrize("operator", ["attention", "attention_lse"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_opcheck(terms, operator):
    leaves = [name for name in ("q", "k", "v", "sinks", "alibi_slopes") if name in qkv(**terms)]
    arguments = qkv(**terms)
    arguments.update({name: arguments[name].clone().requires_grad_() for name in leaves})
    torch.library.opcheck(getattr(torch.ops.attnpatch, operator).default, (), arguments)


@pytest.mark.parametrize("grad_lse", [None, torch.ones(B, H, Q)], ids=["o", "lse"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_opcheck_backward(terms, grad_lse):
    arguments = {"grad_o": torch.randn(B, H, Q, D), "grad_lse": grad_lse, **qkv(**terms)}
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


def with_leaves(terms):
    """The arguments in float64 (slopes stay float32), and those of them that can have a gradient, as leaves."""
    arguments = qkv(torch.float64, **terms)
    names = [n for n in ("q", "k", "v", "attn_mask", "sinks", "alibi_slopes") if n in arguments]
    leaves = {n: arguments[n] for n in names if arguments[n].is_floating_point()}
    leaves = {n: (x.clone() if n == "alibi_slopes" else x.double()).requires_grad_() for n, x in leaves.items()}
    return {**arguments, **leaves}, leaves


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_gradients(terms):
    """q, k, v, an additive mask, sinks and slopes get the gradients of the definition."""
    arguments, leaves = with_leaves(terms)
    grad_o = torch.randn(B, H, Q, D, dtype=torch.float64)
    ours = torch.autograd.grad(attnpatch.attention(**arguments), list(leaves.values()), grad_o)
    theirs = torch.autograd.grad(attention_reference(make_call(**arguments)), list(leaves.values()), grad_o)
    for name, a, b in zip(leaves, ours, theirs, strict=True):
        assert a.shape == leaves[name].shape
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_gradients_through_the_lse(terms):
    """Alone, beside the output, and of rows without a key, whose lse is a constant."""
    arguments, leaves = with_leaves(terms)
    grad_o, grad_lse = torch.randn(B, H, Q, D, dtype=torch.float64), torch.randn(B, H, Q)
    (y, lse), (y64, lse64) = ops.attention_lse(**arguments), attention_lse_reference(make_call(**arguments))
    of_v = leaves.pop("v")
    alone = torch.autograd.grad(lse, list(leaves.values()), grad_lse, retain_graph=True)
    alone64 = torch.autograd.grad(lse64, list(leaves.values()), grad_lse.double(), retain_graph=True)
    both = torch.autograd.grad((y, lse), [*leaves.values(), of_v], (grad_o, grad_lse))
    both64 = torch.autograd.grad((y64, lse64), [*leaves.values(), of_v], (grad_o, grad_lse.double()))
    for a, b in zip((*alone, *both), (*alone64, *both64), strict=True):
        torch.testing.assert_close(a, b)


def test_gradcheck():
    """The definition's gradients, which the tests above compare with, against finite differences."""
    arguments, leaves = with_leaves({**TERMS["everything"], "sinks": torch.linspace(-2, 3, H)})
    leaves.pop("alibi_slopes")  # float32: too coarse for differences

    def function(*values):
        return attention_lse_reference(make_call(**{**arguments, **dict(zip(leaves, values, strict=True))}))

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("per_sequence", [False, True])
def test_gradient_of_slopes_is_a_slope(per_sequence):
    """Against the additive mask they stand for."""
    arguments, leaves = with_leaves({"alibi_slopes": torch.rand((B, H) if per_sequence else (H,)), "q_offset": 4})
    grad_o = torch.randn(B, H, Q, D, dtype=torch.float64)
    (ours,) = torch.autograd.grad(attnpatch.attention(**arguments), leaves["alibi_slopes"], grad_o)
    slopes = leaves["alibi_slopes"].detach().double().requires_grad_()
    apart = (ROW[:, None] + 4 - torch.arange(K)).abs()
    arguments = {**arguments, "alibi_slopes": None, "attn_mask": -slopes[..., None, None] * apart}
    (theirs,) = torch.autograd.grad(attention_reference(make_call(**arguments)), slopes, grad_o)
    torch.testing.assert_close(ours, theirs.float())


def test_a_loss_of_minus_infinity_sends_nothing_back():
    """The gradient that arrives at the lse of a row without a key is often not finite."""
    arguments = qkv(key_bounds=key_bounds(ROW * 3, 7))
    leaves = [arguments[n].requires_grad_() for n in "qkv"]
    y, lse = ops.attention_lse(**arguments)
    grads = torch.autograd.grad((y, lse), leaves, (torch.ones_like(y), torch.where(lse == -torch.inf, torch.nan, 1.0)))
    assert all(grad.isfinite().all() for grad in grads)


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


def naive_bounds(mask):
    """Row by row, in Python."""
    visible = ~excluded(mask)
    plain = visible if mask.dtype == torch.bool else visible & (mask == 0)
    rows = []
    for seen, easy in zip(visible.flatten(end_dim=2), plain.flatten(end_dim=2), strict=True):
        keys = seen.nonzero()[:, 0].tolist()
        first, stop = (keys[0], keys[-1] + 1) if keys else (mask.shape[3], 0)
        rows.append([-first, stop, int(all(easy[first:stop].tolist()))])
    return torch.tensor(rows, dtype=torch.int32).reshape(*mask.shape[:3], 3)


CAUSAL = torch.ones(Q, K, dtype=torch.bool).tril(2)

MASKS = {
    "causal": CAUSAL[None, None],
    "all": torch.ones(1, 1, Q, K, dtype=torch.bool),
    "nothing": torch.zeros(B, 1, Q, K, dtype=torch.bool),
    "holes": torch.rand(B, H, Q, K) > 0.4,
    "causal, some rows see nothing": (CAUSAL & (ROW[:, None] % 2 == 0))[None, None],
    "one row": torch.rand(B, 1, 1, K) > 0.5,
    "additive": torch.zeros(B, 1, Q, K).masked_fill(~CAUSAL, -torch.inf),
    "minimum": torch.zeros(B, 1, Q, K, dtype=torch.bfloat16).masked_fill(~CAUSAL, torch.finfo(torch.bfloat16).min),
    "half minimum": torch.zeros(B, 1, Q, K).half().masked_fill(~CAUSAL, -65504.0),
    "a bias is not plain": torch.zeros(1, H, Q, K).index_fill(3, torch.tensor([3]), -100.0),
    "float64": torch.randn(1, 1, Q, K).double().masked_fill(~CAUSAL, -1e300),
    "expanded": CAUSAL[None, None].expand(B, H, Q, K),
    "expanded keys": (torch.rand(B, 1, Q, 1) > 0.5).expand(B, 1, Q, K),
    "transposed": (torch.rand(B, 1, K, Q) > 0.3).transpose(2, 3),
    "every second": (torch.rand(B, 1, Q, 2 * K) > 0.3)[..., ::2],
    "reversed batch": (torch.rand(2, B, Q, K) > 0.3).transpose(0, 1),
    "no keys": torch.zeros(B, 1, Q, 0, dtype=torch.bool),
    "no rows": torch.zeros(B, 1, 0, K),
    "no sequences": torch.zeros(0, 1, Q, K),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_bounds_of_masks(mask):
    found = ops.key_bounds(mask)
    assert torch.equal(found, naive_bounds(mask))
    assert (found.dtype, found.is_contiguous()) == (torch.int32, True)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_opcheck_of_key_bounds(mask):
    torch.library.opcheck(torch.ops.attnpatch.key_bounds.default, (mask,))


@pytest.mark.parametrize("name", ["causal", "holes", "minimum", "a bias is not plain", "nothing"])
def test_a_mask_with_its_bounds_is_the_mask(name):
    mask = MASKS[name]
    arguments = qkv(attn_mask=mask)
    expected = attention_reference(make_call(**arguments))
    y = attnpatch.attention(**arguments, key_bounds=ops.key_bounds(mask))
    torch.testing.assert_close(y, expected.float())


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(Q, K, dtype=torch.bool), r"must be \[b, h, q, k\]; got \(5, 9\)"),
        (torch.ones(1, 1, Q, K).int(), "must be bool .* or an additive float; got torch.int32"),
    ],
)
def test_bad_masks(mask, message):
    for x in (mask, mask.to("meta")):
        with pytest.raises(ValueError, match=message):
            ops.key_bounds(x)
