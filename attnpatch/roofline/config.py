"""A model's shape from the ``config.json`` of Hugging Face, read as it lies: no model is loaded.

What a config does not say is not guessed: the error names the key that settles it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnpatch.roofline.model import ModelShape, Weights

_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "windowed",
    "chunked_attention": "windowed",
    "linear_attention": "linear",
    "mamba": "linear",
    "recurrent": "linear",
    "conv": "linear",
}
"""Layer types of transformers' configs, by what the layers keep."""

_ALL_WINDOWED = ("mistral", "mixtral", "phi3", "starcoder2")
"""Families in which sliding_window, where it is set, is every layer's."""

_SAID_OTHERWISE = (
    "attention_chunk_size", "attention_types", "attention_window_size", "attn_layer_indices", "attn_layer_period",
    "attn_layers", "attn_type_list", "block_types", "full_attn_idxs", "hybrid_override_pattern", "layers_block_type",
    "sliding_window_size",
)  # fmt: skip
"""Keys by which single families say which layers differ; transformers writes layer_types for most of them."""

_NOT_COUNTED = {
    "kv_lora_rank": "its layers keep latents (MLA), not K and V",
    "index_n_heads": "its layers read keys that an indexer chooses",
    "num_kv_shared_layers": "some of its layers read the K/V of others",
    "per_layer_config": "its layers differ in heads or head_dim",
    "global_head_dim": "its full attention layers have another head_dim than the rest",
    "num_global_key_value_heads": "its full attention layers have another number of K/V heads than the rest",
    "num_attention_heads_per_layer": "its layers differ in heads",
    "cross_attention_layers": "some of its layers attend on pictures",
    "is_encoder_decoder": "it has an encoder",
}
"""Keys that, set, mean caches of another make than ``ModelShape`` has."""


_ADD_TYPES = "add layer_types to the config; AutoConfig.from_pretrained(...).save_pretrained(...) writes it"


def read_config(path: str | Path) -> dict[str, Any]:
    """The config of a folder or of a JSON file; of a model with other modalities, its ``text_config``.

    Raises:
        ValueError: there is no such file, or it holds no JSON object.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist; give the folder of a model or its config.json")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds {type(config).__name__}, not an object; give a model's config.json")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def shape_from_config(config: Mapping[str, Any], weights: Weights) -> ModelShape:
    """The shape of a config.

    Args:
        config: what ``read_config`` returns.
        weights: ``count_weights(config)``, or ``Weights.of_bytes``.

    Raises:
        ValueError: a size is missing or no number, the layers' kinds are unknown or not said, or the model keeps
            something else than K and V.
    """
    for key, reason in _NOT_COUNTED.items():
        if config.get(key):
            raise ValueError(
                f"{key} is {reprlib.repr(config[key])}: {reason}, which is not counted; count a like model by flags"
            )
    num_heads = _size(config, "num_attention_heads", "n_head")
    kinds = [_kind(name) for name in layer_types(config)]
    return ModelShape(
        full_layers=kinds.count("full"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=_head_dim(config, num_heads),
        weights=weights,
        windowed_layers=kinds.count("windowed"),
        window=_window(config) if "windowed" in kinds else 0,
        linear_layers=kinds.count("linear"),
    )


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, in transformers' words, from ``layer_types`` or the keys that stand for it.

    Raises:
        ValueError: the config has a window and does not say whose, or as many types as it has no layers.
    """
    layers = _size(config, "num_hidden_layers", "n_layer", "num_layers")
    if types := config.get("layer_types"):
        if len(types) != layers:
            raise ValueError(f"layer_types names {len(types)} layers of {layers}; correct one of the two")
        return list(types)
    if config.get("full_attention_interval"):
        return _every(_size(config, "full_attention_interval"), layers, "linear_attention")
    if said := next((key for key in _SAID_OTHERWISE if config.get(key) is not None), None):
        raise ValueError(f"{said} is set and layer_types is not; {_ADD_TYPES}")
    if not config.get("sliding_window") or not config.get("use_sliding_window", "max_window_layers" not in config):
        return ["full_attention"] * layers
    if config.get("sliding_window_pattern"):
        return _every(_size(config, "sliding_window_pattern"), layers, "sliding_attention")
    if (first := config.get("max_window_layers")) is not None:
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if config.get("model_type") in _ALL_WINDOWED:
        return ["sliding_attention"] * layers
    raise ValueError(f"sliding_window is {config['sliding_window']!r} and nothing says of which layers; {_ADD_TYPES}")


def _every(interval: int, layers: int, others: str) -> list[str]:
    """Full attention in the last layer of every ``interval``, as transformers' configs count."""
    return ["full_attention" if (layer + 1) % interval == 0 else others for layer in range(layers)]


def _kind(name: str) -> str:
    if name not in _KINDS:
        raise ValueError(f"layer type {name!r} is not counted; known are {', '.join(_KINDS)}")
    return _KINDS[name]


def _window(config: Mapping[str, Any]) -> int:
    return _size(config, "sliding_window", "attention_chunk_size")


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    """As many as query heads where the config knows no others."""
    if config.get("num_key_value_heads") is not None:
        return _size(config, "num_key_value_heads")
    if config.get("multi_query") or config.get("num_kv_heads"):
        raise ValueError("multi_query or num_kv_heads is set without num_key_value_heads; add it to the config")
    return num_heads


def _head_dim(config: Mapping[str, Any], num_heads: int) -> int:
    """The hidden size over the heads where the config does not say; K and V must agree."""
    if config.get("head_dim") or config.get("kv_channels"):
        head_dim = _size(config, "head_dim", "kv_channels")
    else:
        head_dim = _size(config, "hidden_size", "n_embd") // num_heads
    if config.get("v_head_dim", head_dim) != head_dim:
        raise ValueError(f"v_head_dim {config['v_head_dim']} is not head_dim {head_dim}, which is not counted")
    return head_dim


def _size(config: Mapping[str, Any], *keys: str) -> int:
    """The first of the keys that is there: a positive integer."""
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        raise ValueError(f"the config has no {' or '.join(keys)}; add it, or describe the model by flags")
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r} in the config; it must be an integer of at least 1")
    return value
