"""Linear layers of one row: which become one call, that it is the same, and which stay."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnpatch.rewrites.linear import fuse_linears
from attnpatch.testing.tolerance import assert_same_function, run_float64

WIDTH, INNER = 24, 40


@torch.library.custom_op("attnpatch_tests::linear", mutates_args=())
def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Another function of the same name."""
    return 3 * (x @ weight.T)


_linear.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("attnpatch_tests::silu", mutates_args=())
def _silu(x: torch.Tensor) -> torch.Tensor:
    """Likewise."""
    return 2 * x


_silu.register_fake(torch.empty_like)


class Block(nn.Module):
    """A gated unit, and three layers side by side."""

    def __init__(self, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias)
        self.number = nn.Parameter(torch.ones(1))
        self.six = nn.Parameter(torch.randn(6, WIDTH))
        self.both = nn.Linear(WIDTH, 2 * INNER, bias)
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias) for n in (32, 8, 8))
        with torch.no_grad():
            self.norm.weight.normal_()


def gated(m, x):
    return x + m.down(F.silu(m.gate(m.norm(x))) * m.up(m.norm(x)))


def normed_once(m, x):
    y = m.norm(x)
    return m.down(m.up(y) * F.gelu(m.gate(y), approximate="tanh")) + x


def gelu(m, x):
    y = m.norm(x)
    return m.up(y) * F.gelu(m.gate(y))


def side_by_side(m, x):
    y = m.norm(x)
    return torch.cat((m.q(y), m.k(y), m.v(y)), dim=-1)


def five(m, x):
    return torch.cat([layer(x) for layer in (m.q, m.k, m.v, m.gate, m.up)], dim=-1)


def one(m, x):
    return m.q(x)


def norm_is_read_elsewhere(m, x):
    y = m.norm(x)
    return y + m.down(m.up(y))


def chained(m, x):
    """Each reads what the one before made, so inputs are replaced on the way."""
    for _ in range(3):
        x = x + m.down(m.up(x))
    return x


def chunks(m, x):
    """As Phi-3 does it, whose gate and up are one layer."""
    gate, up = m.both(x).chunk(2, dim=-1)
    return up * F.silu(gate)


def splits(m, x):
    gate, up = torch.split(m.both(x), INNER, dim=2)
    return F.gelu(gate) * up


def sections(m, x):
    up, gate = m.both(x).split([INNER, INNER], dim=-1)
    return F.gelu(gate) * up


def keys_and_values(m, x):
    """Halves that are no gated unit stay one layer, whose output is cut."""
    y = m.norm(x)
    k, v = m.both(y).chunk(2, dim=-1)
    return torch.cat((m.q(y), k, v), dim=-1)


def relu_gated(m, x):
    y = m.q(x)
    gate, up = m.both(x).chunk(2, dim=-1)
    return torch.relu(gate) * up + y.sum()


def half_is_written(m, x):
    gate, up = m.both(x).chunk(2, dim=-1)
    gate.mul_(2)
    return F.silu(gate) * up


def half(m, x):
    return m.both(x).chunk(2, dim=-1)[1]


def uneven(m, x):
    first, second = m.both(x).split([INNER - 8, INNER + 8], dim=-1)
    return first.sum() * second


def thirds_of_six(m, x):
    first, second, third = F.linear(x, m.six, None).chunk(3, dim=-1)
    return first * second + third


def thirds(m, x):
    first, second, third = m.both(x).chunk(3, dim=-1)
    return first.sum() * second.sum() * third


def evaluated(m, x):
    """Dropouts that drop nothing, as StarCoder2's and GPT-NeoX's."""
    inner = F.dropout(F.silu(m.gate(x)) * m.up(x), 0.1, training=False)
    return x + torch.dropout(m.down(inner), 0.5, False)


def trained(m, x):
    """Of none, but it might be of some."""
    return x + F.dropout(m.down(m.up(x)), 0.0)


def two_units_of_one_input(m, x):
    return F.silu(m.gate(x)) * m.up(x) + F.gelu(m.gate(x)) * m.up(x)


def square(m, x):
    """The gate is its own partner."""
    y = m.gate(x)
    return F.silu(y) * y


def gate_is_read_elsewhere(m, x):
    y = m.gate(x)
    return F.silu(y) * m.up(x) + y


def other_activation(m, x):
    return F.relu(m.gate(x)) * m.up(x)


def doubled(m, x):
    y = m.down(m.up(x))
    return y + y


def scaled_residual(m, x):
    return torch.add(x, m.down(m.up(x)), alpha=2)


def number(m, x):
    return m.down(m.up(x)) + 1.0


def broadcast_residual(m, x):
    return m.down(m.up(x)) + x[..., :1]


def grown_residual(m, x):
    return m.down(m.up(x)) + x.expand(3, 1, WIDTH)


CALLS = {
    gated: 3,
    normed_once: 2,
    gelu: 1,
    side_by_side: 1,
    five: 2,
    one: 1,
    norm_is_read_elsewhere: 2,
    chained: 6,
    chunks: 1,
    splits: 1,
    sections: 1,
    keys_and_values: 1,
    relu_gated: 1,
    half_is_written: 1,
    half: 1,
    uneven: 1,
    thirds: 1,
    thirds_of_six: 1,
    evaluated: 2,
    trained: 2,
    two_units_of_one_input: 2,
    square: 1,
    gate_is_read_elsewhere: 1,
    other_activation: 1,
    doubled: 2,
    scaled_residual: 2,
    number: 2,
    broadcast_residual: 2,
    grown_residual: 2,
}
"""Functions, and what becomes of them."""


def compiled(function, *args):
    """What the rewritten graph gives, the number of its calls, and the names of what it still does."""
    found = []

    def backend(gm, _):
        found.append(fuse_linears(gm.graph))
        calls = gm.graph.find_nodes(op="call_function", target=torch.ops.attnpatch.linear.default)
        assert len(calls) == found[0]
        found.append(calls)
        found.append([getattr(n.target, "__name__", n.target) for n in gm.graph.nodes if n.op.startswith("call")])
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(function, backend=backend, fullgraph=True)(*args), *found


def row(dtype=torch.bfloat16):
    return torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def computed(function):
    """Its input is computed in the graph."""
    return lambda m, x: function(m, x * 1.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_calls(function, bias, dtype):
    block = Block(bias).to(dtype)
    result, count, _, left = compiled(computed(function), block, row(dtype))
    assert count == CALLS[function]
    assert "linear" not in left
    with torch.no_grad():
        original = computed(function)(block, row(dtype))
        exact = run_float64(lambda x: computed(function)(Block(bias).to(dtype).double(), x), row(dtype))
    assert (result.shape, result.dtype) == (original.shape, dtype)
    assert_same_function(result, original, exact)


def arguments_of(call):
    """Norm, residual and activation of a call."""
    _, weights, _, norm, eps, residual, activation = call.args
    return len(weights), norm is not None and eps, residual is not None, activation


def test_what_goes_into_the_calls():
    block = Block().bfloat16()
    found = {f: [arguments_of(call) for call in compiled(computed(f), block, row())[2]] for f in CALLS}
    assert found[normed_once] == [(2, 1e-5, False, "gelu_tanh"), (1, False, True, None)]
    assert found[side_by_side] == [(3, 1e-5, False, None)]
    assert sorted(found[five], key=str) == [(2, False, False, None), (3, False, False, None)]
    assert found[norm_is_read_elsewhere] == [(1, False, False, None), (1, False, True, None)]
    for function in (doubled, scaled_residual, number, broadcast_residual, grown_residual):
        assert found[function] == [(1, False, False, None)] * 2, function.__name__
    for function in (square, gate_is_read_elsewhere, other_activation):
        assert all(activation is None for *_, activation in found[function]), function.__name__
    for function, name in ((chunks, "silu"), (splits, "gelu"), (sections, "gelu")):
        assert found[function] == [(2, False, False, name)], function.__name__
    assert found[evaluated] == [(2, False, False, "silu"), (1, False, True, None)]
    assert found[trained] == [(1, False, False, None)] * 2
    assert [found[f] for f in (half, uneven, thirds, thirds_of_six)] == [[(1, False, False, None)]] * 4
    assert {activation for *_, activation in found[two_units_of_one_input]} == {"silu", "gelu"}
    assert sorted(found[gated], key=str) == [(1, 1e-05, False, None), (1, 1e-05, False, None), (1, False, True, None)]


def two_rows(m, x):
    return m.q(torch.cat((x, x)) * 2)


def given_input(m, x):
    """A kernel that wrote the weight may run right before."""
    return m.q(x)


def dropped_out(m, x):
    """In evaluation that is its input."""
    return m.q(F.dropout(x, 0.1, training=False))


def narrow_bias(m, x):
    return F.linear(x * 2, m.q.weight, m.norm.weight[:1])


def number_as_bias(m, x):
    return F.linear(x * 2, m.q.weight, m.number)


def others_linear(m, x):
    return torch.ops.attnpatch_tests.linear(x * 2, m.q.weight)


def others_silu(m, x):
    return torch.ops.attnpatch_tests.silu(m.gate(x)) * m.up(x)


def view_of_given(m, x):
    return m.q(x.view(1, WIDTH))


def computed_weight(m, x):
    return F.linear(x * 2, m.q.weight * 2)


def strided_weight(m, x):
    return F.linear(x * 2, m.down.weight.t()[:, :WIDTH])


def written_weight(m, x):
    y = m.q(x * 2)
    m.q.weight.zero_()
    return y


def written_input(m, x):
    y = x * 2
    z = m.q(y)
    y.zero_()
    return z + y.sum()


@pytest.mark.parametrize(
    "function",
    [
        *(two_rows, given_input, view_of_given, dropped_out, computed_weight, strided_weight, written_weight),
        *(written_input, narrow_bias, number_as_bias, others_linear),
    ],
)
def test_what_stays(function):
    with torch.no_grad():
        expected = function(Block().bfloat16(), row())
    result, count, *_ = compiled(function, Block().bfloat16(), row())
    assert count == 0
    assert torch.equal(result, expected)


def test_a_norm_of_a_given_input_stays():
    """The layer reads what the norm's kernel made, and so not the norm's input itself."""

    def of_given(m, x):
        return m.q(m.norm(x))

    def of_dropped_out(m, x):
        return m.q(m.norm(F.dropout(x, 0.1, training=False)))

    for function in (of_given, of_dropped_out):
        _, count, calls, _ = compiled(function, Block().bfloat16(), row())
        assert (count, arguments_of(calls[0])) == (1, (1, False, False, None)), function.__name__


def test_activations_of_other_libraries_stay():
    expected = others_silu(Block().bfloat16(), row() * 2)
    result, count, calls, _ = compiled(lambda m, x: others_silu(m, x * 2), Block().bfloat16(), row())
    assert (count, arguments_of(calls[0])) == (1, (2, False, False, None))
    torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)


def test_float32_and_float64_stay():
    for dtype in (torch.float32, torch.float64):
        assert compiled(computed(one), Block().to(dtype), row(dtype))[1] == 0


def test_autocast_stays():
    def cast(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m.q(x * 2)

    assert compiled(cast, Block(), row(torch.float32))[1] == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(computed(one), Block(), row(torch.float32))[1] == 0


def test_rows_of_unknown_number_stay():
    """From the second batch on it is a symbol, which may be one."""
    counts = []

    def fusing(gm, _):
        counts.append(fuse_linears(gm.graph))
        gm.recompile()
        return gm.forward

    block = Block().bfloat16()
    run = torch.compile(computed(one), backend=fusing, fullgraph=True)
    with torch.no_grad():
        for batch in (1, 2, 3):
            x = row().expand(batch, 1, WIDTH).contiguous()
            torch.testing.assert_close(run(block, x), computed(one)(block, x))
    assert counts[0] == 1
    assert set(counts[1:]) == {0}
