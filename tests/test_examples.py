"""Every example that measures, as a call with tiny arguments, and what its table claims."""

import importlib
import sys
import types
from pathlib import Path

import pytest
import torch

from attnpatch.testing.tolerance import run_float64

FOLDER = Path(__file__).parents[1] / "examples"
MEASURING = {
    "tiled_against_naive": ["--seqlens", "512", "--heads", "4", "--head-dim", "16"],
    "gqa_by_index": ["--heads", "4", "--group-sizes", "1", "2", "4", "--seqlen", "96", "--head-dim", "16"],
    "causal_against_full": ["--seqlens", "32", "300", "--heads", "2", "--head-dim", "16"],
    "dequantise_apart_or_fused": ["--seqlens", "64", "128", "--kv-heads", "2", "--group-size", "2"],
    "decode_over_keys": ["--splits", "1", "3", "7", "--seqlen", "100", "--kv-heads", "2", "--head-dim", "16"],
    "generate_in_4_bits": ["--prompt-tokens", "12", "--new-tokens", "3"],
}

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="not run from a checkout")


@pytest.fixture
def example(monkeypatch):
    """Import an example by its name; ``shared``, which it imports by its plain name, does not outlive the test."""
    monkeypatch.syspath_prepend(FOLDER)
    names = ["shared", "device_map", *MEASURING]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def run(module: types.ModuleType, *more: str):
    return module.main([*MEASURING[module.__name__], "--device", "cpu", *more])


@pytest.mark.parametrize("name", MEASURING)
def test_help_has_every_argument(example, capsys, name):
    with pytest.raises(SystemExit) as done:
        example(name).main(["--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    given = [argument for argument in MEASURING[name] if argument.startswith("--")]
    assert [flag for flag in ("--device", "--plot", *given) if flag not in printed] == []


@pytest.mark.parametrize("name", MEASURING)
def test_picture(example, tmp_path, name):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    run(example(name), "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def refusal(example, capsys, name: str, *argv: str) -> str:
    with pytest.raises(SystemExit) as done:
        example(name).main(list(argv))
    assert done.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "argv", "says"),
    [
        ("gqa_by_index", ["--plot", "a.txt"], "'a.txt' ends in none of .png, .pdf, .svg"),
        ("gqa_by_index", ["--device", "mars"], "argument --device"),
        ("gqa_by_index", ["--device", "meta"], "'meta' is neither cpu nor cuda"),
        ("gqa_by_index", ["--device", "cuda:99"], "'cuda:99' is not here; torch sees"),
        ("gqa_by_index", ["--seqlen", "0"], "'0' is not a whole number from 1 on"),
        ("gqa_by_index", ["--heads", "6", "--group-sizes", "4"], "6 heads cannot be in groups of 4"),
        ("dequantise_apart_or_fused", ["--head-dim", "20"], "head_dim 20 is not a positive multiple of 8"),
        ("decode_over_keys", ["--seqlen", "8", "--splits", "9"], "8 keys cannot be cut into 9 splits"),
        ("device_map", ["--share", "1"], "'1' is no number between 0 and 1"),
        ("device_map", ["--share", "half"], "'half' is no number between 0 and 1"),
    ],
)
def test_what_an_argument_cannot_be(example, capsys, name, argv, says):
    assert says in refusal(example, capsys, name, *argv)


def test_picture_without_matplotlib(example, capsys, monkeypatch):
    """Said before anything is measured, with the extra that brings it."""
    module, find_spec = example("tiled_against_naive"), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    monkeypatch.setattr(module, "measure", lambda *_: pytest.fail("measured"))
    assert "pip install 'attnpatch[plots]'" in refusal(example, capsys, module.__name__, "--plot", "a.png")


@pytest.mark.parametrize("name", ["generate_in_4_bits", "device_map"])
def test_without_transformers(example, capsys, monkeypatch, name):
    module = example(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'attnpatch[hf]'" in refusal(example, capsys, module.__name__)


def test_outputs_that_differ_are_not_timed(example):
    shared = example("shared")
    q, k, v = shared.draw(*[(1, 2, 8, 4)] * 3, device=torch.device("cpu"))
    right, exact = shared.naive(q, k, v), run_float64(shared.naive, q, k, v)
    assert set(shared.errors({"right": right}, right, exact)) == {"right"}
    with pytest.raises(AssertionError, match="is above the allowed"):
        shared.errors({"right": right, "wrong": right + 1e-3}, right, exact)


def test_naive_repeats_heads_as_models_do(example):
    shared, gqa = example("shared"), example("gqa_by_index")
    q, k, v = shared.draw((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), device=torch.device("cpu"))
    repeated = shared.naive(q, gqa.repeat_kv(k, 3), gqa.repeat_kv(v, 3))
    torch.testing.assert_close(shared.naive(q, k, v), repeated)


def test_tiled_against_naive(example, capsys):
    (row,) = run(example("tiled_against_naive"))
    assert row.score_bytes == 4 * 512 * 512 * 4
    if row.peak["naive"] is not None:
        assert row.peak["naive"] > row.score_bytes > row.peak["attnpatch"]
    assert "cpu.sdpa" in capsys.readouterr().out


def test_gqa_by_index(example):
    rows = run(example("gqa_by_index"))
    once = {row.group_size: row.read["by index"] for row in rows}
    assert [row.read["repeated"] // once[row.group_size] for row in rows] == [1, 2, 4]
    assert once == {1: 2 * 4 * 96 * 16 * 4, 2: 2 * 2 * 96 * 16 * 4, 4: 2 * 96 * 16 * 4}
    assert [row.copied // once[row.group_size] for row in rows] == [0, 3, 5], "read once, written for each head"


def test_causal_against_full(example):
    module = example("causal_against_full")
    rows = run(module)
    assert [(row.block_m, row.blocks, row.causal_blocks) for row in rows] == [(32, 1, 1), (64, 25, 15)]
    for n in (1, 2, 7):
        blocks, causal = module.count_blocks(n * 64, 64, 64)
        assert causal / blocks == (n + 1) / (2 * n)
    assert module.count_blocks(256, 64, 128) == (8, 6), "wider than high: two blocks of rows end in the same block"


def test_dequantise_apart_or_fused(example, capsys):
    rows = run(example("dequantise_apart_or_fused"))
    tokens = 2 * 2  # K and V of two heads
    assert [row.moved["fused"] for row in rows] == [tokens * n * (128 // 2 + 2) for n in (64, 128)]
    assert [row.moved["apart"] - row.moved["fused"] for row in rows] == [2 * row.dense for row in rows]
    assert "8.76" in capsys.readouterr().out


def test_decode_over_keys(example):
    rows = run(example("decode_over_keys"))
    assert [(row.splits, row.keys, row.programs) for row in rows] == [(1, 100, 2), (3, 34, 6), (7, 15, 14)]
    assert [row.ms for row in rows] == [None] * 3


def test_decode_over_keys_merges_by_the_lse(example):
    """Weights of equal splits would do for equal lse: here all the weight is on one key of the last split."""
    module, shared = example("decode_over_keys"), example("shared")
    q, k, v = shared.draw((1, 2, 1, 8), (1, 2, 12, 8), (1, 2, 12, 8), device=torch.device("cpu"))
    k[:, :, -1] = 40 * q[:, :, 0]
    torch.testing.assert_close(module.attend_in_splits(q, k, v, 4), v[:, :, -1:])


def test_decode_over_keys_by_the_kernel(example, capsys):
    """What a GPU runs, in Triton's interpreter, which has one multiprocessor."""
    pytest.importorskip("triton")
    module, shared = example("decode_over_keys"), example("shared")
    args = types.SimpleNamespace(splits=(1, 2), seqlen=100, kv_heads=2, head_dim=16)
    inputs = shared.draw((1, 4, 1, 16), (1, 2, 100, 16), (1, 2, 100, 16), device=torch.device("cpu"))
    rows, allowed = module.by_kernel(inputs, args)
    assert [(row.splits, row.programs, row.chosen) for row in rows[:2]] == [(1, 2, False), (2, 4, False)]
    assert rows[-1].chosen
    assert all(0 < row.error <= allowed and row.ms for row in rows)
    module.show(rows, "by the kernel")
    assert "chosen" in capsys.readouterr().out


def test_generate_in_4_bits(example, capsys):
    dense, packed = run(example("generate_in_4_bits"))
    assert (dense.stored, packed.stored) == (14, 14), "the last token is never stored"
    assert dense.bytes_per_token == 2 * 2 * 2 * 128 * 2, "K and V, layers, heads, channels, bytes"
    codes = 2 * 2 * 2 * (128 // 2 + 2)
    assert codes < packed.bytes_per_token < codes + 2 * dense.bytes_per_token / packed.room
    printed = capsys.readouterr().out
    assert "TBQ4 K, TBQ4 V" in printed
    assert "2 of 2 sites fused" in printed


def test_generate_from_a_checkpoint(example, capsys, tmp_path):
    """Its own tokenizer, of five words, reads the prompt and writes the text."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    module = example("generate_in_4_bits")
    module.random_llama(torch.device("cpu")).save_pretrained(tmp_path)
    words = {word: i for i, word in enumerate(["<unk>", "why", "the", "sky", "blue"])}
    words_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    words_only.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words_only, unk_token="<unk>").save_pretrained(tmp_path)
    rows = module.main(["--model", str(tmp_path), "--prompt", "why the sky", "--new-tokens", "2", "--device", "cpu"])
    assert [row.stored for row in rows] == [4, 4]
    assert "LlamaForCausalLM, 3 tokens and 2 new ones" in capsys.readouterr().out


@pytest.fixture
def spread_out(example, monkeypatch):
    """The example of a device map, on two layers and with few tokens."""
    pytest.importorskip("accelerate")
    module = example("device_map")
    monkeypatch.setattr(module, "LAYERS", 2)
    return lambda *more: module.main(["--device", "cpu", "--prompt-tokens", "9", "--new-tokens", "3", *more])


def test_device_map(spread_out, capsys):
    """Half of the weights lie on disk; each attention is fused all the same, and nothing runs past the patch."""
    here, there = spread_out()
    assert (here.place, there.place) == ("cpu", "disk")
    assert (here.modules, there.modules) == (1, 4), "embeddings; layers, the last norm, rotary embeddings, the head"
    embeddings, attention, mlp, norms = 2 * 1024 * 256, 256 * 64 * (4 + 2 + 2 + 4), 3 * 256 * 512, 2 * 256
    total = 4 * (embeddings + 2 * (attention + mlp + norms) + 256)
    assert here.num_bytes + there.num_bytes == total
    assert 0 < here.num_bytes <= total / 2
    printed = capsys.readouterr().out
    assert "2 of 2 sites fused" in printed
    assert "decode: cpu.sdpa (2)" in printed
    assert "gap" not in printed


def test_a_text_that_differs_is_an_error(spread_out, example, monkeypatch):
    module = example("device_map")
    texts = [torch.tensor([[1, 2]]), torch.tensor([[1, 3]])]
    monkeypatch.setattr(module, "generate", lambda *_: texts.pop())
    with pytest.raises(AssertionError, match=r"\[\[1, 2\]\] is not \[\[1, 3\]\]"):
        spread_out()


def test_help_of_the_device_map(example, capsys):
    with pytest.raises(SystemExit, match="0"):
        example("device_map").main(["--help"])
    printed = capsys.readouterr().out
    assert [x for x in ("--device", "--model", "--share", "--prompt-tokens", "--new-tokens") if x not in printed] == []
    assert "--plot" not in printed
