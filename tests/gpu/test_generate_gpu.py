"""patch() on a CUDA device: the Triton kernels run, text is the same, and Hugging Face's own compilation loses."""

from __future__ import annotations

import copy

import pytest
import torch

import attnpatch
from attnpatch.testing.tolerance import Float64Mode, assert_same_function, run_float64
from tests.gpu.calls import prefill_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPT_LENGTHS = (37, 90)


def tiny_llama(dtype: torch.dtype, implementation: str = "eager") -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=384,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).to("cuda", dtype).eval()
    model.set_attn_implementation(implementation)
    return model


def left_padded(length: int, batch: int = 3) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 500, (batch, length), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, : length // 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def backends_of(model: torch.nn.Module) -> set[tuple[str, str]]:
    return {(d.phase, d.backend) for site in attnpatch.report(model).sites for d in site.dispatches}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
def test_generate_runs_triton_and_keeps_the_text(implementation: str, cache: str | None) -> None:
    model = tiny_llama(torch.float32, implementation)
    arguments = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    if cache:
        arguments["cache_implementation"] = cache
    inputs = [left_padded(length) for length in PROMPT_LENGTHS]
    plain = [model.generate(**x, max_new_tokens=24, do_sample=False, pad_token_id=0) for x in inputs]
    with attnpatch.patched(model, strict=True):
        fused = [model.generate(**x, **arguments) for x in inputs]
        report = attnpatch.report(model)
        ran = backends_of(model)
    assert (report.summary["fused"], report.summary["refused"]) == (3, 0)
    assert ("decode", "triton.decode") in ran
    short_prompts = {"triton.append"} if cache else set()  # 37 rows on a static cache of more keys
    assert {backend for _, backend in ran} == {"triton.decode", "triton.prefill", *short_prompts}
    for a, b in zip(plain, fused, strict=True):
        assert torch.equal(a, b)


def test_bfloat16_logits_within_the_tolerance() -> None:
    model = tiny_llama(torch.bfloat16)
    inputs = left_padded(120)
    with torch.no_grad():
        original = model(**inputs).logits
        y64 = run_float64(model, **inputs).logits
        with attnpatch.patched(model, strict=True):
            y = model(**inputs).logits
            sites = attnpatch.report(model).sites
    assert {(d.phase, d.backend) for site in sites for d in site.dispatches} == {("prefill", prefill_backend())}
    assert {d.mask for site in sites for d in site.dispatches} == {"causal, padding"}
    rows = inputs["attention_mask"].bool()
    assert_same_function(y, original, y64, rows)


def gradients(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    real = inputs["attention_mask"].bool()
    predicted = real & real.roll(1, dims=1)  # the last padded row, which sees no key, predicts the first real token
    labels = inputs["input_ids"].masked_fill(~predicted, -100)
    model.zero_grad()
    model(**inputs, labels=labels).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_training_step_has_the_gradients_of_the_original() -> None:
    model = tiny_llama(torch.float32).train()
    inputs = left_padded(40)
    original = gradients(model, inputs)
    with Float64Mode():
        exact = gradients(copy.deepcopy(model).double(), inputs)
    with attnpatch.patched(model, strict=True):
        fused = gradients(model, inputs)
    for mine, theirs, y64 in zip(fused, original, exact, strict=True):
        assert_same_function(mine, theirs, y64)
