"""Linear layers of one row in the interpreter and in plain torch, against float64."""

import re

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from attnpatch import linear
from attnpatch.kernels.linear import launch, reference
from attnpatch.testing.tolerance import assert_same_function, run_float64


def by_triton(*args):
    return launch.linear(linear.Layers(*args))


def by_torch(*args):
    return reference.linear(linear.Layers(*args))


RUNS = {"triton": by_triton, "torch": by_torch}


def written(x, weights, biases, norm, eps, residual, activation):
    """As models write it, rounding after each operator."""
    if norm is not None:
        wide = x.float()
        x = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    found = [F.linear(x, *pair) for pair in zip(weights, biases, strict=True)]
    if activation:
        found = [reference.ACTIVATIONS[activation](found[0]) * found[1]]
    return [y if residual is None else residual + y for y in found]


def arguments(dtype, rows, columns, generator, biased=(), normed=False, residual=False, activation=None):
    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    x = random(1, 1, columns)
    weights = [(random(n, columns) / columns**0.5).to(dtype) for n in rows]
    biases = [random(n) if i in biased else None for i, n in enumerate(rows)]
    added = random(1, 1, rows[0]) if residual else None
    return x, weights, biases, random(columns) if normed else None, 1e-5, added, activation


@pytest.fixture(autouse=True)
def poisoned():
    """``new_empty`` gives NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(run, args):
    found = run(*args)
    assert [y.shape for y in found] == [(1, 1, w.shape[0]) for w in args[1]][: len(found)]
    assert len(found) == (1 if args[-1] else len(args[1]))
    for y, original, exact in zip(found, written(*args), run_float64(written, *args), strict=True):
        assert_same_function(y, original, exact)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_shapes(run, dtype, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    columns = data.draw(st.sampled_from([1, 24, 64, 1000, 1024, 1030, 2048]))
    kind = data.draw(st.sampled_from(["side by side", "residual", *linear.ACTIVATIONS]))
    rows = data.draw(st.lists(st.sampled_from([3, 5, 8]), min_size=1, max_size=1 if kind == "residual" else 3))
    activation = kind if kind in linear.ACTIVATIONS else None
    rows = rows[:1] * 2 if activation else rows
    residual = kind == "residual" or (activation is not None and data.draw(st.booleans()))
    biased = data.draw(st.sets(st.integers(0, 2)))
    check(run, arguments(dtype, rows, columns, generator, biased, data.draw(st.booleans()), residual, activation))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("rows", [[1], [1, 2, 1]], ids=str)
def test_weights_of_one_row(run, rows):
    """Of positive numbers: a sum in which they cancel has no other to be small beside."""
    x, weights, biases, *others = arguments(torch.float32, rows, 24, torch.Generator().manual_seed(0))
    check(run, (x.abs(), [w.abs() for w in weights], biases, *others))


def test_many_rows_go_two_to_a_program(monkeypatch):
    monkeypatch.setattr(launch, "MANY_ROWS", 4)
    check(by_triton, arguments(torch.float32, [3, 1, 5], 40, torch.Generator().manual_seed(0), biased=(0, 2)))
    check(by_triton, arguments(torch.float32, [3, 3], 40, torch.Generator().manual_seed(0), activation="gelu"))


def test_the_operator():
    args = arguments(torch.bfloat16, [6, 2], 32, torch.Generator().manual_seed(1), biased=(1,), normed=True)
    check(linear.linear, args)
    torch.library.opcheck(torch.ops.attnpatch.linear.default, args)
    assert [y.shape for y in linear.linear(torch.ones(4), [torch.ones(3, 4)], [None])] == [(3,)]


ROW, WEIGHT = torch.zeros(1, 4), torch.zeros(3, 4)
BAD = {
    "x of linear must be one row in float16, bfloat16 or float32; got (2, 4) in torch.float32": (
        [torch.zeros(2, 4), [WEIGHT], [None]]
    ),
    "x of linear must be one row in float16, bfloat16 or float32; got (1, 4) in torch.float64": (
        [ROW.double(), [WEIGHT], [None]]
    ),
    "linear takes 1 to 3 weights and a bias or None for each; got 4 and 4": [ROW, [WEIGHT] * 4, [None] * 4],
    "linear takes 1 to 3 weights and a bias or None for each; got 1 and 2": [ROW, [WEIGHT], [None] * 2],
    "weights of linear have rows and columns; got [(4,)]": [ROW, [WEIGHT[0]], [None]],
    "weight 1 of linear must be (3, 4), contiguous; got (3, 5)": [ROW, [WEIGHT, torch.zeros(3, 5)], [None] * 2],
    "weight 0 of linear must be (3, 4), contiguous; got (3, 4) with strides (1, 3)": (
        [ROW, [torch.zeros(4, 3).T], [None]]
    ),
    "bias 0 of linear must be (3,), contiguous; got (4,)": [ROW, [WEIGHT], [torch.zeros(4)]],
    "norm of linear must be (4,), contiguous; got (3,)": [ROW, [WEIGHT], [None], torch.zeros(3)],
    "residual of linear must be (1, 3), contiguous; got (1, 4)": [ROW, [WEIGHT], [None], None, 0.0, ROW],
    "residual of linear goes with one weight; got 2": [ROW, [WEIGHT] * 2, [None] * 2, None, 0.0, ROW[:, :3]],
    "activation='relu' of linear is not one of silu, gelu, gelu_tanh": (
        [ROW, [WEIGHT] * 2, [None] * 2, None, 0.0, None, "relu"]
    ),
    "an activation of linear takes two weights of one shape; got [(3, 4)]": (
        [ROW, [WEIGHT], [None], None, 0.0, None, "silu"]
    ),
    "weight 0 of linear is torch.float16 on cpu, x torch.float32 on cpu; it needs them alike": (
        [ROW, [WEIGHT.half()], [None]]
    ),
}


@pytest.mark.parametrize(("message", "args"), BAD.items())
def test_bad_arguments(message, args):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        linear.linear(*args)
