"""What ran past the patch is a gap of the report, a warning, and an error under strict; never silence."""

import logging

import pytest
import torch
from torch import nn

import attnpatch
from attnpatch import patching


def gaps(model):
    return [(gap.kind, gap.count) for gap in attnpatch.report(model).gaps]


def test_no_gap_without_cause(tiny, ids):
    attnpatch.patch(tiny)
    for _ in range(3):
        tiny(ids)
    assert attnpatch.report(tiny).gaps == []


def test_graph_break(tiny, ids, caplog):
    """The parts around a break are graphs of their own: their sites are fused, and the break is told."""
    expected = tiny(ids)
    tiny.breaks = True
    attnpatch.patch(tiny)
    with caplog.at_level(logging.WARNING, "attnpatch"):
        torch.testing.assert_close(tiny(ids), expected)
    report = attnpatch.report(tiny)
    assert "graph break" in [gap.kind for gap in report.gaps]
    assert all("Tiny: " in gap.place for gap in report.gaps)
    assert "attention may run unfused: graph break at Tiny" in caplog.text
    assert "gap: graph break at Tiny" in str(report)
    assert report.to_dict()["gaps"][0].keys() == {"kind", "place", "count"}


def test_graph_break_under_strict(tiny, ids):
    tiny.breaks = True
    attnpatch.patch(tiny, strict=True)
    with pytest.raises(attnpatch.AttentionNotPatched, match="graph break at Tiny"):
        tiny(ids)


def test_graph_break_of_another_model_is_not_ours(tiny_with, ids):
    clean, broken = attnpatch.patch(tiny_with()), attnpatch.patch(tiny_with())
    broken.breaks = True
    broken(ids)
    clean(ids)
    assert attnpatch.report(clean).gaps == []


def call_with_many_batches(model, count):
    for batch in range(1, count + 1):
        model(torch.ones(batch, 5, dtype=torch.long))


class Specialised(nn.Module):
    """Compiles anew for every value of ``kind``."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids, kind):
        return self.inner(ids) + len(kind)


@pytest.fixture
def limit_of_3(monkeypatch):
    monkeypatch.setattr(patching, "RECOMPILE_LIMIT", 3)


def test_recompile_limit(tiny, ids, limit_of_3, caplog):
    """From the fourth graph on Dynamo runs the model eagerly, and says nothing."""
    model = attnpatch.patch(Specialised(tiny))
    with caplog.at_level(logging.WARNING, "attnpatch"):
        outputs = [model(ids, "x" * n) for n in range(1, 6)]
    torch.testing.assert_close(outputs[4], tiny(ids) + 5)
    report = attnpatch.report(model)
    assert report.summary["graphs"] == 3
    assert [(gap.kind, gap.count) for gap in report.gaps] == [("recompile limit", 2)]
    assert report.gaps[0].place == "Specialised, which ran eagerly"
    assert caplog.text.count("recompile limit at Specialised") == 1
    assert sum(d.calls for d in report.sites[0].dispatches) == 3


def test_recompile_limit_under_strict(tiny, ids, limit_of_3):
    model = attnpatch.patch(Specialised(tiny), strict=True)
    for n in range(1, 4):
        model(ids, "x" * n)
    with pytest.raises(attnpatch.AttentionNotPatched, match="recompile limit at Specialised"):
        model(ids, "xxxx")


def test_limit_is_64_graphs_of_one_model(tiny, ids):
    """Dynamo's own 8 would be hit by batches 1, 2, 4 and a few lengths."""
    model = attnpatch.patch(Specialised(tiny), strict=True)
    for n in range(1, 13):
        model(ids, "x" * n)
    assert attnpatch.report(model).summary["graphs"] == 12


def test_skipped_frame(tiny, ids):
    """A model that Dynamo is told to leave alone runs eagerly inside the patch."""

    class Skipped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        @torch._dynamo.disable
        def forward(self, ids):
            return self.inner(ids)

    model = attnpatch.patch(Skipped(tiny))
    torch.testing.assert_close(model(ids), tiny(ids))
    kinds = [gap.kind for gap in attnpatch.report(model).gaps]
    assert set(kinds) <= {"skipped frame", "graph break"}
    assert "skipped frame" in kinds


def test_dynamo_switched_off(tiny, ids, monkeypatch):
    """TORCHDYNAMO_DISABLE=1, torch.compiler.set_stance("force_eager")."""
    attnpatch.patch(tiny)
    with torch.compiler.set_stance("force_eager"):
        tiny(ids)
    assert gaps(tiny) == [("skipped frame", 1)]


def test_a_compile_around_a_patched_model_takes_over(tiny, ids):
    """Dynamo inlines the model past the patch, into the graphs of the outer backend: the report claims nothing."""
    attnpatch.patch(tiny)
    compiled = torch.compile(lambda x: tiny(x) * 2.0, backend="eager")
    torch.testing.assert_close(compiled(ids), tiny._call_impl(ids) * 2.0)
    assert attnpatch.report(tiny).note == "patched, but not called yet"
    tiny(ids)
    assert attnpatch.report(tiny).summary["fused"] == 2


def test_patched_layer_inside_a_patched_model(tiny, ids):
    expected = tiny(ids)
    attnpatch.patch(tiny.layers[0])
    attnpatch.patch(tiny)
    torch.testing.assert_close(tiny(ids), expected)
    fused = [attnpatch.report(m).summary["fused"] for m in (tiny, tiny.layers[0])]
    assert sum(fused) >= 2
