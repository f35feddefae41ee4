"""Libraries and habits around a patched model: Trainer, threads, quantised weights, what is changed after the patch."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import attnpatch

IDS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))


def tokens_of(model, ids=IDS):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)


def fused(model):
    report = attnpatch.report(model)
    return report.summary["fused"], report.summary["refused"], report.gaps


def test_trainer_evaluates_and_predicts(llama_with, tmp_path):
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": ids, "labels": ids} for ids in IDS]
    arguments = TrainingArguments(output_dir=str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True)
    model, found = llama_with(layers=1), []
    for change in (lambda model: None, attnpatch.patch):
        change(model)
        trainer = Trainer(model=model, args=arguments, eval_dataset=data)
        found.append((trainer.evaluate()["eval_loss"], torch.tensor(trainer.predict(data).predictions)))
    torch.testing.assert_close(*found)
    assert fused(model) == (1, 0, [])


CHANGES = {
    "weights": lambda model: model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()}, assign=True),
    "more tokens": lambda model: model.resize_token_embeddings(80),
    "attention": lambda model: model.set_attn_implementation("sdpa"),
    "head": lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head, nn.Tanh())),
}


def test_changes_after_the_patch(llama_with):
    """The next call runs the model as it then is."""
    model = attnpatch.patch(llama_with(layers=1), strict=True)
    with torch.no_grad():
        before = model(IDS).logits
        for change in CHANGES.values():
            change(model)
            after = model(IDS).logits
            torch.testing.assert_close(after, copy.deepcopy(model)(IDS).logits)
            assert before.shape != after.shape or torch.equal(before, after) == (change is CHANGES["attention"])
            before = after


def test_weights_for_one_call(llama_with):
    model, other = (llama_with(layers=1) for _ in range(2))
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
        mine = attnpatch.patch(model, strict=True)(IDS).logits
        got = torch.func.functional_call(model, dict(other.state_dict()), (IDS,)).logits
        torch.testing.assert_close(got, other(IDS).logits)
        torch.testing.assert_close(model(IDS).logits, mine)


@pytest.mark.parametrize("num_models", [1, 2])
def test_two_threads(llama_with, num_models):
    models = [llama_with(layers=1) for _ in range(num_models)]
    for model in models[1:]:
        nn.init.normal_(model.lm_head.weight)
    work = [(models[i % num_models], IDS[:, i:]) for i in range(4)]
    expected = [tokens_of(*call) for call in work]
    for model in models:
        attnpatch.patch(model, strict=True, cache="buffered")
    with ThreadPoolExecutor(max_workers=2) as threads:
        found = list(threads.map(lambda call: tokens_of(*call), work))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    assert [fused(model) for model in models] == [(1, 0, [])] * num_models


def torchao_int8(model):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def bitsandbytes_nf4(model):
    bnb = pytest.importorskip("bitsandbytes")
    for module in model.model.layers[0].modules():
        for name, linear in list(module.named_children()):
            if isinstance(linear, nn.Linear):
                sizes = linear.in_features, linear.out_features
                weights = bnb.nn.Linear4bit(*sizes, bias=False, quant_type="nf4", compute_dtype=torch.float32)
                weights.load_state_dict(linear.state_dict())
                setattr(module, name, weights)
    model.to("cpu")


@pytest.mark.parametrize("quantise", [torchao_int8, bitsandbytes_nf4])
def test_quantised_weights(llama_with, quantise):
    """The libraries are none of constraints.txt: torchao 0.18.0 and bitsandbytes 0.50.2 passed on 2026-11-30."""
    model = llama_with(layers=1)
    quantise(model)
    expected = tokens_of(model)
    attnpatch.patch(model, strict=True, cache="buffered")
    assert torch.equal(tokens_of(model), expected)
    assert fused(model) == (1, 0, [])


def test_while_another_thread_compiles(llama_with, monkeypatch):
    """torch says of the process that it compiles, not of a thread."""
    model = attnpatch.patch(llama_with(layers=1), strict=True)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with torch.no_grad():
        model(IDS)
    assert fused(model) == (1, 0, [])


def test_what_transformers_compiles_by_itself(llama_with):
    """With a static cache, as it does on a GPU: every call still runs the patch."""
    from transformers import CompileConfig

    config = CompileConfig(backend="eager", mode=None, fullgraph=False)
    config._compile_all_devices = True
    model = llama_with(layers=1)
    options = {"cache_implementation": "static", "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(IDS, **options)
    attnpatch.patch(model)
    assert torch.equal(model.generate(IDS, **options, compile_config=config), expected)
    (site,) = attnpatch.report(model).sites
    assert sum(d.calls for d in site.dispatches) == 6
