"""Shapes and weights read from configs, against transformers where it has an opinion."""

import json
from pathlib import Path

import pytest

from attnpatch.roofline import Weights, count_weights, read_config, shape_from_config
from attnpatch.roofline.config import layer_types

NONE = Weights.of_bytes(0)
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 50, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_LAYER = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64
MOE = LLAMA | {
    "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip


def test_a_plain_config():
    shape = shape_from_config(LLAMA, NONE)
    assert (shape.full_layers, shape.windowed_layers, shape.linear_layers) == (3, 0, 0)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 16)
    assert shape_from_config(LLAMA | {"head_dim": 40}, NONE).head_dim == 40


def test_the_names_of_gpt2():
    shape = shape_from_config({"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32}, NONE)
    assert (shape.full_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 4, 4, 8)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "num_hidden_layers": 3, "sliding_window": 8},
        {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 8, "max_window_layers": 3},
        {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 8, "max_window_layers": 3,
         "use_sliding_window": True},
        {"model_type": "qwen3", "num_hidden_layers": 2, "sliding_window": None},
        {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 8, "sliding_window_pattern": 3},
        {"model_type": "qwen3_next", "num_hidden_layers": 9, "full_attention_interval": 4},
        {"model_type": "gpt_oss", "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
         "sliding_window": 8},
    ],
    ids=lambda config: "-".join(str(value) for value in config.values() if not isinstance(value, list)),
)  # fmt: skip
def test_layers_are_those_that_transformers_makes(config: dict):
    transformers = pytest.importorskip("transformers")
    values = dict(config)
    theirs = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    expected = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    assert layer_types(config) == list(expected)


def test_layers_of_each_kind_are_counted_and_said():
    types = ["linear_attention", "sliding_attention", "full_attention", "sliding_attention", "mamba", "conv"]
    shape = shape_from_config(LLAMA | {"num_hidden_layers": 6, "layer_types": types, "sliding_window": 1024}, NONE)
    assert (shape.full_layers, shape.windowed_layers, shape.linear_layers, shape.window) == (1, 2, 3, 1024)
    said = "1 full attention, 2 windowed (at most 1,024 keys), 3 without K/V (linear)"
    assert shape.describe_layers() == said


def test_chunks_are_windows():
    types = ["chunked_attention", "full_attention", "chunked_attention"]
    assert shape_from_config(LLAMA | {"layer_types": types, "attention_chunk_size": 8}, NONE).window == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 512}, r"kv_lora_rank is 512: its layers keep latents \(MLA\)"),
        ({"num_kv_shared_layers": 2}, "read the K/V of others"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "its layers differ in heads or head_dim"),
        ({"layer_types": ["hybrid"] * 3}, "layer type 'hybrid' is not counted; known are full_attention"),
        ({"layer_types": ["full_attention"] * 2}, "names 2 layers of 3"),
        ({"layer_types": ["sliding_attention"] * 3}, "no sliding_window or attention_chunk_size; add it"),
        ({"sliding_window": 8}, "sliding_window is 8 and nothing says of which layers; add layer_types"),
        ({"sliding_window": 8, "sliding_window_pattern": "LLG"}, "sliding_window_pattern is 'LLG'"),
        ({"attn_layer_period": 8}, "attn_layer_period is set and layer_types is not; add layer_types"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4' in the config; it must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 in the config"),
        ({"num_attention_heads": None}, "no num_attention_heads or n_head; add it"),
        ({"num_key_value_heads": None, "multi_query": True}, "without num_key_value_heads; add it"),
        ({"v_head_dim": 8}, "v_head_dim 8 is not head_dim 16"),
    ],
)
def test_what_is_not_said_or_not_counted_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        shape_from_config(LLAMA | changes, NONE)


def test_a_shared_count_of_zero_is_no_reason():
    assert shape_from_config(LLAMA | {"num_kv_shared_layers": 0, "is_encoder_decoder": False}, NONE).full_layers == 3


def test_files(tmp_path: Path):
    file = tmp_path / "config.json"
    with pytest.raises(ValueError, match="does not exist; give the folder"):
        read_config(tmp_path)
    file.write_text(json.dumps({"text_config": LLAMA, "vision_config": {}}))
    assert read_config(tmp_path) == read_config(file) == LLAMA
    for text, message in (("{", "is no JSON"), ("[]", "holds list, not an object")):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(file)


class TestWeights:
    """Counted on transformers' modules."""

    @pytest.fixture(autouse=True)
    def _transformers(self) -> None:
        pytest.importorskip("transformers")

    def test_of_a_llama(self):
        weights = count_weights(LLAMA | {"dtype": "float32"})
        assert (weights.body, weights.head, weights.experts) == (3 * LLAMA_LAYER + 64, 50 * 64, 0)
        assert weights.read_bytes(7) == 4 * (3 * LLAMA_LAYER + 64 + 50 * 64)

    def test_a_tied_head_is_read(self):
        assert count_weights(LLAMA | {"tie_word_embeddings": True}) == count_weights(LLAMA)

    def test_of_a_mixture(self):
        weights = count_weights(MOE)
        assert weights.experts == 3 * 8 * 3 * 64 * 24
        assert weights.active_share == 2 / 8
        assert "2 of 8 routed experts per token" in weights.source
        attention = 64 * 64 * 2 + 64 * 32 * 2 + 2 * 16
        assert weights.body == 3 * (attention + 64 * 8 + 2 * 64) + 64

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config is set"),
            (LLAMA | {"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not one of"),
            (LLAMA | {"model_type": "no_such"}, "transformers cannot build this 'no_such'"),
            ({key: MOE[key] for key in MOE if key != "num_experts_per_tok"}, "without num_experts or num_experts_per_"),
            (LLAMA | {"num_local_experts": 4}, "4 experts, and no module called experts"),
        ],
    )
    def test_what_cannot_be_counted_asks_for_bytes(self, config: dict, message: str):
        with pytest.raises(ValueError, match=f"{message}.*give --weight-bytes"):
            count_weights(config)
