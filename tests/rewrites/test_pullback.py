"""The pull-back against brute force: its expression, evaluated at every index, is the tensor the graph computes."""

import itertools

import pytest
import torch
from torch.fx import Interpreter

from attnpatch.affine import Affine
from attnpatch.graph import Writes
from attnpatch.rewrites.expressions import (
    And,
    AtLeastZero,
    Const,
    Equal,
    FloorDiv,
    Load,
    Magnitude,
    Not,
    Or,
    Sum,
    Where,
    loads,
)
from attnpatch.rewrites.pullback import Pullback

S = 6


def captured(function, *args, dynamic=False):
    """The Dynamo graph of ``function`` and the value of each of its nodes."""
    graphs, values = [], {}

    class Recorder(Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            values[n] = result.clone() if isinstance(result, torch.Tensor) else result
            return result

    def keep(gm, example_inputs):
        graphs.append(gm.graph)
        return lambda *inputs: Recorder(gm).run(*inputs)

    torch._dynamo.reset()
    torch.compile(function, backend=keep, dynamic=dynamic, fullgraph=True)(*args)
    return graphs[0], values


def evaluate(x, at, values):
    """The number that expression ``x`` stands for at index values ``at``."""
    if isinstance(x, Const):
        return x.value
    if isinstance(x, Affine):
        return x.constant + sum(
            c * (at[a] if isinstance(a, str) else evaluate(a, at, values)) for a, c in x.coefficients.items()
        )
    if isinstance(x, torch.fx.Node):
        return int(values[x])
    if isinstance(x, FloorDiv):
        return evaluate(x.numerator, at, values) // x.divisor
    if isinstance(x, Equal):
        return evaluate(x.left, at, values) == evaluate(x.right, at, values)
    if isinstance(x, Load):
        return values[x.node][tuple(evaluate(i, at, values) for i in x.indices)].item()
    if isinstance(x, AtLeastZero):
        return evaluate(x.expression, at, values) >= 0
    if isinstance(x, Magnitude):
        return abs(evaluate(x.expression, at, values))
    if isinstance(x, Not):
        return not evaluate(x.operand, at, values)
    if isinstance(x, And):
        return bool(evaluate(x.left, at, values)) and bool(evaluate(x.right, at, values))
    if isinstance(x, Or):
        return bool(evaluate(x.left, at, values)) or bool(evaluate(x.right, at, values))
    if isinstance(x, Where):
        return evaluate(x.then if evaluate(x.condition, at, values) else x.otherwise, at, values)
    assert isinstance(x, Sum), x
    return evaluate(x.left, at, values) + evaluate(x.right, at, values)


def loaded(x):
    """The opaque nodes that an expression reads."""
    return {load.node.name for load in loads(x)}


def check(function, *args, opaque=(), **kwargs):
    """Every tensor the graph makes equals its expression everywhere; the output reads only ``opaque`` nodes."""
    graph, values = captured(function, *args, **kwargs)
    pull = Pullback(Writes(graph), list(graph.nodes)[-1])
    output = next(n for n in graph.nodes if n.op == "output").args[0][0]
    for node, tensor in values.items():
        if not isinstance(tensor, torch.Tensor) or node.op == "output":
            continue
        names = [f"i{d}" for d in range(tensor.dim())]
        expression = pull.element(node, tuple(Affine({name: 1}) for name in names))
        for index in itertools.product(*(range(n) for n in tensor.shape)):
            got, want = evaluate(expression, dict(zip(names, index, strict=True)), values), tensor[index].item()
            got = bool(got) if tensor.dtype == torch.bool else got
            assert got == want or (got != got and want != want), (node, index, expression)
        if node is output and opaque is not None:
            assert loaded(expression) == set(opaque), expression


def rows():
    return torch.arange(S)[:, None]


def keys():
    return torch.arange(S)[None, :]


UNDERSTOOD = {
    "arange": lambda: torch.arange(S),
    "arange_start": lambda: torch.arange(3, S + 3),
    "arange_step": lambda: torch.arange(0, 2 * S, 2),
    "arange_down": lambda: torch.arange(S, 0, -1),
    "arange_keywords": lambda: torch.arange(start=2, end=9),
    "arange_end_keyword": lambda: torch.arange(end=5),
    "affine": lambda: 3 * rows() - keys() * 2 + 5,
    "int_minus": lambda: 7 - keys(),
    "add_alpha": lambda: torch.add(rows(), keys(), alpha=1),
    "le": lambda: keys() <= rows(),
    "lt": lambda: keys() < rows() + 2,
    "gt": lambda: keys() > rows() - 3,
    "ge": lambda: rows() >= keys(),
    "constant_on_the_left": lambda: 3 > keys(),  # noqa: SIM300
    "and": lambda: (keys() <= rows()) & (keys() > 1),
    "or": lambda: (keys() <= rows()) | (keys() > 3),
    "not": lambda: ~(keys() <= rows()),
    "logical": lambda: torch.logical_or(torch.logical_not(keys() <= rows()), torch.logical_and(keys() > 1, rows() > 2)),
    "mul_of_bools": lambda: (keys() <= rows()) * (keys() > 1),
    "abs": lambda: (rows() - keys()).abs() <= 2,
    "abs_gt": lambda: torch.abs(rows() - keys() + 1) > 2,
    "abs_ge": lambda: (rows() - keys()).abs() >= 2,
    "abs_on_the_right": lambda: 2 > (rows() - keys()).abs(),  # noqa: SIM300
    "tril": lambda: torch.ones(S, S).tril(1),
    "tril_int": lambda: torch.ones(S, S, dtype=torch.int64).tril(-1),
    "triu_bool": lambda: torch.ones(2, S, S, dtype=torch.bool).triu(2),
    "tril_of_triu": lambda: torch.full((S, S), 7.0).triu(-1).tril(1),
    "tril_of_aranges": lambda: (rows() + keys()).tril(),
    "zeros_ones_full": lambda: torch.zeros(2, 3) + torch.ones(2, 3) + torch.full((2, 3), 4.0),
    "like": lambda: torch.zeros_like(rows()) + torch.ones_like(rows()) + torch.full_like(rows(), 3),
    "new": lambda: rows().new_zeros(S) + rows().new_ones(S) + rows().new_full((S,), 2),
    "where": lambda: torch.where(keys() <= rows(), 0.0, -1e9),
    "where_nested": lambda: torch.where(keys() <= rows(), torch.where(keys() > 2, 1.0, 2.0), 3.0),
    "where_tensors": lambda: torch.where(keys() <= rows(), torch.zeros(S, S), torch.full((S, S), -torch.inf)),
    "masked_fill": lambda: torch.zeros(S, S).masked_fill(keys() > rows(), -1e9),
    "masked_fill_bool": lambda: torch.ones(S, S, dtype=torch.bool).masked_fill(keys() > rows(), False),
    "one_minus": lambda: (1.0 - torch.ones(S, S).tril()) * -1e4,
    "minus_one": lambda: (torch.ones(S, S).tril() - 1) * 1e4,
    "times_inf": lambda: (1.0 - torch.ones(S, S).tril()) * -torch.inf,
    "bool_times": lambda: (keys() > rows()) * -1e4,
    "floor_divide": lambda: rows() // 2 == keys() // 2,
    "eq_zero": lambda: torch.ones(S, S).tril() == 0,
    "eq_one": lambda: torch.ones(S, S).tril() == 1,
    "eq_two": lambda: torch.ones(S, S).tril() == 2,
    "ne_one": lambda: torch.ones(S, S).tril() != 1,
    "ne_zero": lambda: torch.ones(S, S).tril() != 0,
    "gt_half": lambda: torch.ones(S, S).tril() > 0.5,
    "half_lt": lambda: 0.5 < torch.ones(S, S).tril(),  # noqa: SIM300
    "bool_of_where": lambda: torch.where(keys() > 2, torch.where(rows() > 2, 0.0, 5.0), 1.0).bool(),
    "not_of_float": lambda: ~torch.ones(S, S).triu(1).bool(),
    "casts": lambda: (keys() <= rows()).float().long().to(torch.bool),
    "int_casts": lambda: rows().to(torch.int32).long() <= keys().float(),
    "unsqueeze": lambda: torch.arange(S).unsqueeze(0).unsqueeze(-1) + torch.arange(S).unsqueeze(-2),
    "transpose": lambda: (rows() + keys() * 10).transpose(0, 1),
    "expand": lambda: keys().expand(S, S) <= rows().expand(-1, S),
    "expand_as": lambda: keys().expand_as(torch.ones(2, S, S)),
    "view": lambda: torch.arange(S).view(1, S, 1) - torch.arange(S).reshape(1, 1, S),
    "squeeze": lambda: rows().squeeze(-1) + keys().squeeze(0),
    "slices": lambda: (rows() + 10 * keys())[2:, 1:5],
    "negative_slices": lambda: (rows() + 10 * keys())[-4:, :-1],
    "strided_slices": lambda: (rows() + 10 * keys())[1::2, ::3],
    "far_negative_slice": lambda: (rows() + 10 * keys())[-40:, :],
    "integer_index": lambda: (rows() + 10 * keys())[2],
    "negative_integer": lambda: (rows() + 10 * keys())[:, -2],
    "ellipsis": lambda: (rows() + 10 * keys())[..., None, 2:],
    "none": lambda: torch.arange(S)[None, None, :, None],
    "scalar_tensor": lambda: torch.arange(S) + torch.tensor(3),
    "bool_tensor": lambda: torch.tensor(True) & (keys() <= rows()),
    "clone": lambda: (keys() <= rows()).contiguous().clone().detach(),
}


@pytest.mark.parametrize("function", UNDERSTOOD.values(), ids=UNDERSTOOD)
def test_understood(function):
    check(function)


OPAQUE = {
    "remainder": lambda: (rows() - keys()) % 2 == 0,
    "float_arange": lambda: torch.arange(0, 3, 0.5) <= 1,
    "equal_indices": lambda: rows() == keys(),
    "product": lambda: rows() * keys() > 4,
    "cumsum": lambda: torch.ones(S).cumsum(0) > 3,
    "roll": lambda: torch.arange(S).roll(2),
    "flip": lambda: torch.arange(S).flip(0),
    "cat": lambda: torch.cat([torch.arange(3), torch.arange(3)]),
    "to_int8": lambda: (torch.arange(S) + 125).to(torch.int8),
    "to_uint8": lambda: (torch.arange(S) - 3).to(torch.uint8),
    "to_bfloat16": lambda: (torch.arange(S) + 256).to(torch.bfloat16) <= 257,
    "uint8_minus": lambda: torch.ones(S, dtype=torch.uint8) - torch.full((S,), 2, dtype=torch.uint8),
    "half_to_int": lambda: torch.full((S, S), 0.5).tril().long(),
    "index_list": lambda: torch.arange(S)[[0, 2, 1]],
    "merged_dimensions": lambda: (rows() + keys()).reshape(-1) > 4,
    "xor": lambda: (keys() <= rows()) ^ (keys() > 2),
    "max": lambda: torch.maximum(rows(), keys()) > 3,
    "negative_gather": lambda: torch.arange(10, 16)[torch.arange(S) - 2],
    "in_place": lambda: torch.ones(S, S).tril_(),
    "setitem": lambda: _with_item(torch.ones(S, S).tril()),
    "in_place_int": lambda: _added(torch.arange(S)),
    "alpha": lambda: torch.add(rows(), keys(), alpha=3),
    "tensor_of_list": lambda: torch.tensor([3, 1, 2]) > 1,
    "prod": lambda: (keys() <= rows()).all(0),
}


def _with_item(x):
    x[0, 3] = 1.0
    return x


def _added(x):
    x += 3
    return x


@pytest.mark.parametrize("function", OPAQUE.values(), ids=OPAQUE)
def test_opaque_but_right(function):
    check(function, opaque=None)


def padded(shape=(2, S)):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4


INPUTS = {
    "getitem": (lambda m: m[:, None, None, :], padded()),
    "slice": (lambda m: m[:, 2:], padded()),
    "from_integers": (lambda m: m.bool()[:, None], padded().long() * 3),
    "from_floats": (lambda m: m.to(torch.bool)[:, None], padded().float() * 0.5),
    "not_zero": (lambda m: m != 0, padded().long()),
    "is_zero": (lambda m: m == 0, padded().float()),
    "with_causal": (lambda m: m[:, None, :] & (keys() <= rows()), padded()),
    "gather": (lambda m: m[torch.arange(2)[:, None, None], torch.arange(S)[None, None, :]], padded()),
    "gather_offset": (lambda m: m[torch.arange(2)[:, None], (torch.arange(S - 2) + 2)[None, :]], padded()),
    "where": (lambda m: torch.where(m[:, None, :], 0.0, -1e9), padded()),
    "one_minus": (lambda m: (1.0 - m[:, None, :].float()) * -1e9, padded()),
}


@pytest.mark.parametrize(("function", "mask"), INPUTS.values(), ids=INPUTS)
def test_input_is_read_where_it_should(function, mask):
    check(function, mask, opaque={"l_m_"})


INPUT_CASTS = {
    "half_to_long": (lambda m: m.long().bool(), torch.tensor([0.5, 1.0, 0.0, 2.5])),
    "double_to_float16": (lambda m: m.half().bool(), torch.tensor([1e-30, 1.0, 0.0])),
    "int_to_uint8": (lambda m: m.to(torch.uint8).bool(), torch.tensor([256, 1, 0])),
    "int_to_int32": (lambda m: m.int().bool(), torch.tensor([2**32, 1, 0])),
}


@pytest.mark.parametrize(("function", "mask"), INPUT_CASTS.values(), ids=INPUT_CASTS)
def test_lossy_casts_are_not_looked_through(function, mask):
    check(function, mask, opaque=None)


@pytest.mark.parametrize("offset", [0, 3, -2])
@pytest.mark.parametrize("kind", ["symint", "tensor"])
def test_run_time_offset(kind, offset):
    def function(offset, x):
        return torch.arange(x.shape[0])[None, :] <= torch.arange(x.shape[1])[:, None] + offset - 1

    given = torch.tensor(offset) if kind == "tensor" else offset
    check(function, given, torch.ones(S, 4), dynamic=True)


def test_symbolic_sizes():
    def function(x):
        n, m = x.shape
        return torch.ones(n, m, dtype=torch.bool).tril(m - n) & (torch.arange(m) > n - 6)

    check(function, torch.ones(4, 7), dynamic=True)


def test_reader_of_a_run_time_scalar_is_remembered():
    def function(length):
        return torch.arange(S) <= length

    graph, _ = captured(function, torch.tensor(3))
    pull = Pullback(Writes(graph), list(graph.nodes)[-1])
    output = next(n for n in graph.nodes if n.op == "output").args[0][0]
    expression = pull.element(output, (Affine({"k": 1}),))
    assert {(scalar.name, reader.name) for scalar, reader in pull.readers.items()} == {("l_length_", output.name)}
    assert isinstance(expression, AtLeastZero)
