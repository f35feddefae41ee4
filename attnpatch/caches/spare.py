"""The buffers of a cache that is gone, for the next one.

A decode step is captured on the buffers of its cache. ``generate()`` makes a cache per call: with buffers of its own,
it would run two steps as they are and capture the third, in each call. On the buffers of the call before, the first is
replayed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnpatch.caches.buffered import BufferedCache
from attnpatch.caches.layers import BUFFERS

SHARE = 16
"""One in so many bytes of a device is what is kept at most."""


class Spare:
    """The buffers of the last cache that was made for a model, once nobody holds it."""

    def __init__(self) -> None:
        self._layers: list[Any] = []
        self._cache: Any = None
        self._stream: Any = None

    def pass_on(self, cache: BufferedCache) -> None:
        """Give the buffers to a cache that is new and empty, and wait for what it leaves.

        Not those of another kind of cache, of one that ran on another stream, or of which someone holds a part.
        """
        layers, is_gone = self._layers, self._cache is not None and self._cache() is None
        if is_gone and self._stream == _stream() and _fit(layers, cache) and not _are_held(layers):
            cache.inherit(layers)
        self._layers = left = cache.layers
        self._cache, self._stream = weakref.ref(cache, lambda _: _limit(left)), _stream()


def _stream() -> Any:
    """What else runs there comes after what the last cache was used for."""
    return torch.cuda.current_stream() if torch.cuda.is_available() else None


def _fit(layers: list[Any], cache: BufferedCache) -> bool:
    """Whether a cache keeps the same in as many layers, all in buffers: others are at new addresses at each step."""
    if not len(layers) == len(cache.layers) == len(cache.buffered):
        return False
    return all(old.is_initialized and old.formats == new.formats for old, new in zip(layers, cache.layers, strict=True))


def _are_held(layers: list[Any]) -> bool:
    """Whether anyone else has one of the layers, or a view of what it holds."""
    alone = [torch.empty(1)]
    if any(sys.getrefcount(layers[i]) > sys.getrefcount(alone[0]) for i in range(len(layers))):
        return True
    return any(_uses(x) > _uses(alone[0]) for x in _buffers(layers))


def _uses(x: Tensor) -> int:
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


def _buffers(layers: list[Any]) -> Iterator[Tensor]:
    found = (getattr(layer, name, None) for layer in layers for name in BUFFERS)
    return (x for x in found if isinstance(x, Tensor))


def _limit(layers: list[Any]) -> None:
    """Let go of what is not worth its memory, when nobody holds the cache any more."""
    buffers = list(_buffers(layers))
    if buffers and sum(x.nbytes for x in buffers) > memory(buffers[0].device) // SHARE:
        layers.clear()


def memory(device: torch.device) -> int:
    """Bytes of a device that captures steps, a GPU; of others, none is worth it."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0
