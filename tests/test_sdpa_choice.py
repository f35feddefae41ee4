"""`attnpatch doctor --sdpa`: what torch takes is seen, its reasons are caught, what is missing is said."""

import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from attnpatch.cli import main
from attnpatch.sdpa import choice, show
from attnpatch.sdpa.apart import each_apart
from attnpatch.sdpa.cases import CASES, LAYOUTS, MASKS, REMEDIES, Case, build

FALLS = {
    Case("float32", dropout=0.1): ("non-zero dropout", "dropout_p=0"),
    Case("float32", layout="last dim strided"): ("last dimension of the input to have stride 1", "contiguous()"),
    Case("float32", layout="3 dims, no batch"): ("4 dimensional", "unsqueeze(0)"),
    Case("float32", 128, head_dim_v=64): ("same last dimension", "pad head_dim_v"),
    Case("float32", mask="mask of 3 dims"): ("attn mask shapes", "mask.unsqueeze(0)"),
    Case("float32", mask="mask requires grad"): ("refuses a mask that requires a gradient", "detach the mask"),
}


def examined(*cases: Case) -> tuple[choice.Choice, ...]:
    return choice.examine("cpu", cases).choices


@pytest.mark.parametrize(
    "case", [Case("float32", mask="is_causal"), Case("float32", mask="bool mask"), Case("float16")]
)
def test_calls_that_flash_takes_on_a_cpu(case: Case):
    (found,) = examined(case)
    assert (found.runs, found.predicted, found.others, found.remedies) == ("flash", "flash", {}, ())


@pytest.mark.parametrize("case", FALLS, ids=Case.describe)
def test_a_fall_to_math_has_torchs_reason_and_a_change_that_works(case: Case):
    reason, remedy = FALLS[case]
    (found,) = examined(case)
    assert (found.runs, found.predicted) == ("math", "math")
    assert reason in found.others["flash"]
    assert "Got" not in found.others["flash"], "sizes of one call keep equal rows apart"
    assert found.remedies[0].startswith(remedy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "silent": torch itself says nothing
        F.scaled_dot_product_attention(**build(case, "cpu"))


def printed(found: choice.Choices) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    show.show(found, console)
    return console.export_text()


def test_three_refusals_fit_into_100_columns():
    others = {name: f"{name} does not take it" for name in ("flash", "efficient", "cudnn")}
    cases = (
        Case("float32", 64),
        *(Case(dtype, dim) for dtype in ("float16", "bfloat16") for dim in (64, 65, 128, 256)),
    )
    found = choice.Choices(
        "2.13", "GPU", ("a note",), tuple(choice.Choice(case, "math", "math", others, ()) for case in cases)
    )
    text = printed(found)
    for expected in ("flash (1)", "efficient (2)", "cudnn (3)", "(3)  cudnn does not take it", "note: a note"):
        assert expected in text


def test_a_change_that_does_not_help_is_not_advised(monkeypatch: pytest.MonkeyPatch):
    useless = [remedy._replace(change=lambda case: {}) for remedy in REMEDIES]
    monkeypatch.setattr(choice, "REMEDIES", useless)
    case = Case("float32", dropout=0.1)
    found = choice.examine("cpu", (case,))
    assert found.choices[0].remedies == ()
    assert "no single change that was tried leaves math" in printed(found)


def test_two_changes_at_once_are_not_promised():
    (found,) = examined(Case("float32", dropout=0.1, layout="last dim strided"))
    assert found.runs == "math"
    assert found.remedies == ()


def test_cases_differ_and_reach_every_mask_layout_and_remedy():
    assert len(set(CASES)) == len(CASES)
    assert {case.mask for case in CASES} == {"", "is_causal", *MASKS}
    assert {case.layout for case in CASES} == set(LAYOUTS)
    assert all(any(map(remedy.applies, CASES)) for remedy in REMEDIES)


def test_every_call_is_what_its_name_says():
    strided = build(Case("float32", layout="last dim strided"), "cpu")["query"]
    off = build(Case("float32", layout="storage off by 1"), "cpu")["query"]
    mask = build(Case("float32", mask="mask rows unaligned"), "cpu")["attn_mask"]
    assert strided.stride(-1) == 2
    assert off.data_ptr() % 16 == 4
    assert off.is_contiguous()
    assert (mask.stride(-2), mask.shape[-1]) == (129, 128)
    assert build(Case(mask="bool mask"), "cpu")["attn_mask"].all()


def fake_cuda(monkeypatch: pytest.MonkeyPatch, can_use) -> dict:
    """A call that looks like one on CUDA, and torch's questions answered by ``can_use(parameters, debug)``."""
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *arguments: arguments)
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", can_use)
    return {**build(Case(group_size=4), "cpu"), "query": SimpleNamespace(is_cuda=True)}


def test_reasons_that_can_use_warns_of_are_caught(monkeypatch: pytest.MonkeyPatch):
    def refuse(parameters, debug):
        assert debug
        assert parameters[3:] == (None, 0.0, False, True), "mask, dropout, is_causal, enable_gqa"
        text = "Both fused kernels need the same num_heads. Got Query 8 (Triggered internally at sdp_utils.cpp:9.)"
        warnings.warn(text, stacklevel=1)
        return False

    call = fake_cuda(monkeypatch, refuse)
    assert choice._reason("efficient", "flash", Case(), call) == "Both fused kernels need the same num_heads."


def test_reasons_written_to_stderr_are_caught(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    def refuse(parameters, debug):
        os.write(2, b"[W1130 13:12:26.5 sdp_utils.cpp:281] Warning: Not on this GPU. (function operator())\nnoise\n")
        return False

    call = fake_cuda(monkeypatch, refuse)
    assert choice._reason("efficient", "flash", Case(), call) == "Not on this GPU."
    assert capfd.readouterr().err == ""


def test_a_backend_that_could_run_is_told_from_one_that_refuses(monkeypatch: pytest.MonkeyPatch):
    call = fake_cuda(monkeypatch, lambda parameters, debug: True)
    assert choice._reason("efficient", "cudnn", Case(), call) == "could run, after cudnn in torch's order"
    call = fake_cuda(monkeypatch, lambda parameters, debug: False)
    assert choice._reason("efficient", "cudnn", Case(), call) == "torch gives no reason"


def test_a_backend_after_math_is_advised_by_name(monkeypatch: pytest.MonkeyPatch):
    case = Case("float32", dropout=0.1)
    monkeypatch.setattr(choice, "_forced", lambda name, call: (False, []))
    assert "sdpa_kernel(SDPBackend.FLASH_ATTENTION)" in next(choice._remedies(case, build(case, "cpu"), "cpu"))


def test_reasons_of_one_backend_end_at_the_next_header():
    flash, efficient, cudnn = choice.HEADERS
    texts = ["before", efficient, "no", flash, "first", "second", cudnn, "no"]
    assert choice._reasons_of("flash", texts) == ["first", "second"]
    assert choice._reasons_of("overrideable", texts) == []


def test_a_torch_without_its_private_functions_gets_a_note(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    monkeypatch.delattr(torch.backends.cuda, "SDPAParams")
    found = choice.examine("cpu", (Case("float32"), Case("float32", dropout=0.1)))
    assert [(each.runs, each.predicted) for each in found.choices] == [("flash", None), ("math", None)]
    assert found.notes == ("this torch has no torch._fused_sdp_choice: the choice is what the profiler saw, alone",)
    assert any("lacks SDPAParams" in note for note in choice._notes(found.choices, "cuda"))


def test_a_wrong_prediction_is_noted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda **call: 2)
    found = choice.examine("cpu", (Case("float32", mask="is_causal"),))
    assert found.choices[0].runs == "flash"
    assert found.notes == ("torch._fused_sdp_choice says otherwise for 1 calls, first: is_causal",)


def test_a_call_that_fails_is_a_row():
    (found,) = examined(Case("float32", dropout=2.0))
    assert found.runs.startswith("fails: dropout probability")
    assert found.remedies == ()


def test_equal_rows_merge_and_others_do_not():
    rows = [(dtype, dim, call, "flash", ()) for dtype in ("a", "b") for dim in (64, 65) for call in ("x", "y")]
    assert show.merge(rows) == [(("a", "b"), (64, 65), ("x", "y"), "flash", ())]
    rows[0] = ("a", 64, "x", "math", ())
    assert len(show.merge(rows)) > 1
    assert sum(len(a) * len(b) * len(c) for a, b, c, *_ in show.merge(rows)) == len(rows)


def test_the_command_prints_within_100_columns_and_writes_json(tmp_path: Path):
    path = tmp_path / "sdpa.json"
    command = [sys.executable, "-m", "attnpatch", "doctor", "--sdpa", "--json", str(path)]
    environment = {**os.environ, "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "flash (1)" in done.stdout, "no column is squeezed out"
    found = json.loads(path.read_text())
    assert set(found) == {"torch", "device", "notes", "calls"}
    assert (found["torch"], len(found["calls"])) == (torch.__version__, len(CASES))
    keys = {*Case._fields, "case", "runs", "predicted", "others", "remedies", "silent_math"}
    assert all(set(call) == keys for call in found["calls"])
    assert all(call["silent_math"] == (call["runs"] == "math") for call in found["calls"])
    falls = sum(call["silent_math"] for call in found["calls"])
    assert falls >= len(FALLS)
    assert f"silent falls to math: {falls} calls" in done.stdout
    assert all(call["others"]["flash"] and call["remedies"] for call in found["calls"] if call["silent_math"])


def test_json_without_sdpa_names_the_fix():
    with pytest.raises(SystemExit, match="goes with --sdpa"):
        main(["doctor", "--json", "x.json"])


def test_import_of_attnpatch_loads_none_of_it():
    code = "import attnpatch, sys; print([name for name in sys.modules if name.startswith('attnpatch.sdpa')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def process_of(_: int) -> int:
    return os.getpid()


def usable() -> bool:
    return True


def unusable() -> bool:
    return False


def test_calls_apart_share_a_process_until_one_breaks_it():
    assert len({os.getpid(), *each_apart(process_of, range(3), usable)}) == 2
    assert len({os.getpid(), *each_apart(process_of, range(2), unusable)}) == 3


def test_a_call_that_breaks_the_device_is_told(monkeypatch):
    def break_device(call):
        raise RuntimeError("CUDA error: misaligned address\nSearch for it")

    monkeypatch.setattr(choice, "_attend", break_device)
    found = choice._examine(Case(layout="storage off by 1"), "cpu")
    assert found.runs == "fails: CUDA error: misaligned address."
    assert found.others == {}
