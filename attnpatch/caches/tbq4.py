"""A transformers cache whose keys and values are kept in 4 bits, see :mod:`attnpatch.tbq4`.

Buffers grow on the host before a forward, never inside a graph: a compiled forward sees buffers of one capacity and
the number of tokens stored, on the device. It compiles again only when the capacity changes, which doubles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, get_layer_types_and_kwargs

from attnpatch.caches.forward import inputs_of, takes_padded_keys, with_padded_mask
from attnpatch.caches.packed import KEYS, VALUES, PackedLayer, Tokens

BOUNDED = ("sliding_attention", "chunked_attention")
"""Layers that keep a window of tokens, dense, as transformers does."""

WITHOUT_KEYS = ("linear_attention", "conv", "moe", "mlp")
"""Layers without keys and values, left to transformers."""


class TBQ4Cache(Cache):
    """Keys and values of full attention layers in 4 bits, of layers with a window dense, as transformers keeps them.

    Use it like transformers' own caches: ``model.generate(**inputs, past_key_values=cache)``, or let every call make
    one, ``attnpatch.patch(model, cache="tbq4")``. Models that are not patched get keys and values multiplied out. A
    first forward, and one of more than 64 tokens, attends on its own keys and values as they were; a shorter one on
    what is stored of them. Gradients reach the tokens of the same forward, which then also are as they were, not those
    stored before. Compiled by other means than :func:`attnpatch.patch`, a forward breaks its graph at each layer.

    Args:
        model: a decoder of transformers, or its config.
        max_cache_len: tokens that there is room for from the start, and not more; None = room for 256, which doubles.
        keys: how K is kept: "tbq4", "int8" with a scale per token and head, or "dense".
        values: how V is kept: "tbq4" or "dense".
        skip_layers: layers that stay dense: indices, negative ones from the end, "first" and "last" of full attention.
        centre_keys: K is kept as its difference to its mean over the tokens of the first forward, per sequence and
            head: many models' K has a large constant part. The mean is added when K is read, or left out where a
            softmax forgets it. None = where K is not dense.

    Raises:
        ValueError: a value is not allowed, or the model has no full attention layers, or layers of another kind.
    """

    def __init__(
        self,
        model: Any,
        max_cache_len: int | None = None,
        *,
        keys: str = "tbq4",
        values: str = "tbq4",
        skip_layers: Sequence[int | str] = (),
        centre_keys: bool | None = None,
    ) -> None:
        _check_choice("keys", keys, KEYS)
        _check_choice("values", values, VALUES)
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"max_cache_len={max_cache_len} is no number of tokens; None lets the cache grow")
        if centre_keys and keys == "dense":
            raise ValueError('centre_keys=True needs keys="tbq4" or "int8": dense keys are kept as they are')
        self.tokens = Tokens(max_cache_len)
        self.layer_types, self.layer_arguments = _layer_types(getattr(model, "config", model))
        self.packed = [i for i, kind in enumerate(self.layer_types) if kind == "full_attention"]
        self.choice = keys, values, keys != "dense" if centre_keys is None else centre_keys
        self.dense = _skipped(skip_layers, self.packed, len(self.layer_types))
        super().__init__(layers=self._empty_layers())

    def _empty_layers(self) -> list[Any]:
        return [self._empty_layer(i, kind) for i, kind in enumerate(self.layer_types)]

    def _empty_layer(self, index: int, kind: str) -> Any:
        if kind != "full_attention":
            return DYNAMIC_LAYER_TYPE_MAPPING[kind](**self.layer_arguments)
        choice = ("dense", "dense", False) if index in self.dense else self.choice
        return PackedLayer(index, self.tokens, *choice)

    @classmethod
    def take_over(cls, cache: Cache, model: nn.Module) -> None:
        """Turn an empty cache of the model into a TBQ4Cache, for everyone who holds it."""
        recording = any(getattr(layer, "record_past", False) for layer in cache.layers)
        cache.__class__ = cls
        cls.__init__(cache, model)
        if recording:
            cache.activate_past_recording()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of all layers, room for tokens to come included."""
        tensors = (x for layer in self.layers for x in tree_iter(vars(layer)) if isinstance(x, Tensor))
        return sum(x.numel() * x.element_size() for x in tensors)

    @property
    def batch_size(self) -> int:
        """Sequences held; -1 if none is."""
        keys = self.layers[self.packed[0]].keys
        return -1 if keys is None else keys.shape[0]

    def before_forward(self, model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Make room for a forward of the model, and fit its mask to what :meth:`update` will return.

        Args:
            model: a model that transformers does not run on a static cache gets keys of their true length, and so a
                graph that depends on it; so does one that returns its attention weights.
            arguments: of the model's forward, by name.

        Returns:
            The arguments to call the model with.

        Raises:
            ValueError: the cache holds another number of sequences, or has no room, or ``arguments`` name no input.
        """
        inputs, tokens = inputs_of(arguments, "TBQ4Cache"), self.tokens
        self._begin(inputs.shape[0], inputs.shape[1], inputs.device)
        tokens.hooked = True
        tokens.padded = not tokens.first and takes_padded_keys(model, arguments)
        if not tokens.padded:
            return arguments
        arguments = with_padded_mask(arguments, inputs, tokens.length + tokens.new, tokens.capacity, BOUNDED)
        mask = arguments["attention_mask"]
        if isinstance(mask, Tensor) and tokens.capacity == tokens.first_capacity:
            torch._dynamo.mark_static(mask, mask.dim() - 1)  # not a symbol, though the first forward's was narrower
        return arguments

    def after_forward(self, stored: bool) -> None:
        """End what :meth:`before_forward` began; ``stored`` says whether the model ran to its end."""
        self.tokens.hooked = self.tokens.padded = False
        if stored:
            self._commit()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, and return those of the whole sequence.

        Args:
            key_states: ``[batch, num_kv_heads, new, head_dim]``.
            value_states: ``[batch, num_kv_heads, new, head_dim_v]``.
            layer_idx: which layer; a forward visits them in order.
            *args: ignored, like what other caches take.
            **kwargs: likewise.

        Returns:
            Keys and values ``[batch, num_kv_heads, length, head_dim]``. In a patched model they have the buffers' full
            capacity, and the mask hides what is not stored; of a first forward they are its own.

        Raises:
            ValueError: heads, dtype, device or batch are not the cache's, or it has no room, or a head_dim is no
                multiple of 8.
        """
        if self.tokens.hooked or layer_idx not in self.packed:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self._update_alone(key_states, value_states, layer_idx)

    @torch.compiler.disable(reason="a TBQ4Cache grows outside of graphs: use attnpatch.patch(model)")
    def _update_alone(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if layer_idx == self.packed[0]:
            self._begin(key_states.shape[0], key_states.shape[2], key_states.device)
        keys, values = self.layers[layer_idx].update(key_states, value_states)
        if layer_idx == self.packed[-1]:
            self._commit()
        return keys, values

    def _begin(self, batch: int, new: int, device: torch.device) -> None:
        tokens, layers = self.tokens, [self.layers[i] for i in self.packed]
        if tokens.length and batch != self.batch_size:
            raise ValueError(
                f"the cache holds {tokens.length} tokens of {self.batch_size} sequences and was given {batch}; "
                "reset() it first, or select the rows with batch_select_indices or batch_repeat_interleave"
            )
        tokens.begin(new, device)
        with torch.no_grad(), torch.inference_mode(False):
            for layer in layers:
                layer.reset() if tokens.first else layer.grow(tokens.capacity)

    def _commit(self) -> None:
        self.tokens.length += self.tokens.new

    def reset(self) -> None:
        """Forget all tokens, and let go of the buffers."""
        self.tokens.length = 0
        self.layers = self._empty_layers()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: ``-n`` removes n, as transformers defines it; n keeps the first n."""
        super().crop(tokens_to_remove)
        count, length = int(tokens_to_remove), self.tokens.length
        if count:
            self.tokens.length = min(count, length) if count > 0 else max(length + count, 0)

    def to(self, device: torch.device | str) -> TBQ4Cache:
        """Move all layers to a device, in place; returns the cache."""
        for layer in self.layers:
            vars(layer).update(tree_map_only(Tensor, lambda x: x.to(device), vars(layer)))
            if getattr(layer, "device", None) is not None:
                layer.device = torch.device(device)
        return self


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, allowed))}")


def _skipped(skip_layers: Sequence[int | str], packed: list[int], num_layers: int) -> set[int]:
    """Indices that ``skip_layers`` means."""
    named: dict[int | str, Any] = {"first": packed[0], "last": packed[-1]}
    found = {i: named.get(i, i) for i in skip_layers}
    for given, index in found.items():
        if not isinstance(index, int) or not -num_layers <= index < num_layers:
            raise ValueError(
                f"skip_layers names {given!r}: the model has layers 0 to {num_layers - 1}, also counted from the end "
                'as -1, and "first" and "last"'
            )
    return {index % num_layers for index in found.values()}


def _layer_types(config: Any) -> tuple[list[str], dict[str, Any]]:
    """Kinds of the model's layers, and what transformers' own layers are made with."""
    config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ValueError(f"TBQ4Cache is for decoders; {config.model_type} has an encoder whose keys do not grow")
    layer_types, arguments = get_layer_types_and_kwargs(config)
    others = sorted(set(layer_types) - {"full_attention", *BOUNDED, *WITHOUT_KEYS})
    if others:
        raise ValueError(
            f"TBQ4Cache packs the keys and values of full attention; {config.model_type} has {', '.join(others)}, "
            "whose caches hold something else. Leave the model its own cache"
        )
    if "full_attention" not in layer_types:
        kinds = ", ".join(sorted(set(layer_types)))
        raise ValueError(
            f"TBQ4Cache has nothing to pack in {config.model_type}: its layers are {kinds}, which stay as they are. "
            "Leave the model its own cache"
        )
    return list(layer_types), arguments
