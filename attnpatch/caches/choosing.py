"""``patch(model, cache="buffered")``, ``"tbq4"`` and ``"auto"``: which cache a call of the model gets."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache

from attnpatch.caches.buffered import BufferedCache
from attnpatch.caches.tbq4 import TBQ4Cache

log = logging.getLogger("attnpatch")

CACHES = {"buffered": BufferedCache, "tbq4": TBQ4Cache}
"""By the option's value."""


class CacheChoice:
    """Gives a cache to calls that bring none of their own.

    Args:
        model: of transformers, one that generates.
        name: of CACHES.

    Raises:
        ValueError: the model does not generate, or what the cache raises.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        can_generate = getattr(model, "can_generate", None)
        if can_generate is None or not can_generate():
            raise ValueError(
                f'cache="{name}" is for models of transformers that have generate(); {type(model).__name__} has none'
            )
        self.kind, self.option = CACHES[name], name
        self.kind(model)
        self.model, self.left_alone = model, False
        names = inspect.signature(model.forward).parameters
        self.argument = "cache" if "cache" in names else "past_key_values"

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """A forward's arguments, with a cache where they bring none, or an empty one as ``generate`` makes it."""
        given = next((x for x in arguments.values() if isinstance(x, Cache)), None)
        if given is None:
            return {**arguments, self.argument: self.kind(self.model)} if self._caches(arguments) else arguments
        if type(given) is DynamicCache and not given.offloading and given.get_seq_length() == 0:
            self.kind.take_over(given, self.model)
        elif not isinstance(given, self.kind) and not self.left_alone:
            self.left_alone = True
            log.warning('cache="%s" leaves a %s of the caller as it is', self.option, type(given).__name__)
        return arguments

    def _caches(self, arguments: dict[str, Any]) -> bool:
        """Whether the model would make a cache by itself."""
        use_cache = arguments.get("use_cache")
        by_config = getattr(self.model.config, "use_cache", True)
        return not self.model.training and bool(by_config if use_cache is None else use_cache)


class DeviceCacheChoice(CacheChoice):
    """Likewise, where a cache that stays in place pays: on a GPU, for calls that record no gradients.

    On a CPU a decode step took longer with a BufferedCache, whose keys are padded to its capacity, than with a
    DynamicCache (SmolLM2-135M, float32, processor time of one thread of a 2-core x86-64 machine, 2026-11-30: 85 ms
    beside 76 after 300 tokens, 119 beside 110 after 1,500). Gradients do not reach what a
    BufferedCache stored in an earlier call.
    """

    device_type = "cuda"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, "buffered")
        self.left_alone = True  # nobody asked for a cache, so nobody is told

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """A forward's arguments, with a cache if one pays."""
        pays = next(self.model.parameters()).device.type == self.device_type and not torch.is_grad_enabled()
        return super().__call__(arguments) if pays else arguments
