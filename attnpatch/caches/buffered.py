"""A transformers cache that appends in place to buffers which grow.

Buffers grow on the host before a forward, never inside a graph: a compiled forward sees buffers of one capacity and
the number of tokens stored, on the device. It compiles again when the capacity first changes, and is then one for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Set
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, DynamicCache, get_layer_types_and_kwargs

from attnpatch.caches.forward import decoder_config, inputs_of, takes_padded_keys, with_padded_mask
from attnpatch.caches.layers import BUFFERS, RINGS, BufferedLayer, Tokens, lasting

BOUNDED = ("sliding_attention", "chunked_attention")
"""Layers that keep a window of tokens, as transformers does."""

RECURRENT = ("linear_attention", "conv")
"""Layers with a state, which take the end of a mask for that of the tokens."""

WITHOUT_KEYS = (*RECURRENT, "moe", "mlp")
"""Layers without keys and values, left to transformers."""


_buffers = attrgetter(*BUFFERS, *RINGS)
"""What holds a layer's tokens."""


class BufferedCache(DynamicCache):
    """Keys and values of full attention layers in buffers that new tokens are written into, others as in transformers.

    Use it like transformers' own caches: ``model.generate(**inputs, past_key_values=cache)``, or let every call make
    one, ``attnpatch.patch(model, cache="buffered")``. A DynamicCache copies all it holds for every token; here only the
    token is written, addresses stay while there is room, and a decode step has one graph for all lengths up to it.
    It reads like one, too: ``layers[i].keys`` and ``values`` are views of the tokens stored, not of the room behind.
    Gradients reach the tokens of the same forward, not those stored before. Compiled by other means than
    :func:`attnpatch.patch`, a forward breaks its graph at each layer.

    Args:
        model: a decoder of transformers, or its config.
        max_cache_len: tokens that there is room for from the start, and not more; None = room for 256, which grows.

    Raises:
        ValueError: the model has no full attention layers, or layers of another kind, or ``max_cache_len`` is none.
    """

    recent = 0
    """Tokens that are also kept as they were; see TBQ4Cache."""

    def __init__(self, model: Any, max_cache_len: int | None = None) -> None:
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"max_cache_len={max_cache_len} is no number of tokens; None lets the cache grow")
        self.tokens = Tokens(max_cache_len, self.recent)
        self.layer_types, self.layer_arguments = _layer_types(getattr(model, "config", model), type(self).__name__)
        self.buffered = self._indices("full_attention")
        self._capacity = 0
        """That all layers have followed to."""
        Cache.__init__(self, layers=self._empty_layers())

    def _indices(self, *kinds: str) -> list[int]:
        return [i for i, kind in enumerate(self.layer_types) if kind in kinds]

    def _empty_layers(self) -> list[Any]:
        return [self._empty_layer(i, kind) for i, kind in enumerate(self.layer_types)]

    def _empty_layer(self, index: int, kind: str) -> Any:
        if index not in self.buffered:
            return DYNAMIC_LAYER_TYPE_MAPPING[kind](**self.layer_arguments)
        return BufferedLayer(index, self.tokens, *self._formats(index))

    def _formats(self, index: int) -> tuple[str, str, bool]:
        """How a layer of full attention keeps K and V, and whether K without its mean; see BufferedLayer."""
        return "dense", "dense", False

    @classmethod
    def take_over(cls, cache: Cache, model: nn.Module) -> None:
        """Turn an empty cache of the model into one of this class, for everyone who holds it.

        One that was made without a config keeps every token of layers with a window, too, and can be cropped.
        """
        recording, whole = any(getattr(layer, "record_past", False) for layer in cache.layers), not cache.layers
        cache.__class__ = cls
        cls.__init__(cache, model)
        if whole:
            cache.buffered = cache._indices("full_attention", *BOUNDED)
            cache.layers = cache._empty_layers()
        if recording:
            cache.activate_past_recording()

    def inherit(self, layers: list[Any]) -> None:
        """Take the buffers of the layers of a cache that is gone, of the same model and kind, for what it will hold."""
        for layer, other in zip(self._full_layers(), (layers[i] for i in self.buffered), strict=True):
            layer.inherit(other)
        self.tokens.capacity = layers[self.buffered[0]].key_buffer.shape[2]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of all layers, room for tokens to come included."""
        tensors = (x for layer in self.layers for x in tree_iter(vars(layer)) if isinstance(x, Tensor))
        return sum(x.numel() * x.element_size() for x in tensors)

    @property
    def batch_size(self) -> int:
        """Sequences held; -1 if none is."""
        return next((layer.key_buffer.shape[0] for layer in self._full_layers() if layer.is_initialized), -1)

    def holds(self, ids: Set[int]) -> bool:
        """Whether tensors of these ids are buffers of this cache, or say where a forward writes in them."""
        buffers = itertools.chain.from_iterable(map(_buffers, self._full_layers()))
        return ids <= {id(self.tokens.position), *map(id, buffers)}

    def _full_layers(self) -> list[Any]:
        return [self.layers[i] for i in self.buffered]

    def before_forward(self, model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Make room for a forward of the model, and fit its mask to what :meth:`update` will return.

        Args:
            model: a model that transformers does not run on a static cache gets keys of their true length, and so a
                graph that depends on it; so does one that returns its attention weights, and one with recurrent layers
                when it is given several tokens.
            arguments: of the model's forward, by name.

        Returns:
            The arguments to call the model with.

        Raises:
            ValueError: the cache holds another number of sequences, or has no room, or ``arguments`` name no input.
        """
        inputs, tokens = inputs_of(arguments, type(self).__name__), self.tokens
        self._begin(inputs.shape[0], inputs.shape[1], inputs.device)
        reads_end = tokens.new > 1 and self._indices(*RECURRENT)
        padded = not tokens.first and not reads_end and takes_padded_keys(model, arguments)
        if padded:
            others = set(BOUNDED) - {self.layer_types[i] for i in self.buffered}
            arguments = with_padded_mask(arguments, inputs, tokens.length + tokens.new, tokens.capacity, others)
            mask = arguments["attention_mask"]
            if isinstance(mask, Tensor) and tokens.capacity == tokens.first_capacity:
                torch._dynamo.mark_static(mask, mask.dim() - 1)  # not a symbol, though the first forward's was narrower
        tokens.hooked, tokens.padded = True, padded
        return arguments

    def after_forward(self, stored: bool) -> None:
        """End what :meth:`before_forward` began; ``stored`` says whether the model ran to its end.

        Raises:
            ValueError: the model stored more tokens than it was given, as one with a prefix of its own.
        """
        tokens = self.tokens
        tokens.hooked = tokens.padded = False
        if stored and tokens.written not in (None, tokens.new):
            raise ValueError(
                f"the model was given {tokens.new} tokens and stored {tokens.written}: it has some of its own, which a "
                f"{type(self).__name__} does not count. Give it a DynamicCache (cache=None)"
            )
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
            ValueError: heads, dtype, device or batch are not the cache's, or it has no room.
        """
        if self.tokens.hooked or layer_idx not in self.buffered:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self._update_alone(key_states, value_states, layer_idx)

    @torch.compiler.disable(reason="buffers grow outside of graphs: use attnpatch.patch(model)")
    def _update_alone(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if layer_idx == self.buffered[0]:
            self._begin(key_states.shape[0], key_states.shape[2], key_states.device)
        keys, values = self.layers[layer_idx].update(key_states, value_states)
        if layer_idx == self.buffered[-1]:
            self._commit()
        return keys, values

    def _begin(self, batch: int, new: int, device: torch.device) -> None:
        tokens = self.tokens
        if tokens.length and self.batch_size not in (-1, batch):
            raise ValueError(
                f"the cache holds {tokens.length} tokens of {self.batch_size} sequences and was given {batch}; "
                "reset() it first, or select the rows with batch_select_indices or batch_repeat_interleave"
            )
        tokens.begin(new, device)
        if tokens.first or tokens.capacity != self._capacity:
            self._make_room(batch, tokens.capacity)

    def _make_room(self, batch: int, capacity: int) -> None:
        with lasting():
            for layer in self._full_layers():
                layer.renew(batch, capacity) if self.tokens.first else layer.grow(capacity)
        self._capacity = capacity

    def _commit(self) -> None:
        self.tokens.length += self.tokens.new

    def reset(self) -> None:
        """Forget all tokens, and let go of the buffers."""
        self.tokens.length = 0
        self.layers = self._empty_layers()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: ``-n`` removes n, as transformers defines it; n keeps the first n."""
        count, length = int(tokens_to_remove), self.tokens.length  # generate() gives a tensor, which graphs depend on
        super().crop(count)
        if count:
            self.tokens.length = min(count, length) if count > 0 else max(length + count, 0)

    def move_to(self, device: torch.device | str) -> BufferedCache:
        """Move all layers to a device, in place; returns the cache."""
        for layer in self.layers:
            with lasting():
                vars(layer).update(tree_map_only(Tensor, lambda x: x.to(device), vars(layer)))
            if getattr(layer, "device", None) is not None:
                layer.device = torch.device(device)
        return self


def _layer_types(config: Any, name: str) -> tuple[list[str], dict[str, Any]]:
    """Kinds of the model's layers, and what transformers' own layers are made with."""
    config = decoder_config(config, name)
    layer_types, arguments = get_layer_types_and_kwargs(config)
    others = sorted(set(layer_types) - {"full_attention", *BOUNDED, *WITHOUT_KEYS})
    if others:
        raise ValueError(
            f"{name} keeps the keys and values of full attention; {config.model_type} has {', '.join(others)}, "
            "whose caches hold something else. Leave the model its own cache"
        )
    if "full_attention" not in layer_types:
        kinds = ", ".join(sorted(set(layer_types)))
        raise ValueError(
            f"{name} has nothing to keep of {config.model_type}: its layers are {kinds}, which stay as they are. "
            "Leave the model its own cache"
        )
    return list(layer_types), arguments
