"""``attnpatch report`` from the command line."""

import pytest

from attnpatch.cli import main


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def files(site, refused, report_of, tmp_path):
    """Paths of a report with two fused sites, of one that lost the second, and of no report."""
    report_of(site("a"), site("b")).to_json(tmp_path / "good.json")
    report_of(site("a"), refused("b")).to_json(tmp_path / "bad.json")
    (tmp_path / "none.json").write_text("{}")
    return {path.stem: str(path) for path in tmp_path.glob("*.json")}


@pytest.mark.parametrize(
    ("old", "new", "code", "words"),
    [
        ("good", "good", 0, "no site changed"),
        ("good", "bad", 1, "1 lost their kernel"),
        ("bad", "good", 0, "0 lost their kernel"),
        ("good", "none", 1, "none.json: schema None is not"),
    ],
)
def test_diff(files, old, new, code, words, capsys):
    assert main(["report", "--diff", files[old], files[new]]) == code
    assert words in capsys.readouterr().out


def test_diff_of_a_file_that_is_not_there(files, capsys):
    assert main(["report", "--diff", files["good"], "/no/such/file.json"]) == 1
    assert "/no/such/file.json" in capsys.readouterr().out
