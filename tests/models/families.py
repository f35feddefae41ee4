"""Tiny random models of Hugging Face families, each with every kind of attention layer that the family has."""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.models import runs

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
    "initializer_range": 0.3,  # ten times the usual: scores far from uniform
}


class Family(NamedTuple):
    """A model of ``transformers.models.<package>`` and the fields of its config that differ from BASE."""

    package: str
    model: str
    config: dict = {}  # noqa: RUF012  (never written)
    inputs: Callable | None = None  # by default after the name of the model's main input

    @property
    def model_class(self):
        module = importlib.import_module(f"transformers.models.{self.package}.modeling_{self.package}")
        return getattr(module, self.model)

    @property
    def implementations(self):
        return ["eager", "sdpa"] if self.model_class._supports_sdpa else ["eager"]

    def build(self, attn_implementation):
        torch.manual_seed(0)
        config = self.model_class.config_class(**{**BASE, **self.config})
        experts = "batched_mm"  # the default, a grouped product, takes no float64
        build = self.model_class._from_config
        return build(config, attn_implementation=attn_implementation, experts_implementation=experts).eval()


GQA = {"num_key_value_heads": 2}
WIDE = {**GQA, "head_dim": 16}
TWO = {"num_hidden_layers": 2}
SLIDING = {**TWO, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
IMAGE = {"image_size": 24, "patch_size": 8}
VISION = {k: BASE[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")} | IMAGE
BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 11, "max_target_positions": 32}
WAVES = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 5),
    "conv_kernel": (10, 5),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,
}

DECODERS = {
    "llama": Family("llama", "LlamaForCausalLM", {**GQA, **TWO}),
    "llama_mha": Family("llama", "LlamaForCausalLM"),
    "llama_mqa": Family("llama", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    "mistral": Family("mistral", "MistralForCausalLM", {**GQA, "sliding_window": 5}),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", {**GQA, **SLIDING, "use_sliding_window": True}),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", WIDE),
    "gemma": Family("gemma", "GemmaForCausalLM", WIDE),
    "gemma2": Family(
        "gemma2", "Gemma2ForCausalLM", {**WIDE, **SLIDING, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}
    ),
    "gemma3_text": Family("gemma3", "Gemma3ForCausalLM", {**WIDE, **SLIDING}),
    "gemma3n_text": Family(
        "gemma3n",
        "Gemma3nForCausalLM",
        {
            **WIDE,
            **SLIDING,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": None,
        },
    ),
    "phi": Family("phi", "PhiForCausalLM"),
    "phi3": Family("phi3", "Phi3ForCausalLM", GQA),
    "cohere": Family("cohere", "CohereForCausalLM", GQA),
    "cohere2": Family("cohere2", "Cohere2ForCausalLM", {**GQA, **SLIDING}),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", GQA),
    "granite": Family("granite", "GraniteForCausalLM", {**GQA, "attention_multiplier": 0.3}),
    "granite_swa": Family("granite_swa", "GraniteSWAForCausalLM", {**GQA, **SLIDING}),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", {**GQA, **TWO, "no_rope_layers": [1, 0]}),
    "mixtral": Family("mixtral", "MixtralForCausalLM", {**GQA, **EXPERTS}),
    "starcoder2": Family("starcoder2", "Starcoder2ForCausalLM", {**GQA, "sliding_window": 5}),
    "nemotron": Family("nemotron", "NemotronForCausalLM", GQA),
    "helium": Family("helium", "HeliumForCausalLM", {**GQA, "head_dim": 8}),
    "llama4_text": Family(
        "llama4",
        "Llama4ForCausalLM",
        {
            **WIDE,
            **TWO,
            **EXPERTS,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 5,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
    ),
    "doge": Family("doge", "DogeForCausalLM", GQA),
    "qwen3_next": Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {
            **WIDE,
            **TWO,
            **EXPERTS,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "gpt_oss": Family("gpt_oss", "GptOssForCausalLM", {**GQA, **SLIDING, **EXPERTS, "head_dim": 8}),
    "mimo_v2_flash": Family(
        "mimo_v2_flash", "MiMoV2FlashForCausalLM", {**GQA, **SLIDING, **EXPERTS, "head_dim": 16, "v_head_dim": 12}
    ),
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3ForCausalLM", MLA),
    "gpt2": Family("gpt2", "GPT2LMHeadModel", GPT2),
    "gpt_bigcode": Family("gpt_bigcode", "GPTBigCodeForCausalLM", GPT2),
    "gpt_neox": Family("gpt_neox", "GPTNeoXForCausalLM"),
    "gptj": Family("gptj", "GPTJForCausalLM", {**GPT2, "rotary_dim": 4}),
    "gpt_neo": Family(
        "gpt_neo",
        "GPTNeoForCausalLM",
        {**TWO, "attention_types": [[["global", "local"], 1]], "window_size": 5},
    ),
    "opt": Family("opt", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": Family("bloom", "BloomForCausalLM", {"n_layer": 1, "n_head": 4}),
    "mpt": Family("mpt", "MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64}),
    "falcon_rotary": Family("falcon", "FalconForCausalLM", {"alibi": False}),
    "falcon_new": Family(
        "falcon", "FalconForCausalLM", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "falcon_alibi": Family("falcon", "FalconForCausalLM", {"alibi": True, "multi_query": False}),
    "persimmon": Family("persimmon", "PersimmonForCausalLM"),
    "biogpt": Family("biogpt", "BioGptForCausalLM"),
    "modernbert_decoder": Family(
        "modernbert_decoder", "ModernBertDecoderForCausalLM", {**SLIDING, "local_attention": 10}
    ),
}

ENCODER_DECODERS = {
    "bart": Family("bart", "BartForConditionalGeneration", BART),
    "t5": Family("t5", "T5ForConditionalGeneration", T5),
    "whisper": Family("whisper", "WhisperForConditionalGeneration", {**BART, **SPEECH}),
}

ENCODERS = {
    "bert": Family("bert", "BertModel"),
    "roberta": Family("roberta", "RobertaModel"),
    "distilbert": Family("distilbert", "DistilBertModel", {"dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48}),
    "modernbert": Family(
        "modernbert",
        "ModernBertModel",
        {**TWO, "local_attention": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "roformer": Family("roformer", "RoFormerModel"),
    "deberta_v2": Family(
        "deberta_v2",
        "DebertaV2Model",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    ),
    "clip_text": Family("clip", "CLIPTextModel"),
}

WITH_IMAGES = {
    "vit": Family("vit", "ViTModel", IMAGE),
    "clip_vision": Family("clip", "CLIPVisionModel", IMAGE),
    "siglip_vision": Family("siglip", "SiglipVisionModel", IMAGE),
    "dinov2": Family("dinov2", "Dinov2Model", IMAGE),
    "swin": Family(
        "swin",
        "SwinModel",
        {**IMAGE, "patch_size": 4, "embed_dim": 16, "depths": [2], "num_attention_heads": [2], "window_size": 3},
    ),
    "sam_vision": Family(
        "sam",
        "SamVisionModel",
        {**IMAGE, **TWO, "output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48},
    ),
    "paligemma": Family(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        {
            "image_token_index": 60,
            "projection_dim": 32,
            "text_config": {"model_type": "gemma", **BASE, **WIDE},
            "vision_config": {"model_type": "siglip_vision_model", **VISION, "projection_dim": 32},
        },
        runs.prefix,
    ),
    "gemma3": Family(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {
            "image_token_index": 60,
            "mm_tokens_per_image": 9,
            "text_config": {**BASE, **WIDE, **SLIDING},
            "vision_config": VISION,
        },
        runs.image_block,
    ),
}

# What the rules do with families that they were not written for.
OTHERS = {
    "olmo": Family("olmo", "OlmoForCausalLM", GQA),
    "olmo3": Family("olmo3", "Olmo3ForCausalLM", {**GQA, **SLIDING}),
    "glm4": Family("glm4", "Glm4ForCausalLM", WIDE),
    "exaone4": Family("exaone4", "Exaone4ForCausalLM", {**GQA, **SLIDING}),
    "stablelm": Family("stablelm", "StableLmForCausalLM", GQA),
    "codegen": Family("codegen", "CodeGenForCausalLM", {**GPT2, "rotary_dim": 4}),
    "xglm": Family("xglm", "XGLMForCausalLM", {"d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 48}),
    "ernie4_5": Family("ernie4_5", "Ernie4_5ForCausalLM", WIDE),
    "hunyuan": Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", WIDE),
    "seed_oss": Family("seed_oss", "SeedOssForCausalLM", WIDE),
    "musicgen_decoder": Family(
        "musicgen", "MusicgenForCausalLM", {"num_codebooks": 1, "ffn_dim": 48, "num_attention_heads": 4}
    ),
    "mbart": Family("mbart", "MBartForConditionalGeneration", BART),
    "pegasus": Family("pegasus", "PegasusForConditionalGeneration", BART),
    "mt5": Family("mt5", "MT5ForConditionalGeneration", T5),
    "longt5": Family("longt5", "LongT5ForConditionalGeneration", {**T5, "local_radius": 4}),
    "led": Family("led", "LEDForConditionalGeneration", {**BART, "attention_window": 4}),
    "electra": Family("electra", "ElectraModel", {"embedding_size": 32}),
    "albert": Family("albert", "AlbertModel", {"embedding_size": 32}),
    "xlm_roberta": Family("xlm_roberta", "XLMRobertaModel"),
    "esm": Family("esm", "EsmModel", {"position_embedding_type": "rotary"}),
    "longformer": Family("longformer", "LongformerModel", {"attention_window": 4}),
    "big_bird": Family("big_bird", "BigBirdModel", {"block_size": 1, "num_random_blocks": 1}),
    "blip_text": Family("blip", "BlipTextModel", {"encoder_hidden_size": 32}),
    "deit": Family("deit", "DeiTModel", IMAGE),
    "beit": Family("beit", "BeitModel", {**IMAGE, "use_relative_position_bias": True}),
    "dpt": Family("dpt", "DPTModel", {**IMAGE, "backbone_out_indices": [0], "neck_hidden_sizes": [16]}),
    "wav2vec2": Family("wav2vec2", "Wav2Vec2Model", WAVES),
}

FAMILIES = {**DECODERS, **ENCODER_DECODERS, **ENCODERS, **WITH_IMAGES, **OTHERS}
