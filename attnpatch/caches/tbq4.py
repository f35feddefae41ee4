"""A transformers cache whose keys and values are kept in 4 bits, see :mod:`attnpatch.tbq4`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnpatch.caches.buffered import BufferedCache
from attnpatch.caches.layers import KEYS, VALUES, lasting


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
        recent: how many of the last tokens are read as they were, and with them the first 4: beside their codes they
            lie in buffers of the model's dtype, with room for 64 tokens more. A forward of several tokens reads those
            before its first one so, and its own. 0 = none.

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
        recent: int = 0,
    ) -> None:
        _check_choice("keys", keys, KEYS)
        _check_choice("values", values, VALUES)
        if centre_keys and keys == "dense":
            raise ValueError('centre_keys=True needs keys="tbq4" or "int8": dense keys are kept as they are')
        _check_recent(recent, keys, values)
        self.recent = recent
        self.choice = keys, values, keys != "dense" if centre_keys is None else centre_keys
        self.skip_layers = skip_layers
        super().__init__(model, max_cache_len)

    def _empty_layers(self) -> list[Any]:
        self.dense = _skipped(self.skip_layers, self.buffered, len(self.layer_types))
        return super()._empty_layers()

    def _formats(self, index: int) -> tuple[str, str, bool]:
        dense = index in self.dense or self.layer_types[index] != "full_attention"
        return ("dense", "dense", False) if dense else self.choice

    def _begin(self, batch: int, new: int, device: torch.device) -> None:
        self._refill()  # a forward may have failed, and left its tokens in the place of those it came behind
        super()._begin(batch, new, device)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: ``-n`` removes n, as transformers defines it; n keeps the first n.

        Of more than 64 taken back, recent tokens that come to the fore again are what their codes stand for.
        """
        super().crop(tokens_to_remove)
        self._refill()

    def _refill(self) -> None:
        if lost := self.tokens.lost():
            with lasting():
                for layer in self._full_layers():
                    layer.refill(lost)


def _check_recent(recent: int, keys: str, values: str) -> None:
    if not isinstance(recent, int) or isinstance(recent, bool) or recent < 0:
        raise ValueError(f"recent={recent!r} is no number of tokens; 64 keeps the last 64 as they were, 0 keeps none")
    if recent and (keys, values) == ("dense", "dense"):
        raise ValueError(f'recent={recent} keeps tokens beside their codes, and keys="dense", values="dense" has none')


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
