"""Every example, as a call with tiny arguments, and what its table claims."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from attnpatch.testing.tolerance import run_float64

FOLDER = Path(__file__).parents[1] / "examples"
TINY = "the checkpoint of the fixture tiny_llama"
MEASURING = {
    "tiled_against_naive": ["--seqlens", "512", "--heads", "4", "--head-dim", "16"],
    "gqa_by_index": ["--heads", "4", "--group-sizes", "1", "2", "4", "--seqlen", "96", "--head-dim", "16"],
    "causal_against_full": ["--seqlens", "32", "300", "--heads", "2", "--head-dim", "16"],
    "dequantise_apart_or_fused": ["--seqlens", "64", "128", "--kv-heads", "2", "--group-size", "2"],
    "decode_over_keys": ["--splits", "1", "3", "7", "--seqlen", "100", "--kv-heads", "2", "--head-dim", "16"],
    "generate_in_4_bits": ["--prompt-tokens", "12", "--new-tokens", "3"],
    "patch_checkpoint": ["--model", TINY, "--seqlens", "12", "40", "--new-tokens", "3"],
    "own_attention": ["--seqlens", "9", "70", "--batch", "1"],
    "compile_backend": ["--model", TINY, "--seqlen", "40"],
    "serve_a_batch": ["--model", TINY, "--new-tokens", "3"],
    "device_map": ["--prompt-tokens", "9", "--new-tokens", "3", "--share", "0.5"],
}
OF_CHECKPOINTS = [name for name, argv in MEASURING.items() if "--model" in argv]

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="not run from a checkout")


@pytest.fixture
def example(monkeypatch):
    """Import an example by its name; ``shared``, which it imports by its plain name, does not outlive the test."""
    monkeypatch.syspath_prepend(FOLDER)
    names = ["shared", *MEASURING]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def run(request, monkeypatch, tmp_path):
    """Call an example's main on a CPU with its arguments of MEASURING; what it returns, once its picture is there."""

    def call(module: types.ModuleType):
        argv = MEASURING[module.__name__]
        if TINY in argv:
            argv = [str(request.getfixturevalue("tiny_llama")) if each is TINY else each for each in argv]
        if module.__name__ == "device_map":
            pytest.importorskip("accelerate")
            monkeypatch.setattr(module, "LAYERS", 2)
        if module.__name__ == "serve_a_batch":
            monkeypatch.setattr(module, "PROMPTS", ("why", "the sky", "blue sky why the"))
        path = tmp_path / "picture.png"
        plot = ["--plot", str(path)] if importlib.util.find_spec("matplotlib") else []
        result = module.main([*argv, "--device", "cpu", *plot])
        assert not plot or path.read_bytes().startswith(b"\x89PNG")
        return result

    return call


@pytest.mark.parametrize("name", MEASURING)
def test_help_has_every_argument(example, capsys, name):
    with pytest.raises(SystemExit) as done:
        example(name).main(["--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    given = [argument for argument in MEASURING[name] if argument.startswith("--")]
    assert [flag for flag in ("--device", "--plot", *given) if flag not in printed] == []


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
        ("patch_checkpoint", ["--new-tokens", "1"], "'1' is not a whole number from 2 on"),
        ("patch_checkpoint", ["--model", "a", "--config", "b"], "not allowed with argument --model"),
        ("patch_checkpoint", ["--config", "/nowhere"], "/nowhere: there is no such file or folder"),
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


@pytest.mark.parametrize("name", OF_CHECKPOINTS)
def test_no_checkpoint(example, capsys, tmp_path, name):
    says = f"{tmp_path} is no checkpoint: there is no config.json in it"
    assert says in refusal(example, capsys, name, "--model", str(tmp_path))


@pytest.mark.parametrize("name", ["generate_in_4_bits", "device_map", *OF_CHECKPOINTS])
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


def test_tiled_against_naive(example, run, capsys):
    (row,) = run(example("tiled_against_naive"))
    assert row.score_bytes == 4 * 512 * 512 * 4
    if row.peak["naive"] is not None:
        assert row.peak["naive"] > row.score_bytes > row.peak["attnpatch"]
    assert "cpu.sdpa" in capsys.readouterr().out


def test_gqa_by_index(example, run):
    rows = run(example("gqa_by_index"))
    once = {row.group_size: row.read["by index"] for row in rows}
    assert [row.read["repeated"] // once[row.group_size] for row in rows] == [1, 2, 4]
    assert once == {1: 2 * 4 * 96 * 16 * 4, 2: 2 * 2 * 96 * 16 * 4, 4: 2 * 96 * 16 * 4}
    assert [row.copied // once[row.group_size] for row in rows] == [0, 3, 5], "read once, written for each head"


def test_causal_against_full(example, run):
    module = example("causal_against_full")
    rows = run(module)
    assert [(row.block_m, row.blocks, row.causal_blocks) for row in rows] == [(32, 1, 1), (64, 25, 15)]
    for n in (1, 2, 7):
        blocks, causal = module.count_blocks(n * 64, 64, 64)
        assert causal / blocks == (n + 1) / (2 * n)
    assert module.count_blocks(256, 64, 128) == (8, 6), "wider than high: two blocks of rows end in the same block"


def test_dequantise_apart_or_fused(example, run, capsys):
    rows = run(example("dequantise_apart_or_fused"))
    tokens = 2 * 2  # K and V of two heads
    assert [row.moved["fused"] for row in rows] == [tokens * n * (128 // 2 + 2) for n in (64, 128)]
    assert [row.moved["apart"] - row.moved["fused"] for row in rows] == [2 * row.dense for row in rows]
    assert "8.76" in capsys.readouterr().out


def test_decode_over_keys(example, run):
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


def test_generate_in_4_bits(example, run, capsys):
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


def moved_by_eager(seqlen: int, layers: int, num_heads: int, head_dim: int) -> tuple[int, int]:
    """Bytes in float32, written and read: K and V repeated to all heads, and scores and probabilities."""
    return 2 * 2 * layers * num_heads * seqlen * head_dim * 4, 2 * 2 * layers * num_heads * seqlen**2 * 4


def test_patch_checkpoint(example, run, capsys):
    rows = run(example("patch_checkpoint"))
    assert [row.seqlen for row in rows] == [12, 40]
    for row in rows:
        assert (row.kv_bytes, row.score_bytes) == moved_by_eager(row.seqlen, 2, 4, 16), "of one prefill alone"
        assert list(row.speed) == list(row.error) == ["eager", "attnpatch"]
        assert all(speed.first_ms > 0 and speed.tokens_per_s > 0 for speed in row.speed.values())
    printed = capsys.readouterr().out
    assert "2 of 2 sites fused" in printed
    assert "gap" not in printed


def test_a_patch_that_differs_is_not_timed(example, run, monkeypatch):
    module, shared = example("patch_checkpoint"), example("shared")
    monkeypatch.setattr(module.attnpatch, "patch", lambda model, **_: model.lm_head.weight.data.mul_(1.01))
    monkeypatch.setattr(shared, "speed", lambda *_: pytest.fail("timed"))
    with pytest.raises(AssertionError, match="is above the allowed"):
        run(module)


def test_patch_random_weights(example, tiny_llama, capsys):
    """Without a tokenizer there is no text; the logits of float64 weights, one at a time, are those of a copy."""
    module = example("patch_checkpoint")
    config = str(tiny_llama / "config.json")
    (row,) = module.main(["--config", config, "--seqlens", "5", "--new-tokens", "2", "--device", "cpu"])
    assert row.seqlen == 5
    assert "million parameters, float32" in capsys.readouterr().out
    model, ids = module.load(None, config, torch.float32, "eager", torch.device("cpu")), torch.arange(6)[None]
    torch.testing.assert_close(module.exact_logits(model, ids), run_float64(model, ids).logits[:, -1])


def test_the_8b_config_is_that_of_llama_3():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**json.loads((FOLDER / "llama-8b.json").read_text("utf-8")))
    with torch.device("meta"):
        assert transformers.LlamaForCausalLM(config).num_parameters() == 8_030_261_248, "as published"
    assert (config.head_dim, config.rope_parameters["rope_theta"]) == (128, 500_000)


def test_own_attention(example, run, capsys):
    rows = run(example("own_attention"))
    assert [(row.kv_bytes, row.score_bytes) for row in rows] == [moved_by_eager(n, 1, 8, 32) for n in (9, 70)]
    assert "1 of 1 sites fused" in capsys.readouterr().out


def test_own_attention_that_differs_is_an_error(example, monkeypatch):
    module, shared = example("own_attention"), example("shared")
    monkeypatch.setattr(shared, "times", lambda *_: pytest.fail("timed"))
    with torch.no_grad(), pytest.raises(AssertionError, match="is above the allowed"):
        module.measure(module.Attention(), module.Attention(), 1, 8)


def test_compile_backend(example, run, capsys):
    eager, ours = run(example("compile_backend"))
    assert (eager.way, ours.way) == ("eager", "attnpatch")
    assert eager.difference == 0 < ours.difference < 1e-5
    assert ours.first_s > ours.ms / 1e3, "the first call compiles"
    assert "2 of 2 sites fused" in capsys.readouterr().out


def test_a_compiled_model_that_differs_is_an_error(example, run, monkeypatch):
    module = example("compile_backend")
    output = types.SimpleNamespace(logits=torch.zeros(1, 40, 64))
    monkeypatch.setattr(module, "ways", lambda model, _: {"eager": model, "attnpatch": lambda _: output})
    with pytest.raises(AssertionError, match="is above the allowed"):
        run(module)


def test_serve_a_batch(example, run, capsys):
    alone, together = run(example("serve_a_batch"))
    assert (alone.batch, alone.read, alone.padding) == (1, 1 + 2 + 4, 0)
    assert (together.batch, together.read, together.padding) == (3, 3 * 4, 3 + 2)
    for row in (alone, together):
        assert row.tokens_per_s * row.seconds == pytest.approx(3 * 3)
    assert "2 of 2 sites fused" in capsys.readouterr().out


def test_a_batch_that_differs_is_an_error(example, run, monkeypatch):
    """Padding that nothing hides changes the tokens."""
    from transformers import PreTrainedTokenizerFast

    call = PreTrainedTokenizerFast.__call__

    def unmasked(*args, **kwargs):
        inputs = call(*args, **kwargs)
        inputs["attention_mask"].fill_(1)
        return inputs

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", unmasked)
    with pytest.raises(AssertionError, match=r"goes on with .*, alone with"):
        run(example("serve_a_batch"))


def test_device_map(example, run, capsys):
    """Half of the weights lie on disk; each attention is fused all the same, and nothing runs past the patch."""
    (here, there), speeds = run(example("device_map"))
    assert (here.place, there.place) == ("cpu", "disk")
    assert (here.modules, there.modules) == (1, 4), "embeddings; layers, the last norm, rotary embeddings, the head"
    embeddings, attention, mlp, norms = 2 * 1024 * 256, 256 * 64 * (4 + 2 + 2 + 4), 3 * 256 * 512, 2 * 256
    total = 4 * (embeddings + 2 * (attention + mlp + norms) + 256)
    assert here.num_bytes + there.num_bytes == total
    assert 0 < here.num_bytes <= total / 2
    assert list(speeds) == ["unpatched", "patched"]
    printed = capsys.readouterr().out
    assert "2 of 2 sites fused" in printed
    assert "decode: cpu.sdpa (2)" in printed, "of the run that is compared, not of those that are timed"
    assert "gap" not in printed


def test_a_text_that_differs_is_an_error(example, run, monkeypatch):
    module, shared = example("device_map"), example("shared")
    texts = [torch.tensor([[1, 2]]), torch.tensor([[1, 3]])]
    monkeypatch.setattr(shared, "generate", lambda *_: texts.pop())
    with pytest.raises(AssertionError, match=r"\[\[1, 2\]\] is not \[\[1, 3\]\]"):
        run(module)


def test_speed_is_of_the_tokens_after_the_first(example, monkeypatch):
    """Milliseconds from the prompt to the first token, then tokens per second: of clocks, not of models."""
    shared, arrivals = example("shared"), iter([0.0, 2.0, 2.5, 3.0] * 3)

    def generate(model, ids, new_tokens, streamer):
        streamer.arrivals.extend(next(arrivals) for _ in range(1 + new_tokens))

    monkeypatch.setattr(shared, "generate", generate)
    assert shared.speed(None, None, 3) == (2000, 2)


def test_own_pipeline(example, capsys):
    example("own_pipeline").main()
    printed = capsys.readouterr().out
    assert "1 of 1 sites fused" in printed
    assert float(printed.rsplit(":", 1)[1]) < 1e-5


def test_paged_cache(example, tiny_llama, capsys):
    example("paged_cache").main(str(tiny_llama))
    assert "2 of 2 sites fused" in capsys.readouterr().out
