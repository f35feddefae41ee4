"""What the operator remembers of a kind of arguments, and what it does not; the short way past autograd."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnpatch
from attnpatch import dispatch, ops
from attnpatch.attention_call import AttentionCall
from attnpatch.checking import make_call
from attnpatch.kernels.common import support
from attnpatch.kernels.reference import attention_lse_reference, attention_reference
from attnpatch.testing.inputs import key_bounds, paged, quantised, random_call

B, H, HKV, Q, K, D = 2, 4, 2, 5, 9, 8


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch):
    monkeypatch.setattr(support, "_plans", {})
    monkeypatch.setattr(support, "_kinds", {})


def arguments(seed=0, **changes):
    """The operator's arguments, all of them, in order."""
    torch.manual_seed(seed)
    call = random_call(B, H, HKV, Q, K, D)
    call = changes.pop("storage", lambda call: call)(call)
    fields = {**call._asdict(), "sm_scale": 0.3, **changes}
    offset = {"q_offset_tensor": None, **fields}["q_offset_tensor"]
    masks = (fields["attn_mask"], fields["key_padding"], offset, fields["q_offset"])
    rest = [fields[name] for name in AttentionCall._fields[7:] if name != "lse"]
    return (call.q, fields["k"], fields["v"], fields["sm_scale"], *masks, *rest)


def repeating(call):
    """With scales that are yet to be expanded."""
    return call._replace(k_scale=call.k_scale[..., :1], v_scale=call.v_scale[..., :1])


ROW = torch.arange(Q)

KINDS = {
    "plain": {},
    "a mask of all": {"attn_mask": torch.rand(B, H, Q, K) > 0.3},
    "a mask that repeats": {"attn_mask": torch.rand(Q, K) > 0.3},
    "a bias that repeats": {"attn_mask": torch.randn(H, 1, K)},
    "padding": {"key_padding": torch.rand(B, K) > 0.3},
    "an offset": {"window_right": 0, "q_offset": 4},
    "a tensor": {"window_right": 0, "q_offset_tensor": torch.tensor(2)},
    "a tensor and an offset": {"window_right": 0, "q_offset_tensor": torch.tensor(2), "q_offset": 1},
    "a tensor of one": {"window_right": 0, "q_offset_tensor": torch.tensor([2])},
    "a tensor of one and an offset": {"window_right": 0, "q_offset_tensor": torch.tensor([2]), "q_offset": 2},
    "a tensor of each": {"window_right": 0, "q_offset_tensor": torch.tensor([2, 4]), "q_offset": -1},
    "bounds that repeat": {"key_bounds": key_bounds(ROW, ROW + 3)},
    "terms": {"softcap": 1.5, "sinks": torch.randn(H), "alibi_slopes": torch.rand(H), "window_left": 3},
    "8 bit": {"storage": lambda call: quantised(call, torch.int8)},
    "8 bit, scales of heads": {"storage": lambda call: quantised(call, torch.int8, per="head")},
    "8 bit, scales that repeat": {"storage": lambda call: repeating(quantised(call, torch.int8, per="head"))},
    "pages": {"storage": lambda call: paged(call, 3)},
    "batch_invariant": {"batch_invariant": True},
}


def same(a, b):
    if not isinstance(a, torch.Tensor):
        return a == b
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_call_of_a_known_kind_is_the_checked_one(changes):
    for seed in range(3):
        args = arguments(seed, **changes)
        found, expected = ops._call(args), make_call(*args)
        wrong = [name for name, a, b in zip(AttentionCall._fields, found, expected, strict=True) if not same(a, b)]
        assert not wrong
    assert len(support._kinds) == 1


@pytest.mark.parametrize("length", range(4, 21))
def test_arguments_left_out_have_their_defaults(length):
    """The dispatcher drops trailing arguments that equal them."""
    args = arguments()
    assert all(same(a, b) for a, b in zip(ops._call(args[:length]), make_call(*args), strict=True))


@pytest.mark.parametrize(("first", "second"), itertools.permutations(KINDS, 2))
def test_kinds_do_not_mix(first, second):
    """In either order, and back again."""
    for name in (first, second, first):
        args = arguments(**KINDS[name])
        call, expected = ops._call(args), make_call(*args)
        assert all(same(a, b) for a, b in zip(call, expected, strict=True))
        assert dispatch._choice(call, ()) == support.planned(dispatch._choice, call, ())
    assert len(support._kinds) == 2


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("operator", [ops.attention, ops.attention_lse], ids=["attention", "attention_lse"])
def test_values_of_later_calls(operator, changes):
    for seed in range(3):
        args = arguments(seed, **changes)
        call, y = make_call(*args), operator(*args)
        if operator is ops.attention_lse:
            y, lse = y
            torch.testing.assert_close(lse, attention_lse_reference(call)[1].float(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(y, attention_reference(call).float(), atol=1e-4, rtol=1e-4)


WRONG = {
    "mask": ({"attn_mask": torch.zeros(Q, K + 1)}, r"attn_mask \(5, 10\) does not broadcast"),
    "mask_dtype": ({"attn_mask": torch.zeros(Q, K).int()}, "or an additive float; got torch.int32"),
    "mask_device": ({"attn_mask": torch.zeros(Q, K, device="meta")}, "attn_mask is on meta, q on cpu"),
    "padding": ({"key_padding": torch.ones(B, K)}, "key_padding must be a bool"),
    "kv": ({"k": torch.zeros(B, HKV, K + 1, D)}, "k and v must have the same length; got 10 and 9"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_errors_come_every_time(changes, message):
    """After good calls too; they are no kind's answer."""
    for _ in range(2):
        ops._call(arguments(attn_mask=torch.ones(Q, K), key_padding=torch.ones(B, K, dtype=torch.bool)))
        with pytest.raises((ValueError, RuntimeError), match=message):
            ops._call(arguments(**changes))


def test_refusals_come_every_time():
    for _ in range(2):
        attnpatch.attention(*arguments(softcap=2.0))
        with pytest.raises(attnpatch.NoBackend, match=r"softcap 2\.0 has no place"):
            attnpatch.attention(*arguments(softcap=2.0), backends="cpu.sdpa")


def test_every_call_is_recorded():
    args = arguments()
    with dispatch.recording() as recorded:
        for names in ("", "cpu.tiled", "", "cpu.tiled"):
            attnpatch.attention(*args, backends=names)
    assert [entry.backend for entry in recorded.dispatches] == ["cpu.sdpa", "cpu.tiled"] * 2
    assert recorded.traffic == [dispatch.traffic_of(make_call(*args))] * 4


def test_the_choice_is_made_once(monkeypatch):
    asked, choose = [], dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda call, names: asked.append(names) or choose(call, names))
    for seed, names in ((0, ""), (1, ""), (2, "cpu.tiled"), (3, "cpu.tiled"), (4, "")):
        attnpatch.attention(*arguments(seed), backends=names)
    assert asked == [(), ("cpu.tiled",)]


@pytest.fixture
def ways(monkeypatch):
    """Whether the dispatcher is below autograd, at each call."""
    seen, run = [], dispatch.run

    def looked(call, names):
        seen.append(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality))
        return run(call, names)

    monkeypatch.setattr(dispatch, "run", looked)
    return seen


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_a_mode_sees_the_operator(grad):
    args = arguments()
    with torch.set_grad_enabled(grad), Seen() as seen:
        attnpatch.attention(*args)
    assert seen.operators[0] == "attnpatch.attention.default"


@pytest.mark.parametrize("grad", [False, True])
def test_fake_tensors_run_nothing(grad, ways):
    with torch._subclasses.FakeTensorMode() as mode, torch.set_grad_enabled(grad):
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments()]
        y = attnpatch.attention(*fakes)
    y = attnpatch.attention(*fakes)  # outside of the mode, they still are fakes
    assert y.shape == (B, H, Q, D)
    assert not ways


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("operator", [ops.attention, ops.attention_lse], ids=["attention", "attention_lse"])
def test_backends_run_below_autograd(operator, grad, wants, ways):
    args = arguments()
    args[2].requires_grad_(wants)
    with torch.set_grad_enabled(grad):
        o = operator(*args)
    o = o if isinstance(o, torch.Tensor) else o[0]
    assert ways == [True]
    assert o.requires_grad == (grad and wants)
    assert not o._is_view()


def test_vmap_has_the_same_values():
    """Transforms see the operator too."""
    args = arguments()
    qs = torch.stack([args[0], 2 * args[0]])
    with torch.no_grad():
        found = torch.vmap(lambda q: attnpatch.attention(q, *args[1:]))(qs)
    torch.testing.assert_close(found, torch.stack([attnpatch.attention(q, *args[1:]) for q in qs]))


def test_functional_gradients_are_refused():
    """And not lost on the short way past autograd."""
    args = arguments()
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda q: attnpatch.attention(q, *args[1:]).sum())(args[0])
