"""SmolLM2-135M-Instruct, a real Llama-style checkpoint: 30 layers, 9 query and 3 KV heads, head_dim 64.

Everything is compared with the unpatched eager model, in float32 on the CPU.
"""

import time
from collections.abc import Iterator

import pytest
import torch

import attnpatch
from attnpatch.cli import checkpoint, measure
from attnpatch.testing.tolerance import assert_same_function, run_float64

pytestmark = pytest.mark.checkpoint

LAYERS = 30
NEW_TOKENS = 128
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of motion are",
    "Dear Sir or Madam,\n\nI am writing to you because the lamp that I bought from your shop last week",
    "Water boils at",
    "In 1969, two men walked on the Moon. The first of them said:",
    "A short list of fruit that grows on trees: apples, pears, cherries, plums,",
)
PADDED = (0, 4, 5, 6)
"""Prompts of the batch: four lengths."""


@pytest.fixture(scope="module")
def original():
    """The unpatched eager model and its tokenizer."""
    try:
        model, tokenizer = checkpoint.load_smollm2(torch.float32, "eager")
    except checkpoint.CheckpointMissing as missing:
        pytest.skip(str(missing))
    tokenizer.padding_side = "left"
    return model, tokenizer


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def patched(request: pytest.FixtureRequest, original) -> Iterator[torch.nn.Module]:
    """A patched model of either implementation; strict, so that a site that stays unfused fails every test."""
    model, _ = checkpoint.load_smollm2(torch.float32, request.param)
    yield attnpatch.patch(model, strict=True)
    attnpatch.unpatch(model)


def greedy(model: torch.nn.Module, inputs, new_tokens: int = NEW_TOKENS, **options) -> list[list[int]]:
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    return model.generate(**inputs, **lengths, do_sample=False, **options).tolist()


@pytest.fixture(scope="module")
def single_inputs(original) -> list:
    return [original[1](prompt, return_tensors="pt") for prompt in PROMPTS]


@pytest.fixture(scope="module")
def padded_inputs(original):
    return original[1]([PROMPTS[i] for i in PADDED], return_tensors="pt", padding=True)


@pytest.fixture(scope="module")
def single_texts(original, single_inputs) -> list[list[list[int]]]:
    return [greedy(original[0], inputs) for inputs in single_inputs]


@pytest.fixture(scope="module")
def padded_texts(original, padded_inputs) -> list[list[int]]:
    return greedy(original[0], padded_inputs)


def assert_all_fused(model: torch.nn.Module, *phases: str) -> None:
    report = attnpatch.report(model)
    assert len(report.sites) == LAYERS, str(report)
    assert [site.status for site in report.sites] == ["fused"] * LAYERS, str(report)
    assert (report.summary["fused"], report.summary["refused"], report.gaps) == (LAYERS, 0, []), str(report)
    for site in report.sites:
        assert (site.num_heads, site.num_kv_heads, site.head_dim) == (9, 3, 64)
        assert set(phases) <= {dispatch.phase for dispatch in site.dispatches if dispatch.calls}, str(report)


def test_greedy_text_of_eight_prompts(patched, single_inputs, single_texts):
    for inputs, text in zip(single_inputs, single_texts, strict=True):
        assert greedy(patched, inputs) == text
    assert_all_fused(patched, "prefill", "decode")


def test_greedy_text_of_a_left_padded_batch(patched, padded_inputs, padded_texts):
    assert (padded_inputs["attention_mask"] == 0).any()
    assert greedy(patched, padded_inputs) == padded_texts
    assert_all_fused(patched, "prefill", "decode")


def test_greedy_text_on_a_static_cache(patched, single_inputs, single_texts):
    inputs = single_inputs[1]
    start = inputs["input_ids"].shape[1] + 32
    (text,) = greedy(patched, inputs, 32, cache_implementation="static")
    assert text == single_texts[1][0][:start]
    assert_all_fused(patched, "prefill", "decode")


@pytest.mark.parametrize("padding", [False, True], ids=["one", "left-padded"])
def test_logits(patched, original, single_inputs, padded_inputs, padding):
    model, _ = original
    inputs = padded_inputs if padding else single_inputs[4]
    with torch.no_grad():
        logits, own = patched(**inputs).logits, model(**inputs).logits
    exact = run_float64(model, **inputs).logits
    assert_same_function(logits, own, exact, rows=inputs["attention_mask"].bool())


def test_logits_of_a_decode_step(patched, original, single_inputs):
    model, _ = original
    ids = single_inputs[4]["input_ids"]

    def step(run):
        cache = run(ids[:, :-1]).past_key_values
        return run(ids[:, -1:], past_key_values=cache).logits

    with torch.no_grad():
        logits, own = step(patched), step(model)
    exact = run_float64(model, ids).logits[:, -1:]
    assert_same_function(logits, own, exact)


def test_text_generation_pipeline(patched, original):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = original

    def write(through) -> str:
        pipeline = transformers.pipeline("text-generation", model=through, tokenizer=tokenizer)
        return pipeline(PROMPTS[3], max_new_tokens=24, do_sample=False)[0]["generated_text"]

    assert write(patched) == write(model)
    assert_all_fused(patched, "prefill", "decode")


def test_unpatch_gives_back_the_same_logits(original, single_inputs):
    model, _ = original
    with torch.no_grad():
        before = model(**single_inputs[0]).logits
        with attnpatch.patched(model, strict=True):
            model(**single_inputs[0])
        after = model(**single_inputs[0]).logits
    assert torch.equal(before, after)


def test_peak_memory_of_a_long_prefill(original):
    eager, ours = (measure.measure_in_child(name, 4096) for name in ("eager", "attnpatch"))
    if eager.peak_bytes is None or ours.peak_bytes is None:
        pytest.skip("this system does not tell a process's peak resident set")
    assert ours.peak_bytes <= 0.45 * eager.peak_bytes


def test_prefill_is_faster_than_eager_and_no_slower_than_sdpa(original):
    """2,048 tokens. The best of several runs in turns: what else a machine does only ever makes a run slower."""
    models = {"eager": original[0]}
    for name in ("sdpa", "attnpatch"):
        models[name] = measure.load_implementation(name, None, None, torch.float32, "cpu")
    ids = torch.randint(0, 49152, (1, 2048), generator=torch.Generator().manual_seed(0))

    def seconds(name: str) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            models[name](ids, logits_to_keep=1)
        return time.perf_counter() - start

    for name in ("sdpa", "attnpatch"):
        seconds(name)
    runs = ["attnpatch", "sdpa"] * 6 + ["eager"] * 2
    times = [(name, seconds(name)) for name in runs]
    best = {name: min(t for n, t in times if n == name) for name in models}
    assert best["attnpatch"] <= 1.1 * best["sdpa"], times
    assert best["attnpatch"] < best["eager"], times
