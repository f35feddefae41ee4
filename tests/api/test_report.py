"""Report: its fields, its files, its table, and what it counts."""

import dataclasses
import json
import logging
import re

import pytest
import torch

import attnpatch
from attnpatch.attention_call import PHASES
from attnpatch.dispatch import Dispatch, Recording, Traffic
from attnpatch.reporting import GraphRecord, Report
from attnpatch.rewriter import SiteRecord


@pytest.fixture
def report(tiny, ids):
    """A patched Tiny after two prefills and one call of one token."""
    attnpatch.patch(tiny)
    for x in (ids, ids, ids[:, :1]):
        tiny(x)
    return attnpatch.report(tiny)


def test_fields(report):
    assert list(report.to_dict()) == ["schema", "summary", "sites", "gaps", "note", "times"]
    assert set(report.summary) == {"fused", "refused", "graphs", "bytes_avoided"}
    site = report.to_dict()["sites"][0]
    names = "module rule status reason mask num_heads num_kv_heads head_dim dtype dispatches"
    names += " kv_bytes_avoided score_bytes_avoided"
    assert list(site) == names.split()
    fields = ["phase", "backend", "calls", "captured", "reason", "mask", "timed_calls", "seconds"]
    assert list(site["dispatches"][0]) == fields


def test_values(report):
    site = dataclasses.asdict(report.sites[0])
    dispatches = site.pop("dispatches")
    assert sum(site.pop(f"{kind}_bytes_avoided") for kind in ("kv", "score")) == report.summary["bytes_avoided"] // 2
    assert site == {
        "module": "layers.0",
        "rule": "eager_attention",
        "status": "fused",
        "reason": "",
        "mask": "causal | none",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": "float32",
    }
    assert [(d["phase"], d["backend"], d["calls"], d["captured"], d["mask"]) for d in dispatches] == [
        ("prefill", "cpu.sdpa", 2, False, "causal"),
        ("decode", "cpu.sdpa", 1, False, "none"),
    ]
    assert {d["phase"] for d in dispatches} <= set(PHASES)


def test_summary_counts(report):
    assert report.summary["fused"] == 2
    assert report.summary["refused"] == 0
    assert report.summary["graphs"] == 2
    assert report.gaps == []
    assert report.note == ""


def test_bytes_avoided(report):
    """Per layer and call: scores and probabilities written and read, K and V repeated, written and read."""

    def call(seqlen):
        scores, repeated = 4 * 2 * 4 * seqlen * seqlen, 2 * 2 * 4 * seqlen * (8 + 8)
        return 4 * (scores + repeated)

    assert report.summary["bytes_avoided"] == 2 * (2 * call(12) + call(1))
    assert [site.kv_bytes_avoided for site in report.sites] == [4 * (2 * 2 * 4 * 16) * (2 * 12 + 1)] * 2
    assert sum(site.score_bytes_avoided for site in report.sites) == 2 * 4 * (4 * 2 * 4) * (2 * 144 + 1)


def test_sdpa_sites_avoid_no_scores():
    """Torch's own fused attention keeps none, so only the repeat of K and V counts."""
    recorded = Recording()
    recorded.dispatches, recorded.traffic = [Dispatch("prefill", "cpu.sdpa", "")] * 2, [Traffic(100, 10)] * 2
    graph = GraphRecord([SiteRecord("a", "sdpa_call", "", ""), SiteRecord("b", "eager_attention", "", "")])
    graph.count(recorded)
    assert graph.bytes_avoided == 10 + 110
    assert [(s.score_bytes_avoided, s.kv_bytes_avoided) for s in Report([graph], gaps={}).sites] == [(0, 10), (100, 10)]


@pytest.mark.parametrize(("dispatched", "bytes_of"), [(1, [15, 0]), (2, [15, 15]), (3, [15, 15])])
def test_more_or_fewer_dispatches_than_sites(dispatched, bytes_of):
    """A branch not taken dispatches less, a loop more: no site gets what is not its own, none is lost."""
    graph, recorded = GraphRecord([SiteRecord(name, "eager_attention", "", "") for name in "ab"]), Recording()
    recorded.dispatches = [Dispatch("prefill", "cpu.sdpa", "")] * dispatched
    recorded.traffic = [Traffic(10, 5)] * dispatched
    graph.count(recorded)
    assert [sum(traffic) for traffic in graph.traffic] == bytes_of
    assert graph.bytes_avoided == sum(bytes_of)


def test_counts_grow_with_every_call(tiny, ids):
    attnpatch.patch(tiny)
    for n in (1, 2, 3):
        tiny(ids)
        assert [d.calls for d in attnpatch.report(tiny).sites[1].dispatches] == [n]


def test_to_json(report, tmp_path):
    report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == report.to_dict()


def test_to_html(report, tmp_path):
    report.to_html(str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    text = re.sub("<[^>]*>", "", page)
    for expected in ("layers.0-1", "eager_attention", "causal", "2 of 2 sites fused"):
        assert expected in text


def test_table_folds_equal_layers(report):
    text = str(report)
    assert "layers.0-1" in text
    assert "4/2 x 8 " in text
    assert "float32" in text
    assert "prefill: cpu.sdpa (2)" in text
    assert "decode: cpu.sdpa (1)" in text
    assert "2 of 2 sites fused, 0 refused; 2 graphs;" in text
    assert max(len(line) for line in text.splitlines()) <= 118


def test_table_keeps_different_layers_apart(tiny, ids):
    tiny.layers[1].returns_probabilities = True
    attnpatch.patch(tiny)(ids)
    text = str(attnpatch.report(tiny))
    assert "layers.0 " in text
    assert "layers.1 " in text
    assert "refused: the attention probabilities" in text
    assert "1 of 2 sites fused, 1 refused" in text


def test_before_the_first_call(tiny):
    attnpatch.patch(tiny)
    report = attnpatch.report(tiny)
    assert (report.sites, report.note) == ([], "patched, but not called yet")
    assert str(report) == "patched, but not called yet"


def test_refused_in_one_graph_is_refused(tiny_with, ids):
    """Eval first, then training with dropout: the site's status is the worse of the two."""
    model = attnpatch.patch(tiny_with(dropout=0.5))
    model(ids)
    assert attnpatch.report(model).sites[0].status == "fused"
    model.train()
    model(ids)
    (first, _) = attnpatch.report(model).sites
    assert first.status == "refused"
    assert sum(d.calls for d in first.dispatches) == 1


def test_masks_of_several_graphs_are_listed(tiny, ids):
    attnpatch.patch(tiny)
    tiny(ids)
    tiny(ids, torch.ones_like(ids))
    assert attnpatch.report(tiny).sites[0].mask == "causal | causal, padding"


def test_two_sites_of_one_module_stay_two():
    sites = [SiteRecord("attn", "eager_attention", "", "", mask=m) for m in ("causal", "none")]
    report = Report([GraphRecord(sites), GraphRecord(sites)], gaps={})
    assert [site.mask for site in report.sites] == ["causal", "none"]
    assert report.summary["fused"] == 2


def test_replayed_runs_are_counted_as_captured():
    """Under a CUDA graph no operator's Python runs: the run repeats what the capture dispatched."""
    graph, recorded = GraphRecord([SiteRecord("a", "eager_attention", "", "")]), Recording()
    recorded.dispatches, recorded.traffic = [Dispatch("decode", "triton.decode", "first choice")], [Traffic(5, 0)]
    graph.count(recorded)
    graph.count(Recording())
    graph.count(Recording())
    (site,) = Report([graph], gaps={}).sites
    assert [(d.backend, d.calls, d.captured) for d in site.dispatches] == [
        ("triton.decode", 1, False),
        ("triton.decode", 2, True),
    ]
    assert graph.bytes_avoided == 15


def test_a_graph_without_sites_is_no_replay():
    graph = GraphRecord([])
    graph.count(Recording())
    assert Report([graph], gaps={}).sites == []


def test_report_is_a_snapshot(tiny, ids):
    attnpatch.patch(tiny)(ids)
    before = attnpatch.report(tiny)
    text = str(before)
    tiny(ids)
    assert str(before) == text


def lines(caplog, level):
    return [r.getMessage() for r in caplog.records if r.name == "attnpatch" and r.levelno == level]


def test_log_has_a_line_per_site_at_its_first_dispatch(tiny, ids, caplog):
    attnpatch.patch(tiny, log_level="info")
    for _ in range(3):
        tiny(ids)
        assert lines(caplog, logging.INFO) == [f"layers.{i}: prefill runs on cpu.sdpa (first choice)" for i in range(2)]
    tiny(ids[:, :1])
    assert lines(caplog, logging.INFO)[2:] == [f"layers.{i}: decode runs on cpu.sdpa (first choice)" for i in range(2)]


def test_log_warns_of_refusals_once(tiny, ids, caplog):
    tiny.layers[0].returns_probabilities = tiny.layers[1].returns_probabilities = True
    attnpatch.patch(tiny)
    for _ in range(3):
        tiny(ids)
    found = lines(caplog, logging.WARNING)
    assert [line.split(": the attention probabilities")[0] for line in found] == [
        f"attention stays unfused: layers.{i}" for i in range(2)
    ]
    assert lines(caplog, logging.INFO) == []


def test_log_says_nothing_per_step_although_the_reason_names_a_length(caplog):
    """Each step's reason is another sentence, and each is another way in ``runs``."""
    graph = GraphRecord([SiteRecord("a", "eager_attention", "", "")])
    with caplog.at_level(logging.INFO, "attnpatch"):
        for length in range(5):
            recorded = Recording()
            recorded.dispatches = [Dispatch("decode", "cpu.tiled", f"cpu.sdpa: {length} keys")]
            recorded.traffic = [Traffic(0, 0)]
            graph.count(recorded)
        graph.count(Recording())
        graph.count(Recording())
    assert lines(caplog, logging.INFO) == [
        "a: decode runs on cpu.tiled (cpu.sdpa: 0 keys)",
        "a: decode runs on cpu.tiled, replayed by a CUDA graph (cpu.sdpa: 4 keys)",
    ]
    assert sum(graph.runs.values()) == 7


def test_log_is_quiet_by_default(tiny, ids, caplog):
    attnpatch.patch(tiny)(ids)
    assert lines(caplog, logging.INFO) == lines(caplog, logging.WARNING) == []
