"""What caches do around a model's forward: its inputs by name, and masks as wide as the keys that come back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

FIRST_CAPACITY = 256
"""Tokens that a cache has room for at first: a short chat runs in the graphs of its first turn."""

NUMBERED_BY_MASK = ("opt",)
"""Models that take the positions of a call without ``position_ids`` from the mask, all of it behind what is stored."""


def decoder_config(config: Any, cache: str) -> Any:
    """The part of a model's config that is its decoder's.

    Raises:
        ValueError: a layer's keys are of something else than the tokens.
    """
    config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ValueError(f"{cache} is for decoders; {config.model_type} has an encoder whose keys do not grow")
    if getattr(config, "cross_attention_layers", None):
        raise ValueError(f"{cache} is for decoders; {config.model_type} has cross-attention, whose keys do not grow")
    return config


def inputs_of(arguments: dict[str, Any], cache: str) -> Tensor:
    """Ids or embeddings ``[batch, new, ..]`` among the arguments of a model's forward.

    Raises:
        ValueError: there are none.
    """
    inputs = [arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None]
    if not inputs:
        raise ValueError(f"a {cache} needs input_ids or inputs_embeds by name; got {', '.join(arguments)}")
    return inputs[0]


def takes_padded_keys(model: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether a forward may get more keys than are stored, which its mask hides, so that its graphs serve any length.

    Not a model that transformers runs on no static cache, nor one whose caller gets attention weights: their width is
    the number of keys. Nor one that counts positions up to the end of the mask.
    """
    config, given = getattr(model, "config", None), arguments.get("output_attentions")
    weights = getattr(config, "output_attentions", False) if given is None else given
    numbered = getattr(config, "model_type", "") in NUMBERED_BY_MASK and arguments.get("position_ids") is None
    return getattr(model, "_can_compile_fullgraph", True) and not weights and not numbered


def with_padded_mask(
    arguments: dict[str, Any], inputs: Tensor, length: int, capacity: int, other: Collection[str] = ()
) -> dict[str, Any]:
    """Arguments whose mask, made of ones where there is none, hides the keys from ``length`` to ``capacity``.

    Args:
        arguments: of the forward.
        inputs: what :func:`inputs_of` returns.
        length: keys stored when the forward ends.
        capacity: keys that the layers return.
        other: types of layers that return as many as they store, for masks given by type of layer.
    """
    mask = arguments.get("attention_mask")
    if mask is None:  # every key up to the capacity would count where transformers builds no mask
        mask = inputs.new_ones(inputs.shape[0], length, dtype=torch.int64)
    return {**arguments, "attention_mask": _padded(mask, capacity, other)}


def _padded(mask: Any, width: int, other: Collection[str]) -> Any:
    """A mask ``[..., keys]``, or one per type of layer, with hidden keys appended.

    1 and True show a key in two dimensions, 0.0 in more.
    """
    if not isinstance(mask, (Tensor, dict)):
        raise ValueError(
            f"attention_mask is a {type(mask).__name__}; this cache takes a tensor or a dict of them by type of layer"
        )
    if isinstance(mask, dict):
        return {kind: x if x is None or kind in other else _padded(x, width, ()) for kind, x in mask.items()}
    hidden = torch.finfo(mask.dtype).min if mask.dim() > 2 and mask.is_floating_point() else 0
    return pad(mask, (0, width - mask.shape[-1]), value=hidden)
