"""A report's JSON: what is written is read, and nothing else is."""

import json

import pytest

from attnpatch import Report
from attnpatch.reporting import PhaseTime


def test_round_trip(site, refused, report_of, tmp_path):
    report = report_of(site(), refused(), gaps=[("graph break", "Tiny: 注意", 3)], note="a note")
    report.to_json(tmp_path / "report.json")
    loaded = Report.from_json(str(tmp_path / "report.json"))
    assert loaded.to_dict() == report.to_dict()
    assert (loaded.sites, loaded.gaps, str(loaded)) == (report.sites, report.gaps, str(report))


def test_a_report_does_not_change_with_its_dict(site, report_of):
    report = report_of(site())
    report.to_dict()["summary"]["fused"] = 7
    assert report.summary["fused"] == 1


@pytest.mark.parametrize("schema", ["attnpatch.report/3", 1, None])
def test_another_schema(schema, site, report_of, tmp_path):
    data = report_of(site()).to_dict() | {"schema": schema}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"report\.json: schema .* is not 'attnpatch.report/2'") as error:
        Report.from_json(path)
    assert repr(schema) in str(error.value)


def test_an_older_report_is_read(site, refused, report_of):
    """The first schema had no times: builds go on comparing with the files that they have."""
    report = report_of(site(), refused())
    data = report.to_dict() | {"schema": "attnpatch.report/1"}
    del data["times"]
    for dispatch in (d for one in data["sites"] for d in one["dispatches"]):
        del dispatch["timed_calls"], dispatch["seconds"]
    old = Report.from_dict(data)
    assert (old.sites, old.times) == (report.sites, [])
    assert not old.diff(report)
    assert old.to_dict()["schema"] == "attnpatch.report/2"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}"])
def test_no_report(text, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"report\.json: "):
        Report.from_json(path)


@pytest.mark.parametrize("name", ["summary", "sites", "gaps", "note", "times"])
def test_a_field_is_missing(name, site, report_of):
    data = report_of(site()).to_dict()
    del data[name]
    with pytest.raises(ValueError, match=f"not a report of schema 'attnpatch.report/2': '{name}'"):
        Report.from_dict(data)


def test_a_site_with_a_field_of_another_version(site, report_of):
    data = report_of(site()).to_dict()
    data["sites"][0]["colour"] = "red"
    with pytest.raises(ValueError, match="colour"):
        Report.from_dict(data)


def test_an_unknown_phase(site, report_of):
    data = report_of(site("a")).to_dict()
    data["sites"][0]["dispatches"][1]["phase"] = "training"
    with pytest.raises(ValueError, match="phase 'training' of site 'a' is none of prefill, decode"):
        Report.from_dict(data)


def test_the_documented_fields_are_those_written(site, report_of):
    """docs/report.md has a row for every field."""
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    report = report_of(site(), gaps=[("graph break", "Tiny", 1)])
    report.times = [PhaseTime("prefill", 1, 0.5)]
    data = report.to_dict()
    (one,), (gap,), (time,) = data["sites"], data["gaps"], data["times"]
    objects = {"": data, "summary.": data["summary"], "gaps[].": gap, "sites[].": one, "times[].": time}
    for prefix, fields in {**objects, "sites[].dispatches[].": one["dispatches"][0]}.items():
        for name in fields:
            assert f"`{prefix}{name}`" in text, name
    assert f"`{data['schema']}`" in text
