"""``attnpatch roofline``: what it prints and writes, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnpatch.cli import main

FLAGS = ["--layers", "16", "--heads", "24", "--kv-heads", "4", "--head-dim", "256", "--weight-bytes", "17e9"]


@pytest.fixture(autouse=True)
def _narrow(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def printed(capsys, *arguments: str, code: int = 0) -> str:
    assert main(["roofline", *arguments]) == code
    return capsys.readouterr().out


def cells(text: str, *start: str) -> list[str]:
    """The row that begins with these cells."""
    rows = [line.split() for line in text.splitlines()]
    return next(row for row in rows if row[: len(start)] == list(start))


def test_tables_fit_80_columns_and_hold_the_published_numbers(capsys):
    text = printed(capsys, *FLAGS, "--device", "h200", "--context", "32768", "262144")
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "layers   16 full attention; 24 heads, 4 of K/V, head_dim 256" in text
    assert cells(text, "262,144", "16")[3:6] == ["17.2", "17.2", "50.3%"]
    assert cells(text, "262,144", "TBQ4")[2:] == ["4.43", "4.43", "20.7%", "4.46", "bytes", "224.0"]
    assert cells(text, "262,144", "TBQ4", "+")[4:6] == ["4.43", "38.8"]
    prefill = cells(text.partition("Prefill")[2], "32,768")
    assert prefill[-3:] == ["FLOPs", "2.15", "825"]


def test_json_has_the_same_numbers(tmp_path: Path, capsys):
    path = tmp_path / "roofline.json"
    printed(capsys, *FLAGS, "--batch", "2", "--context", "4096", "--json", str(path))
    numbers = json.loads(path.read_text())
    assert [row["kv_format"] for row in numbers["decode"]] == ["16 bit", "fp8 / int8", "TBQ4", "TBQ4 + dequant"]
    assert numbers["decode"][0]["kv_bytes"] == 2 * 4096 * 65_536
    assert numbers["decode"][0]["bytes_floor_s"] == pytest.approx((17e9 + 2 * 4096 * 65_536) / 3.35e12)
    assert numbers["prefill"][0]["eager_score_bytes"] == 2 * 24 * 16 * 2 * 4096**2


def test_a_config(tmp_path: Path, capsys):
    config = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 400, "full_attention_interval": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = printed(capsys, "--config", str(tmp_path), "--weight-bytes", "1e9")
    assert "2 full attention, 2 without K/V (linear)" in text
    assert "TBQ4 needs a head_dim that is a multiple of 8, not 100" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (FLAGS[:-2], "without --config, --weight-bytes must be given"),
        ([*FLAGS, "--config", "x"], "--config and --layers, --heads, --kv-heads, --head-dim: give one of the two"),
        ([*FLAGS[:-2], "--parameters", "3"], "--parameters says how many --weight-bytes are; give both"),
        (["--config", "/no/such"], "/no/such does not exist; give the folder of a model"),
        ([*FLAGS, "--plot", "x.png", "--context", "1000"], "the longest is 1000, give a longer one"),
        ([*FLAGS, "--json", "/no/such/file"], "No such file or directory: '/no/such/file'"),
    ],
)
def test_bad_input_names_the_value_and_the_fix(arguments: list[str], message: str, capsys):
    assert message in printed(capsys, *arguments, code=1).replace("\n", " ").replace("  ", " ")


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--layers", "2.5"], ["--weight-bytes", "nan"]])
def test_numbers_that_are_none_exit_with_2(arguments: list[str], capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["roofline", *arguments])
    assert f"{arguments[1]!r} is no" in capsys.readouterr().err


def test_the_picture_draws_each_format_to_the_longest_context(tmp_path: Path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kw: (figures.append(figure), save(figure, *args, **kw))
    )
    path = tmp_path / "ceilings.png"
    printed(capsys, *FLAGS, "--device", "h200", "--context", "4096", "262144", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    ends = {line.get_label(): (line.get_xdata()[-1], round(line.get_ydata()[-1])) for line in axes.lines}
    assert ends == {
        "16 bit": (262_144, 140), "fp8 / int8": (262_144, 187), "TBQ4": (262_144, 224), "TBQ4 + dequant": (262_144, 86),
    }  # fmt: skip
    assert axes.get_xscale() == "log"


def test_a_picture_without_matplotlib_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'attnpatch[plots]'" in printed(capsys, *FLAGS, "--plot", "x.png", code=1)


def test_importing_it_imports_nothing_heavy():
    code = (
        "import sys, attnpatch; assert 'attnpatch.roofline' not in sys.modules\n"
        "before = set(sys.modules); import attnpatch.roofline\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["attnpatch"], done.stdout + done.stderr
