"""A transformers cache whose keys and values are kept in 4 bits, see :mod:`attnpatch.tbq4`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnpatch.caches.buffered import BufferedCache
from attnpatch.caches.layers import KEYS, VALUES


class TBQ4Cache(BufferedCache):
    """Keys and values of full attention layers in 4 bits, of layers with a window dense, as transformers keeps them.

    Use it like transformers' own caches: ``model.generate(**inputs, past_key_values=cache)``, or let every call make
    one, ``attnpatch.patch(model, cache="tbq4")``. Models that are not patched get keys and values multiplied out. A
    first forward, and one of more than 64 tokens, attends on its own keys and values as they were; a shorter one on
    what is stored of them. Gradients reach the tokens of the same forward, which then also are as they were, not those
    stored before. Compiled by other means than :func:`attnpatch.patch`, a forward breaks its graph at each layer.

    Args:
        model: a decoder of transformers, or its config.
        max_cache_len: tokens that there is room for from the start, and not more; None = room for 256, which grows.
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
        if centre_keys and keys == "dense":
            raise ValueError('centre_keys=True needs keys="tbq4" or "int8": dense keys are kept as they are')
        self.choice = keys, values, keys != "dense" if centre_keys is None else centre_keys
        self.skip_layers = skip_layers
        super().__init__(model, max_cache_len)

    def _empty_layers(self) -> list[Any]:
        self.dense = _skipped(self.skip_layers, self.buffered, len(self.layer_types))
        return super()._empty_layers()

    def _formats(self, index: int) -> tuple[str, str, bool]:
        dense = index in self.dense or self.layer_types[index] != "full_attention"
        return ("dense", "dense", False) if dense else self.choice


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, allowed))}")


def _skipped(skip_layers: Sequence[int | str], full_attention: list[int], num_layers: int) -> set[int]:
    """Indices that ``skip_layers`` means."""
    named: dict[int | str, Any] = {"first": full_attention[0], "last": full_attention[-1]}
    found = {i: named.get(i, i) for i in skip_layers}
    for given, index in found.items():
        if not isinstance(index, int) or not -num_layers <= index < num_layers:
            raise ValueError(
                f"skip_layers names {given!r}: the model has layers 0 to {num_layers - 1}, also counted from the end "
                'as -1, and "first" and "last"'
            )
    return {index % num_layers for index in found.values()}
