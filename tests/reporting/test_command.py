"""``attnpatch report`` from the command line."""

import json
import re
import shutil
import sys

import pytest
import torch

from attnpatch import Report
from attnpatch.cli import main, measure, reporting
from attnpatch.cli.measure import Measurement, MeasurementFailed


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


TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture
def config(tmp_path):
    """Folder with the config of a Llama of two layers; takes fields of it."""
    llama = pytest.importorskip("transformers.models.llama")

    def make(**fields):
        llama.LlamaConfig(**{**TINY, **fields}).save_pretrained(tmp_path / "config")
        return str(tmp_path / "config")

    return make


def test_config_with_random_weights(config, tmp_path, capsys):
    """Prefill and decode in the table, in the JSON and on the page; one row for both layers."""
    outputs = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    run = ["report", "--config", config(), "--device", "cpu", "--prompt-tokens", "12", "--new-tokens", "3", "--strict"]
    assert main([*run, *outputs]) == 0
    printed = capsys.readouterr().out
    for words in ("model.layers.0-1.self_attn", "causal", "prefill: cpu.sdpa (1)", "decode: cpu.sdpa (2)"):
        assert words in printed
    report = Report.from_json(tmp_path / "r.json")
    assert [[d.calls for d in site.dispatches] for site in report.sites] == [[1, 2]] * 2
    assert "model.layers.0-1.self_attn" in (tmp_path / "r.html").read_text()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a saved Llama of two layers, without a tokenizer."""
    llama = pytest.importorskip("transformers.models.llama")
    path = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    llama.LlamaForCausalLM(llama.LlamaConfig(**TINY)).save_pretrained(path)
    return path


def test_a_checkpoint_without_a_tokenizer(checkpoint, monkeypatch, capsys):
    """Token ids come from a seed: two runs are given the same, whatever else was drawn before."""
    assert not list(checkpoint.glob("*token*"))
    prompts = []

    def stand_in(model, ids, **_):
        prompts.append(ids.tolist())
        torch.rand(3)

    llama = pytest.importorskip("transformers.models.llama")
    monkeypatch.setattr(llama.LlamaForCausalLM, "generate", stand_in)
    for _ in range(2):
        assert main(["report", str(checkpoint), "--device", "cpu", "--prompt-tokens", "12"]) == 0
    assert "ran on 12 token ids drawn with seed 0, no tokenizer needed; then 4 new tokens" in capsys.readouterr().out
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0][0])) > 1


def test_time_is_that_of_a_second_run(checkpoint, tmp_path, capsys):
    run = ["report", str(checkpoint), "--device", "cpu", "--prompt-tokens", "12", "--new-tokens", "3"]
    assert main([*run, "--time", "--json", str(tmp_path / "r.json")]) == 0
    printed = capsys.readouterr().out
    assert "ran twice on 12 token ids" in printed
    assert "prefill: cpu.sdpa (2)   prefill " in printed
    assert re.search(r"decode: \S+ ms per run, of which attention \S+% \(2 timed\)", printed)
    report = Report.from_json(tmp_path / "r.json")
    assert [(time.phase, time.runs) for time in report.times] == [("prefill", 1), ("decode", 2)]
    assert [[(d.calls, d.timed_calls) for d in site.dispatches] for site in report.sites] == [[(2, 1), (4, 2)]] * 2
    assert all(
        0 < sum(d.seconds for s in report.sites for d in s.dispatches if d.phase == t.phase) < t.seconds
        for t in report.times
    )


def nothing(folder, good):
    """An empty folder."""


def no_weights(folder, good):
    shutil.copy(good / "config.json", folder)


def broken_weights(folder, good):
    no_weights(folder, good)
    (folder / "model.safetensors").write_bytes(b"x" * 100)


def broken_config(folder, good):
    (folder / "config.json").write_text("{")


def another_kind(folder, good):
    (folder / "config.json").write_text('{"model_type": "vit"}')


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (nothing, "is no checkpoint: there is no config.json in it"),
        (no_weights, "no file named model.safetensors"),
        (broken_weights, "its weights cannot be read: "),
        (broken_config, "not a valid JSON file"),
        (another_kind, "holds no causal language model; attnpatch.patch(model) in Python takes any nn.Module"),
    ],
)
def test_what_is_no_checkpoint(make, words, checkpoint, tmp_path, capsys):
    folder = tmp_path / "it"
    folder.mkdir()
    make(folder, checkpoint)
    assert main(["report", str(folder), "--device", "cpu"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert words in printed
    assert str(folder) in printed


def test_what_is_no_folder(checkpoint, capsys):
    """Neither is looked for on a hub."""
    assert main(["report", str(checkpoint / "config.json"), "--device", "cpu"]) == 1
    assert main(["report", "no-such/model", "--device", "cpu"]) == 1
    file, name = capsys.readouterr().out.split("\n", 1)
    assert "config.json is no folder; a checkpoint is a folder with" in file
    assert "no-such/model: there is no such folder; a checkpoint" in name


def test_a_config_of_another_kind(tmp_path, capsys):
    another_kind(tmp_path, None)
    assert main(["report", "--config", str(tmp_path), "--device", "cpu"]) == 1
    assert "holds no causal language model" in " ".join(capsys.readouterr().out.split())


def test_strict_prints_the_whole_report_and_exits_with_1(config, tmp_path, capsys):
    """With output_attentions every site is refused, not the first alone."""
    run = ["report", "--config", config(output_attentions=True), "--device", "cpu", "--new-tokens", "2"]
    path = tmp_path / "r.json"
    assert main([*run, "--strict", "--json", str(path)]) == 1
    printed = capsys.readouterr().out
    report = Report.from_json(path)
    assert f"strict: 2 sites refused, {len(report.gaps)} gaps" in printed
    assert "refused: the attention probabilities" in printed
    assert "try: do not ask for output_attentions" in printed
    assert report.summary["refused"] == 2


def test_strict_counts_gaps(report_of, site, monkeypatch, capsys):
    monkeypatch.setattr(reporting, "report_of_run", lambda args: report_of(site(), gaps=[("graph break", "a", 1)]))
    assert main(["report", "--strict"]) == 1
    assert "strict: 0 sites refused, 1 gaps" in capsys.readouterr().out
    assert main(["report"]) == 0


def test_model_by_position_and_by_name(report_of, monkeypatch):
    seen = []
    monkeypatch.setattr(reporting, "report_of_run", lambda args: seen.append(args.model) or report_of())
    for arguments in (["folder"], ["--model", "folder"], []):
        assert main(["report", *arguments]) == 0
    assert seen == ["folder", "folder", None]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["folder", "--config", "other"], "not allowed with"),
        (["--compare", "eager,flash"], "'flash' is none of eager, sdpa"),
        (["--compare", ""], "'' is none of"),
        (["--prompt-tokens", "0"], "'0' is not a whole number from 1 on"),
        (["--new-tokens", "1"], "'1' is not a whole number from 2 on"),
        (["--new-tokens", "-3"], "from 2 on"),
        (["--diff", "one"], "expected 2 arguments"),
    ],
)
def test_bad_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["report", *arguments])
    assert words in capsys.readouterr().err


def test_a_config_that_is_not_there(capsys):
    assert main(["report", "--config", "/no/such/folder"]) == 1
    assert "--config /no/such/folder: there is no such file or folder" in capsys.readouterr().out


@pytest.fixture
def measured(report_of, site, monkeypatch):
    """Arguments of each measurement; nothing runs. ``measured.milliseconds`` are the prefills' times."""
    calls = []
    times = {"eager": 80.0, "sdpa": 50.0, "attnpatch": 40.0}

    def stand_in(implementation, seqlen, dtype, device, new_tokens, model, config):
        calls.append((implementation, seqlen, dtype, device, new_tokens, model, config))
        return Measurement(implementation, seqlen, times[implementation], None, 1000 / times[implementation])

    monkeypatch.setattr(reporting, "report_of_run", lambda args: report_of(site()))
    monkeypatch.setattr(reporting, "measure_in_child", stand_in)
    return calls


def test_compare(measured, capsys):
    run = ["report", "--config", "c", "--device", "cpu", "--prompt-tokens", "32", "--new-tokens", "8"]
    assert main([*run, "--compare", "eager,sdpa"]) == 0
    case = 32, "float32", "cpu", 8, None, "c"
    assert measured == [("eager", *case), ("sdpa", *case), ("attnpatch", *case)]
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["prefill 32", "80.0 ms", "50.0 ms", "40.0 ms", "0.50x", "0.80x"] in lines
    assert ["memory 32", "?", "?", "?", "", ""] in lines
    assert ["decode", "12.5 tok/s", "20.0 tok/s", "25.0 tok/s", "2.00x", "1.25x"] in lines


def test_compare_with_one(measured, capsys):
    assert main(["report", "--device", "cpu", "--compare", "sdpa"]) == 0
    assert [case[0] for case in measured] == ["sdpa", "attnpatch"]
    assert "vs eager" not in capsys.readouterr().out


def test_compare_refuses_backends_that_it_would_not_measure(measured, capsys):
    assert main(["report", "--compare", "sdpa", "--backends", "cpu.tiled"]) == 1
    assert "set ATTNPATCH_BACKENDS instead" in capsys.readouterr().out
    assert measured == []


def test_a_measurement_that_fails_is_told(measured, monkeypatch, capsys):
    def fail(*_):
        raise MeasurementFailed("measuring eager at 64 tokens failed:\nout of memory")

    monkeypatch.setattr(reporting, "measure_in_child", fail)
    assert main(["report", "--compare", "eager"]) == 1
    assert "out of memory" in capsys.readouterr().out


def test_the_child_measures_a_config(config, monkeypatch, capsys):
    """What the fresh process runs, here in this one."""
    case = ["--implementation", "attnpatch", "--seqlen", "16", "--new-tokens", "3", "--config", config()]
    monkeypatch.setattr(sys, "argv", ["measure", *case])
    measure.main()
    result = Measurement(**json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert (result.implementation, result.seqlen) == ("attnpatch", 16)
    assert result.prefill_ms > 0
    assert result.decode_tokens_per_s > 0


def test_the_child_is_told_everything(monkeypatch):
    """Every argument of measure_in_child reaches its command line."""
    commands = []

    def stand_in(command, **_):
        commands.append(command)
        line = json.dumps(Measurement("sdpa", 16, 1.0, None, None)._asdict())
        return type("Done", (), {"returncode": 0, "stdout": line})

    monkeypatch.setattr(measure.subprocess, "run", stand_in)
    measure.measure_in_child("sdpa", 16, "bfloat16", "cpu", 3, config="c")
    words = " ".join(commands[0])
    assert "--implementation sdpa --seqlen 16 --dtype bfloat16 --device cpu --new-tokens 3 --config c" in words
    assert "--model" not in words
