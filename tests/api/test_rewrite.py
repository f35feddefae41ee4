"""attnpatch.rewrite on graphs from Dynamo, torch.fx and torch.export; the graph that was given stays as it was."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnpatch
from attnpatch.graph import op
from attnpatch.testing.tolerance import assert_same_function, run_float64

B, H, S, D = 2, 4, 7, 8


class Attention(nn.Module):
    """nn.Softmax and nn.Dropout as modules, projections, a causal mask."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.project, self.softmax, self.dropout = nn.Linear(D, 3 * D), nn.Softmax(dim=-1), nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * D**-0.5
        scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
        return self.dropout(self.softmax(scores)) @ v


class Refusing(Attention):
    def forward(self, x):
        p = self.softmax(x @ x.transpose(-1, -2))
        return p @ x, p


def traced_by_dynamo(module, x):
    graphs = []

    def keep(gm, example_inputs):
        graphs.append((gm, example_inputs))
        return gm.forward

    torch.compile(module, backend=keep, fullgraph=True)(x)
    gm, inputs = graphs[0]
    return gm, inputs


def operations(gm):
    return [op(node) for node in gm.graph.nodes]


def check(original, rewritten, report, y64, *args):
    assert report.summary["fused"] == 1
    assert "attention" in operations(rewritten)
    assert "softmax" not in operations(rewritten)
    with torch.no_grad():
        assert_same_function(rewritten(*args), original(*args), y64)


def test_symbolic_trace():
    module, x = Attention().eval(), torch.randn(B, H, S, D)
    gm = torch.fx.symbolic_trace(module)
    rewritten, report = attnpatch.rewrite(gm, [x])
    check(module, rewritten, report, run_float64(module, x), x)
    assert rewritten.project is module.project


def test_dynamo_with_fake_inputs():
    """Dynamo's graph carries its shapes; parameters are inputs."""
    module, x = Attention().eval(), torch.randn(B, H, S, D)
    gm, inputs = traced_by_dynamo(module, x)
    rewritten, report = attnpatch.rewrite(gm, inputs)
    real = [module.project.weight, module.project.bias]
    args = [x if tuple(i.shape) == tuple(x.shape) else next(p for p in real if p.shape == i.shape) for i in inputs]
    assert report.sites[0].mask == "causal"
    with torch.no_grad():
        (y,) = rewritten(*args)
        assert_same_function(y, module(x), run_float64(module, x))


def test_torch_export():
    module, x = Attention().eval(), torch.randn(B, H, S, D)
    gm = torch.export.export(module, (x,), strict=False).module()
    rewritten, report = attnpatch.rewrite(gm, [x])
    check(module, rewritten, report, run_float64(module, x), x)


def test_torch_export_keeps_keyword_arguments_and_output_structure():
    class Model(nn.Module):
        def forward(self, x, *, scale):
            return {"y": ((x @ x.transpose(-1, -2) * scale).softmax(-1)) @ x}

    x = torch.randn(B, H, S, D)
    gm = torch.export.export(Model(), (x,), {"scale": 0.5}, strict=False).module()
    rewritten, report = attnpatch.rewrite(gm, [x])
    assert report.summary["fused"] == 1
    torch.testing.assert_close(rewritten(x, scale=0.5)["y"], Model()(x, scale=0.5)["y"])


def test_aten_graph():
    from torch.fx.experimental.proxy_tensor import make_fx

    def attend(q, k, v):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    args = [torch.randn(B, H, S, D) for _ in range(3)]
    gm = make_fx(attend)(*args)
    rewritten, report = attnpatch.rewrite(gm, args)
    assert len(report.sites) == 1, "never silently"
    torch.testing.assert_close(rewritten(*args), attend(*args))


def test_the_graph_given_is_not_changed():
    module, x = Attention().eval(), torch.randn(B, H, S, D)
    gm = torch.fx.symbolic_trace(module)
    code, meta = gm.code, [dict(n.meta) for n in gm.graph.nodes]
    attnpatch.rewrite(gm, [x])
    gm.recompile()
    assert gm.code == code
    assert [set(n.meta) for n in gm.graph.nodes] == [set(m) for m in meta]
    assert "softmax" in "".join(str(n.target) for n in gm.graph.nodes)


def test_nested_graphs_are_rewritten_and_those_given_are_not():
    module, x = Attention().eval(), torch.randn(B, H, S, D, requires_grad=True)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False) + 1.0

    gm, inputs = traced_by_dynamo(Checkpointed(), x)
    nested = [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule) and m is not gm]
    before = [m.code for m in nested]
    assert len(nested) == 1
    _, report = attnpatch.rewrite(gm, inputs)
    assert report.summary["fused"] == 1
    for m in nested:
        m.recompile()
    assert [m.code for m in nested] == before


def test_nothing_to_rewrite():
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(D, D), nn.ReLU()))
    rewritten, report = attnpatch.rewrite(gm, [torch.randn(2, D)])
    assert report.sites == []
    assert operations(rewritten) == operations(gm)


def test_strict():
    gm = torch.fx.symbolic_trace(Refusing().eval())
    with pytest.raises(attnpatch.AttentionNotPatched, match="output_attentions"):
        attnpatch.rewrite(gm, [torch.randn(B, H, S, D)], strict=True)
    _, report = attnpatch.rewrite(gm, [torch.randn(B, H, S, D)])
    assert report.summary["refused"] == 1


def test_backends():
    gm, x = torch.fx.symbolic_trace(Attention().eval()), torch.randn(B, H, S, D)
    rewritten, _ = attnpatch.rewrite(gm, [x], backends="cpu.tiled")
    (node,) = [n for n in rewritten.graph.nodes if op(n) == "attention"]
    assert node.kwargs["backends"] == "cpu.tiled"
    with pytest.raises(attnpatch.NoBackend):
        attnpatch.rewrite(gm, [x], backends="sdpa.tiled")[0](x)


def test_module_dropout_in_training_is_refused():
    gm = torch.fx.symbolic_trace(Attention(dropout=0.3).train())
    _, report = attnpatch.rewrite(gm, [torch.randn(B, H, S, D)])
    assert "dropout with p=0.3 is active" in report.sites[0].reason


@pytest.mark.parametrize("options", [{"strct": True}, {"prefill": "fp8"}], ids=str)
def test_unknown_option(options):
    gm = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises(TypeError, match="unknown option"):
        attnpatch.rewrite(gm, [torch.randn(2)], **options)


@pytest.mark.parametrize("options", [{"rest": "eager"}, {"cuda_graphs": True}], ids=str)
def test_options_of_a_run(options):
    gm = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises(TypeError, match="says how a graph is run, and rewrite runs none"):
        attnpatch.rewrite(gm, [torch.randn(2)], **options)


def test_rewritten_graph_compiles_and_exports():
    module, x = Attention().eval(), torch.randn(B, H, S, D)
    rewritten, _ = attnpatch.rewrite(torch.fx.symbolic_trace(module), [x])
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(rewritten, backend="aot_eager")(x), module(x))
    exported = torch.export.export(rewritten, (x,), strict=False)
    assert any("attnpatch.attention" in str(n.target) for n in exported.graph.nodes)
