"""PEFT adapters on patched models and patches on adapted models."""

import pytest
import torch

import attnpatch

peft = pytest.importorskip("peft")


@pytest.fixture
def adapt():
    """Wrap a model with a LoRA adapter that changes its outputs."""

    def wrap(model):
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config)

    return wrap


IDS = torch.arange(3, 13).view(1, 10)


def fused(model):
    return attnpatch.report(model).summary["fused"]


def test_patch_an_adapted_model(llama_with, adapt):
    model = adapt(llama_with()).eval()
    with torch.no_grad():
        expected, tokens = model(IDS).logits, model.generate(IDS, max_new_tokens=4, do_sample=False)
        attnpatch.patch(model, strict=True)
        torch.testing.assert_close(model(IDS).logits, expected)
        assert fused(model) == 2
        assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), tokens)
    report = attnpatch.report(model)
    names = [f"base_model.model.model.layers.{n}.self_attn" for n in range(2)]
    assert [(site.module, sum(d.calls for d in site.dispatches)) for site in report.sites] == [(n, 5) for n in names]


def test_unpatch_an_adapted_model(llama_with, adapt):
    model = adapt(llama_with(layers=1)).eval()
    base = model.get_base_model()
    attnpatch.patch(model)
    attnpatch.unpatch(model)
    for module in (model, base):
        assert "_compiled_call_impl" not in module.__dict__
    with pytest.raises(ValueError, match="not patched"):
        attnpatch.unpatch(model)


def test_adapt_a_patched_model(llama_with, adapt):
    """get_peft_model wraps the patched base, and calls base.forward directly: outputs are right either way."""
    base = attnpatch.patch(llama_with(layers=1))
    model = adapt(base).eval()
    with torch.no_grad():
        y = model(IDS).logits
        attnpatch.unpatch(base)
        torch.testing.assert_close(y, model(IDS).logits)


def test_adapt_a_patched_model_then_patch_the_wrapper(llama_with, adapt):
    base = attnpatch.patch(llama_with(layers=1))
    model = adapt(base).eval()
    with pytest.raises(ValueError, match=r"patched already; call attnpatch\.unpatch"):
        attnpatch.patch(model)
    attnpatch.unpatch(base)
    attnpatch.patch(model, strict=True)(IDS)
    assert fused(model) == 1


def test_switching_the_adapter_off(llama_with, adapt):
    model = adapt(llama_with(layers=1)).eval()
    with torch.no_grad():
        on = model(IDS).logits
        with model.disable_adapter():
            off = model(IDS).logits
        attnpatch.patch(model)
        torch.testing.assert_close(model(IDS).logits, on)
        with model.disable_adapter():
            torch.testing.assert_close(model(IDS).logits, off)
    assert fused(model) == 1


def test_training_the_adapter(llama_with, adapt):
    model = adapt(llama_with(layers=1)).double().train()
    batch = {"input_ids": IDS, "labels": IDS}

    def gradients():
        model.zero_grad()
        model(**batch).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    theirs = gradients()
    attnpatch.patch(model, strict=True)
    ours = gradients()
    assert list(ours) == list(theirs)
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad)


def test_merge_and_unload_gives_the_base_back_patched(llama_with, adapt):
    model = attnpatch.patch(adapt(llama_with(layers=1)).eval())
    with torch.no_grad():
        expected = model(IDS).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(IDS).logits, expected)


def test_adapter_files_are_unchanged_while_patched(llama_with, adapt, tmp_path):
    model = adapt(llama_with(layers=1)).eval()
    model.save_pretrained(tmp_path / "before")
    attnpatch.patch(model)(IDS)
    model.save_pretrained(tmp_path / "patched")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes()
