"""Every fifth family of docs/coverage.md is measured again, eager and SDPA in turn, and the document is held to what it
promises.
"""

from pathlib import Path

import pytest
import transformers

from attnpatch.rewrites import table
from tests.models import coverage, document
from tests.models.families import FAMILIES
from tests.models.measure import Row, measure

TEXT = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text()
DOCUMENTED = next(iter(document.read(TEXT).values()))
ROWS = [[key for key in DOCUMENTED if key[0] == family] for family in list(FAMILIES)[1::5]]
MEASURED = [rows[i % len(rows)] for i, rows in enumerate(ROWS)]


# Their scores are written into a band piece by piece: nothing says yet that this attention stays as it was.
@pytest.mark.parametrize(("family", "implementation"), MEASURED, ids=map("-".join, MEASURED))
def test_family_is_as_documented(family, implementation):
    row = measure(family, implementation, plain=False)
    known = DOCUMENTED[family, implementation]
    line = document.with_plain_graphs(document.cells(row), known)
    assert line[: document.VARIES] == known[: document.VARIES]
    assert row.error <= 1
    assert row.silent == 0
    assert not (row.is_lifted and row.squares)


def test_every_family_is_documented():
    assert list(dict.fromkeys(family for family, _ in DOCUMENTED)) == list(FAMILIES)
    assert next(iter(document.read(TEXT))) == transformers.__version__


@pytest.mark.parametrize("version", document.read(TEXT))
def test_no_documented_row_is_wrong(version):
    """On any version: nothing silent, nothing failed, no more graphs than a backend that changes nothing."""
    for line in document.read(TEXT)[version].values():
        assert not line[-2].startswith("failed"), line
        graphs, plain = document.graphs(line)
        assert "silent" not in line[2], line
        assert graphs <= plain, line
        assert float(line[document.VARIES]) <= 1, line


def test_attention_without_a_rule_is_silent(monkeypatch):
    """The count does not come from the rules."""
    monkeypatch.setattr(table, "RULES", ())
    rows = [measure("bert", implementation, plain=False) for implementation in ("eager", "sdpa")]
    assert [(row.fused, row.silent) for row in rows] == [(0, 1), (0, 1)]


def test_graphs_of_a_backend_that_changes_nothing():
    assert measure("bert", "eager").plain_graphs == 1


@pytest.fixture
def rows():
    """Two rows as they could be measured."""
    masks = {"prefill": ["causal", "causal, window 5"], "decode": ["causal", "causal, window 5"]}
    return [
        document.cells(Row("llama", "eager", fused=2, masks=masks, graphs=3, plain_graphs=3, error=0.25)),
        document.cells(Row("t5", "sdpa", refused=1, silent=1, reasons=["a|b reads it"], graphs=1, plain_graphs=1)),
    ]


def test_document_is_read_as_written(rows):
    text = document.write("", rows)
    assert list(document.read(text)[transformers.__version__].values()) == rows
    assert rows[0][3] == "causal / causal, window 5"
    assert "2 of 3 sites fused (66.7 %), 1 refused, 1 silent" in text


def test_section_of_another_version_holds_what_differs(rows, monkeypatch):
    text = document.write("", rows)
    monkeypatch.setattr(transformers, "__version__", "99.0")
    changed = [rows[0], [*rows[1][:2], "1/1", *rows[1][3:]]]
    text = document.write(text, changed)
    assert text.count("| llama |") == 1
    assert list(document.read(text)["99.0"].values()) == changed


def test_check_tells_what_differs(rows, monkeypatch, tmp_path, capsys):
    """The error may differ; anything else fails the command."""
    path = tmp_path / "coverage.md"
    path.write_text(document.write("", rows))
    measured = [[*rows[0][:-1], "0.75"], rows[1]]
    monkeypatch.setattr(coverage, "_measure_all", lambda names, plain_from: [measured])
    monkeypatch.setattr("sys.argv", ["coverage", "--check", str(path)])
    assert coverage.main() == 0
    measured[1] = [*rows[1][:2], "0/2", *rows[1][3:]]
    assert coverage.main() == 1
    assert "0/2" in capsys.readouterr().out


def test_failure_of_a_model_is_a_row(monkeypatch):
    monkeypatch.setattr(coverage, "measure", lambda *_: 1 / 0)
    assert [document.cells(row)[-2] for row in coverage._measured("gptj")] == [
        "failed: ZeroDivisionError: division by zero"
    ]


def test_process_that_dies_leaves_a_row(monkeypatch):
    monkeypatch.setattr(coverage.sys, "executable", "false")
    assert [line[-2] for line in coverage._in_process(["gptj"], None, lambda: None)] == [
        "failed: the process ended with code 1"
    ]
