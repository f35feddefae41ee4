"""Tiny random models of Hugging Face families: every attention fused, and the same logits, prefill and decode."""

import importlib
from typing import NamedTuple

import pytest
import torch
from torch import nn

import attnpatch
from attnpatch.testing.tolerance import assert_same_function, run_float64

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {"num_key_value_heads": 2}
SLIDING = ["sliding_attention", "full_attention"]


class Family(NamedTuple):
    """A model of ``transformers.models.<package>`` and the fields of its config that differ from BASE.

    ``masks`` are the words with which the masks of its sites must begin, in order of layers.
    """

    package: str
    model: str
    masks: list[str]
    config: dict = {}  # noqa: RUF012  (never written)
    config_class: str | None = None
    sdpa_masks: list[str] | None = None

    def build(self, attn_implementation):
        module = f"transformers.models.{self.package}"
        name = self.config_class or f"{self.model.removesuffix('ForCausalLM').removesuffix('Model')}Config"
        config = getattr(importlib.import_module(f"{module}.configuration_{self.package}"), name)
        model = getattr(importlib.import_module(f"{module}.modeling_{self.package}"), self.model)
        torch.manual_seed(0)
        config = config(**{**BASE, **self.config})
        return model._from_config(config, attn_implementation=attn_implementation).eval()


CAUSAL = ["causal, padding"]
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}

DECODERS = {
    "llama_mha": Family("llama", "LlamaForCausalLM", CAUSAL),
    "llama_gqa": Family("llama", "LlamaForCausalLM", CAUSAL * 2, {**GQA, "num_hidden_layers": 2}),
    "llama_mqa": Family("llama", "LlamaForCausalLM", CAUSAL, {"num_key_value_heads": 1}),
    "mistral": Family("mistral", "MistralForCausalLM", ["causal, window 5, padding"], {**GQA, "sliding_window": 5}),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", CAUSAL, GQA),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", CAUSAL, {**GQA, "head_dim": 16}),
    "phi3": Family("phi3", "Phi3ForCausalLM", CAUSAL, GQA),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        ["causal, window 5, padding", "causal, padding"],
        {
            **GQA,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3_text": Family(
        "gemma3",
        "Gemma3ForCausalLM",
        ["causal, window 5, padding", "causal, padding"],
        {**GQA, "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 5, "layer_types": SLIDING},
        "Gemma3TextConfig",
    ),
    "starcoder2": Family("starcoder2", "Starcoder2ForCausalLM", CAUSAL, GQA),
    "gpt_neox": Family("gpt_neox", "GPTNeoXForCausalLM", CAUSAL),
    "granite": Family("granite", "GraniteForCausalLM", CAUSAL, {**GQA, "attention_multiplier": 0.3}),
    "gpt2": Family("gpt2", "GPT2LMHeadModel", CAUSAL, GPT2, "GPT2Config"),
    "opt": Family("opt", "OPTForCausalLM", CAUSAL, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": Family("falcon", "FalconForCausalLM", CAUSAL, {"alibi": False}),
    "deepseek_v3": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        CAUSAL,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "first_k_dense_replace": 2,
        },
    ),
}

EAGER_ONLY = {
    "gptj": Family("gptj", "GPTJForCausalLM", CAUSAL, {**GPT2, "rotary_dim": 4}),
    "mpt": Family(
        "mpt",
        "MptForCausalLM",
        ["causal, padding, streamed bias"],
        {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64},
    ),
}

VISION = {"image_size": 16, "patch_size": 8}

ENCODERS = {
    "bert": Family("bert", "BertModel", ["padding"]),
    "vit": Family("vit", "ViTModel", ["none"], VISION, "ViTConfig"),
    "t5": Family(
        "t5",
        "T5EncoderModel",
        ["padding, streamed bias"],
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
        "T5Config",
        ["streamed bias"],  # the bias joins the mask before the call
    ),
}

REFUSED = {
    "bloom": (Family("bloom", "BloomForCausalLM", [], {"n_layer": 1, "n_head": 4}), "view reads the attention"),
    "falcon_alibi": (
        Family("falcon", "FalconForCausalLM", [], {"alibi": True, "multi_query": False}),
        "view reads the attention",
    ),
    "granite_swa": (Family("granite_swa", "GraniteSWAForCausalLM", [], GQA), "scores are also read by logsumexp"),
    "deberta_v2": (
        Family("deberta_v2", "DebertaV2Model", [], {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
        "view reads the attention",
    ),
    "gpt_oss": (
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            [],
            {
                **GQA,
                "head_dim": 8,
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "num_hidden_layers": 2,
                "layer_types": SLIDING,
            },
        ),
        "getitem reads the attention probabilities",
    ),
}


class PrefillThenDecode(nn.Module):
    """Logits of a prompt and of one more token on the cache that the model made."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask, token):
        prefill = self.model(input_ids=ids, attention_mask=mask, use_cache=True)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        decode = self.model(input_ids=token, attention_mask=mask, past_key_values=prefill.past_key_values)
        return torch.cat([prefill.logits, decode.logits], dim=1)


class Encode(nn.Module):
    """Last hidden state of an encoder."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, mask):
        inputs = {self.model.main_input_name: x, **({} if mask is None else {"attention_mask": mask})}
        return self.model(**inputs).last_hidden_state


def check(family, run, *args, rows):
    """Strictly patched, ``run`` is the same function, and each layer's site has the masks it should."""
    with torch.no_grad():
        original, y64 = run(*args), run_float64(run, *args)
        attnpatch.patch(run.model, strict=True)
        y = run(*args)
    assert_same_function(y, original, y64, rows)
    report = attnpatch.report(run.model)
    assert (report.summary["refused"], report.gaps) == (0, [])
    assert len(report.sites) == len(family.masks)
    for site, words in zip(report.sites, family.masks, strict=True):
        assert all(mask.startswith(words) for mask in site.mask.split(" | ")), site
        assert sum(d.calls for d in site.dispatches) == report.summary["graphs"]


def check_decoder(family, attn_implementation):
    """Left padding in one of two sequences of 12, then one token; rows of pads see no key and are not compared."""
    model = family.build(attn_implementation)
    ids, token = torch.randint(3, 60, (2, 12)), torch.randint(3, 60, (2, 1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    rows = torch.cat([mask, torch.ones_like(token)], dim=1).bool()
    check(family, PrefillThenDecode(model), ids, mask, token, rows=rows)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", DECODERS.values(), ids=DECODERS)
def test_decoder(family, attn_implementation):
    check_decoder(family, attn_implementation)


@pytest.mark.parametrize("family", EAGER_ONLY.values(), ids=EAGER_ONLY)
def test_decoder_without_the_attention_interface(family):
    check_decoder(family, "eager")


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ENCODERS.values(), ids=ENCODERS)
def test_encoder(family, attn_implementation):
    """Right padding in one of two sequences, or two images."""
    model = family.build(attn_implementation)
    if attn_implementation == "sdpa" and family.sdpa_masks:
        family = family._replace(masks=family.sdpa_masks)
    if "image_size" in family.config:
        check(family, Encode(model), torch.randn(2, 3, 16, 16), None, rows=None)
    else:
        ids = torch.randint(3, 60, (2, 12))
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        check(family, Encode(model), ids, mask, rows=mask.bool())


@pytest.mark.parametrize(("family", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_family(family, reason):
    """Left as it was, bit for bit, and the report says why."""
    model, ids = family.build("eager"), torch.randint(3, 60, (2, 12))

    def run():
        return model(input_ids=ids)[0]

    with torch.no_grad():
        original = run()
        attnpatch.patch(model)
        assert torch.equal(run(), original)
    report = attnpatch.report(model)
    assert [site.status for site in report.sites] == ["refused"] * model.config.num_hidden_layers
    for site in report.sites:
        assert reason in site.reason


def test_llama_in_a_half_precision_with_its_own_causal_mask():
    """A 4-D mask from the caller passes through the model untouched and is streamed."""
    model = DECODERS["llama_gqa"].build("eager").to(torch.bfloat16)
    ids, mask = torch.randint(3, 60, (2, 12)), torch.full((2, 1, 12, 12), torch.finfo(torch.bfloat16).min)
    mask = mask.triu(1).to(torch.bfloat16)
    with torch.no_grad():
        original, y64 = model(ids, attention_mask=mask).logits, run_float64(model, ids, attention_mask=mask).logits
        attnpatch.patch(model, strict=True)
        assert_same_function(model(ids, attention_mask=mask).logits, original, y64)
    assert attnpatch.report(model).sites[0].mask == "streamed bias [2, 1, 12, 12]"


def test_packed_sequences():
    """Position ids that restart: without a cache the model builds a mask of documents."""
    model = DECODERS["llama_gqa"].build("eager")
    ids, positions = torch.randint(3, 60, (1, 12)), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    kwargs = {"position_ids": positions, "use_cache": False}
    with torch.no_grad():
        original, y64 = model(ids, **kwargs).logits, run_float64(model, ids, **kwargs).logits
        assert not torch.allclose(original[0, -1], model(ids, use_cache=False).logits[0, -1])
        attnpatch.patch(model, strict=True)
        assert_same_function(model(ids, **kwargs).logits, original, y64)
