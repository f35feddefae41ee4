"""cache="auto", the default: a BufferedCache where it pays and fits, and not a word where it does not."""

import copy
import logging

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicCache, StaticCache

import attnpatch
from attnpatch.caches.buffered import BufferedCache
from attnpatch.caches.choosing import DeviceCacheChoice
from attnpatch.options import from_compile


@pytest.fixture
def on_gpu(monkeypatch):
    """The CPU counts as a device where the cache pays."""
    monkeypatch.setattr(DeviceCacheChoice, "device_type", "cpu")


@pytest.fixture
def model(model_with):
    return model_with(num_hidden_layers=1)


def cache_of(model, prompt, **arguments):
    return type(model(**prompt(), **arguments).past_key_values)


def test_on_a_gpu(on_gpu, model, run, prompt):
    expected = run(model, None)
    attnpatch.patch(model, cache="auto", strict=True)
    assert torch.equal(run(model, None), expected)
    with torch.no_grad():
        assert cache_of(model, prompt) is BufferedCache
        assert cache_of(model, prompt, past_key_values=DynamicCache(config=model.config)) is BufferedCache
        assert model(**prompt(), use_cache=False).past_key_values is None


def test_it_is_the_default(on_gpu, model, prompt):
    with torch.no_grad():
        with attnpatch.patched(model):
            assert cache_of(model, prompt) is BufferedCache
        with attnpatch.patched(model, cache=None):
            assert cache_of(model, prompt) is DynamicCache


def test_a_graph_brings_its_cache():
    assert from_compile(None, {}).cache is None
    assert from_compile(None, {"cache": None}).cache is None
    with pytest.raises(ValueError, match="cache='auto' is an option of"):
        from_compile(None, {"cache": "auto"})


def test_on_a_cpu_and_with_gradients(model, prompt, monkeypatch):
    attnpatch.patch(model, cache="auto", strict=True)
    with torch.no_grad():
        assert cache_of(model, prompt) is DynamicCache
    monkeypatch.setattr(DeviceCacheChoice, "device_type", "cpu")
    assert cache_of(model, prompt) is DynamicCache, "a later call's gradients reach its keys"


def test_other_kernels(on_gpu, model, prompt):
    """They have no use for keys with room behind; chosen anew at each call."""
    choice, arguments = DeviceCacheChoice(model), prompt()
    with torch.no_grad():
        model.config._attn_implementation = "flash_attention_2"
        assert choice(arguments) is arguments
        model.config._attn_implementation = "eager"
        assert type(choice(arguments)["past_key_values"]) is BufferedCache


def test_a_prompt_computed_once(on_gpu, model, prompt):
    """Copies of its cache go on apart, as in transformers' documentation."""
    ids, next_ids = prompt(9)["input_ids"], [prompt(n)["input_ids"] for n in (3, 1)]

    def logits():
        with torch.no_grad():
            past = model(ids, past_key_values=DynamicCache()).past_key_values
            return [model(x, past_key_values=copy.deepcopy(past)).logits for x in next_ids]

    expected = logits()
    attnpatch.patch(model, strict=True)
    torch.testing.assert_close(logits(), expected)


def test_other_caches_stay_without_a_word(on_gpu, model, prompt, caplog):
    attnpatch.patch(model, cache="auto", strict=True)
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=32)
        assert cache_of(model, prompt, past_key_values=cache) is StaticCache
    assert not [r for r in caplog.records if r.name == "attnpatch"]


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64, "pad_token_id": 0}
NO_USE = {
    "T5ForConditionalGeneration": ("T5", {"d_model": 32, "num_layers": 1, "num_heads": 2}, "has an encoder"),
    "BertModel": ("Bert", {**SMALL, "intermediate_size": 32}, "has none"),
    "MllamaForCausalLM": ("MllamaText", {**SMALL, "cross_attention_layers": [1]}, "has cross-attention"),
    "MambaForCausalLM": ("Mamba", SMALL, "take past_key_values"),
    "FalconH1ForCausalLM": ("FalconH1", SMALL, "has hybrid"),
    "XLNetLMHeadModel": ("XLNet", {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32}, "take past_key_values"),
    "BltForCausalLM": ("Blt", {}, "no attribute 'num_hidden_layers'"),
}


@pytest.mark.parametrize("name", NO_USE)
def test_models_that_it_is_not_for(on_gpu, name, caplog):
    """Left alone when they are patched: encoder-decoders, states, cross-attention, no cache, an unusual config."""
    import transformers

    family, config, why = NO_USE[name]
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**config))
    attnpatch.patch(model, cache="auto", log_level="debug")
    assert model._compiled_call_impl.choose_cache is None
    (line,) = messages(caplog)
    assert line.startswith(f'cache="auto" leaves {name} the caches it makes: ')
    assert why in line


def test_a_module_of_no_library():
    model = attnpatch.patch(nn.Linear(2, 2), cache="auto")
    assert model(torch.ones(2)).shape == (2,)


def messages(caplog):
    """What was said of caches: all of it is for those who debug."""
    records = [r for r in caplog.records if r.name == "attnpatch" and "cache" in r.getMessage()]
    assert {r.levelno for r in records} <= {logging.DEBUG}
    return [r.getMessage() for r in records]


class Prefixed(LlamaForCausalLM):
    """Stores two tokens of its own before the first that it is given, as with soft prompts and images."""

    def forward(self, input_ids, past_key_values=None, **kwargs):
        embeds = self.model.embed_tokens(input_ids)
        if past_key_values is None or not past_key_values.get_seq_length():
            embeds = torch.cat([embeds[:, :2], embeds], dim=1)
        return super().forward(inputs_embeds=embeds, past_key_values=past_key_values)


class Summed(LlamaForCausalLM):
    """Makes one sequence of keys of two of ids, as MusicGen of its codebooks."""

    def forward(self, input_ids, past_key_values=None, **kwargs):
        embeds = self.model.embed_tokens(input_ids).sum(0, keepdim=True)
        return super().forward(inputs_embeds=embeds, past_key_values=past_key_values)


@pytest.mark.parametrize(
    ("kind", "given", "why"),
    [
        pytest.param(Prefixed, True, "was given 9 tokens and stored 11", id="cache of the caller"),
        pytest.param(Prefixed, False, "was given 9 tokens and stored 11", id="no cache"),
        pytest.param(Summed, True, "the cache holds 9 tokens of 1 sequences and was given 2", id="known later"),
    ],
)
def test_a_model_whose_tokens_are_not_its_inputs(on_gpu, model, prompt, caplog, kind, why, given):
    """The call is done again without the cache; whoever holds the caller's has a DynamicCache of all tokens."""
    model = kind(model.config).eval()

    def logits():
        ids, cache = prompt(9)["input_ids"], DynamicCache(config=model.config) if given else None
        with torch.no_grad():
            first = model(ids, past_key_values=cache)
            last = model(ids[:, :1], past_key_values=first.past_key_values)
        assert given is (first.past_key_values is cache)
        assert type(last.past_key_values) is DynamicCache
        return first.logits, last.logits, last.past_key_values.layers[0].keys

    expected = [logits(), logits()]
    attnpatch.patch(model, cache="auto", strict=True, log_level="debug")
    with caplog.at_level(logging.DEBUG, "attnpatch"):
        torch.testing.assert_close([logits(), logits()], expected)
    (line,) = messages(caplog)
    assert why in line


def test_what_others_raise_is_raised(on_gpu, model, prompt):
    """The model's own complaint comes through, and the next call gets its cache."""
    attnpatch.patch(model, cache="auto")
    with torch.no_grad():
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model(**prompt(), inputs_embeds=torch.zeros(2, 9, 64))
        assert cache_of(model, prompt) is BufferedCache


def test_a_failure_that_cannot_be_undone(on_gpu, model_with):
    """A layer with a window may have stored tokens of the forward that failed."""
    choice = DeviceCacheChoice(model_with("Gemma2", sliding_window=4))
    arguments, seen = {"input_ids": torch.ones(1, 1, dtype=torch.int64)}, []

    def forward(past_key_values, **_):
        seen.append(past_key_values)
        past_key_values.tokens.length = 3
        raise ValueError("no")

    with torch.no_grad(), pytest.raises(ValueError, match="no"):
        choice.run(forward, arguments)
    assert [type(x) for x in seen] == [BufferedCache]
    assert choice.fits


def test_soft_prompts(on_gpu, model, prompt):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(model, config).eval()

    def outputs():
        with torch.no_grad():
            logits = model(**prompt()).logits
            return logits, model.generate(**prompt(), max_new_tokens=4, do_sample=False)

    expected = outputs()
    attnpatch.patch(model, cache="auto", strict=True)
    torch.testing.assert_close(outputs(), expected)


def test_positional_inputs_of_a_wrapper(on_gpu, model, prompt):
    """PEFT's takes ``*args``, and hands them on."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    inputs = prompt()
    with torch.no_grad():
        expected = model(*inputs.values()).logits
        output = attnpatch.patch(model, strict=True)(*inputs.values())
    torch.testing.assert_close(output.logits, expected)
    assert type(output.past_key_values) is BufferedCache
