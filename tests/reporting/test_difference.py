"""Report.diff: what counts as a change, what does not, and what lost its kernel."""

import json
from dataclasses import replace

import pytest

from attnpatch.reporting import DispatchReport


def test_no_difference(site, report_of):
    found = report_of(site("a"), site("b")).diff(report_of(site("a"), site("b")))
    assert not found
    assert str(found) == "no site changed its status, backends, mask or reason"
    assert found.to_dict() == {"changes": [], "new_gaps": [], "gone_gaps": [], "lost": 0}


def test_sites_are_matched_by_name_and_not_by_position(site, report_of):
    """Another order, and one more in front: nothing changed but that it appeared."""
    old = report_of(site("a"), site("b", mask="none"))
    new = report_of(site("x"), site("b", mask="none"), site("a"))
    (change,) = old.diff(new).changes
    assert (change.module, change.kind, change.lost) == ("x", "appeared", False)


def test_sites_of_one_module_are_matched_by_their_order(site, report_of):
    old = report_of(site("a"), site("b"), site("a", mask="padding"))
    new = report_of(site("b"), site("a"), site("a", mask="none"))
    (change,) = old.diff(new).changes
    assert (change.module, change.order, change.fields) == ("a", 1, {"mask": ("padding", "none")})
    assert "a #2" in str(old.diff(new))


def test_refused_is_lost_and_fused_is_not(site, refused, report_of):
    fused, not_fused = report_of(site("a")), report_of(refused("a"))
    (change,) = fused.diff(not_fused).changes
    assert change.lost
    assert change.fields["status"] == ("fused", "refused")
    assert change.fields["reason"] == ("", refused("a").reason)
    assert "a (lost its kernel)" in str(fused.diff(not_fused))
    assert not not_fused.diff(fused).lost


def test_gone_is_lost_when_it_was_fused(site, refused, report_of):
    found = report_of(site("a"), refused("b")).diff(report_of())
    assert [(c.module, c.kind, c.lost) for c in found.changes] == [("a", "gone", True), ("b", "gone", False)]
    assert "2 sites differ, 1 lost" in str(found)


def test_another_reason_is_a_change(refused, report_of):
    (change,) = report_of(refused("a", "one")).diff(report_of(refused("a", "two"))).changes
    assert (change.fields, change.lost) == ({"reason": ("one", "two")}, False)


def test_backends_are_compared_phase_by_phase(site, report_of):
    prefill, decode = site().dispatches
    old = report_of(site("a"))
    new = report_of(site("a", dispatches=[replace(prefill, calls=9), replace(decode, backend="sdpa.tiled")]))
    (change,) = old.diff(new).changes
    assert change.fields == {"backend in decode": ("triton.decode", "sdpa.tiled")}
    assert not change.lost


@pytest.mark.parametrize(
    "dispatches",
    [
        [],
        [DispatchReport("decode", "triton.decode", 900, True, "another reason", "none")],
        [DispatchReport("append", "triton.append", 1, False, "")],
    ],
    ids=["not run", "decode alone, replayed", "another phase"],
)
def test_calls_replays_and_phases_not_run_are_no_change(dispatches, site, report_of):
    assert not report_of(site("a")).diff(report_of(site("a", dispatches=dispatches)))


def test_the_order_of_backends_in_a_phase_is_no_change(site, report_of):
    both = [DispatchReport("prefill", name, 1, False, "") for name in ("triton.prefill", "cpu.sdpa")]
    assert not report_of(site("a", dispatches=both)).diff(report_of(site("a", dispatches=both[::-1])))
    (change,) = report_of(site("a", dispatches=both)).diff(report_of(site("a", dispatches=both[:1]))).changes
    assert change.fields == {"backend in prefill": ("cpu.sdpa | triton.prefill", "triton.prefill")}


def test_gaps(site, report_of):
    old = report_of(gaps=[("graph break", "a", 1), ("skipped frame", "b", 1)])
    new = report_of(gaps=[("graph break", "a", 5), ("recompile limit", "c [x]", 2)])
    found = old.diff(new)
    assert [gap.place for gap in found.new_gaps] == ["c [x]"]
    assert [gap.place for gap in found.gone_gaps] == ["b"]
    assert found
    assert "new gap: recompile limit at c [x] (x2)" in str(found)


def test_to_dict_is_json(site, refused, report_of):
    found = report_of(site("a")).diff(report_of(refused("a"), gaps=[("graph break", "a", 1)]))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["lost"] == 1
    assert data["changes"][0]["fields"]["status"] == {"old": "fused", "new": "refused"}
    assert data["new_gaps"] == [{"kind": "graph break", "place": "a", "count": 1}]


def test_brackets_are_no_markup(refused, report_of):
    found = report_of(refused("a", "one [b, 1, q]")).diff(report_of(refused("a", "two [red]")))
    assert "one [b, 1, q]" in str(found)
    assert "two [red]" in str(found)
