"""``patch(model, cache=...)``: which cache a call of the model gets."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache

from attnpatch.caches.buffered import BOUNDED, BufferedCache
from attnpatch.caches.spare import Spare
from attnpatch.caches.stops import defer_stops
from attnpatch.caches.tbq4 import TBQ4Cache
from attnpatch.patching import unwrapped

log = logging.getLogger("attnpatch")

CACHES = {"buffered": BufferedCache, "tbq4": TBQ4Cache}
"""By the option's value."""

FUSED = ("eager", "sdpa")
"""Names that transformers has for attention in torch, which rewrites find."""

Forward = Callable[..., Any]


def choose_cache(model: nn.Module, name: str) -> CacheChoice | None:
    """What gives caches to the model's calls; None where "auto" finds no use for one.

    From then on :func:`attnpatch.caches.stops.defer_stops` holds, for caches of ours alone.

    Args:
        model: any module.
        name: of CACHES, or "auto".

    Raises:
        ValueError: the model has no use for the cache named.
    """
    defer_stops()
    if name != "auto":
        return CacheChoice(model, name)
    try:
        return DeviceCacheChoice(model)
    except (ValueError, AttributeError) as error:  # a config of a composite model may lack what describes its layers
        _note_left_alone(model, error)
        return None


def _note_left_alone(model: nn.Module, why: Exception) -> None:
    log.debug('cache="auto" leaves %s the caches it makes: %s', type(model).__name__, why)


class CacheChoice:
    """Gives a cache to calls that bring none of their own.

    Args:
        model: of transformers, one that generates.
        name: of CACHES.

    Raises:
        ValueError: the model does not generate or takes no ``past_key_values``, or what the cache raises.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        can_generate = getattr(model, "can_generate", None)
        if can_generate is None or not can_generate():
            raise ValueError(
                f'cache="{name}" is for models of transformers that have generate(); {type(model).__name__} has none'
            )
        if "past_key_values" not in inspect.signature(unwrapped(model).forward).parameters:
            raise ValueError(f'cache="{name}" is for models that take past_key_values; {type(model).__name__} does not')
        self.kind, self.option = CACHES[name], name
        self.kind(model)
        self.model, self.left_alone = model, False
        self.spare = Spare()

    def run(self, forward: Forward, arguments: dict[str, Any]) -> Any:
        """Call ``forward`` with what :meth:`__call__` makes of its arguments."""
        return forward(**self(arguments))

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """A forward's arguments, with a cache where they bring none, or an empty one as ``generate`` makes it."""
        given = next((x for x in arguments.values() if isinstance(x, Cache)), None)
        if given is None:
            return {**arguments, "past_key_values": self._made()} if self._caches(arguments) else arguments
        if type(given) is DynamicCache and not given.offloading and given.get_seq_length() == 0:
            self._take_over(given)
        elif not isinstance(given, self.kind) and not self.left_alone:
            self.left_alone = True
            log.warning('cache="%s" leaves a %s of the caller as it is', self.option, type(given).__name__)
        return arguments

    def _made(self) -> Cache:
        cache = self.kind(self.model)
        self.spare.pass_on(cache)
        return cache

    def _take_over(self, given: DynamicCache) -> None:
        self.kind.take_over(given, self.model)
        self.spare.pass_on(cast(BufferedCache, given))

    def release(self) -> None:
        """Let go of what is kept for the next cache."""
        self.spare = Spare()

    def _caches(self, arguments: dict[str, Any]) -> bool:
        """Whether the model would make a cache by itself."""
        use_cache = arguments.get("use_cache")
        by_config = getattr(self.model.config, "use_cache", True)
        return not self.model.training and bool(by_config if use_cache is None else use_cache)


class DeviceCacheChoice(CacheChoice):
    """Likewise, where a cache that stays in place pays: on a GPU, for attention that is fused, without gradients.

    On a CPU a decode step took longer with a BufferedCache, whose keys are padded to its capacity, than with a
    DynamicCache (SmolLM2-135M, float32, processor time of one thread of a 2-core x86-64 machine, 2026-11-30: 85 ms
    beside 76 after 300 tokens, 119 beside 110 after 1,500). Other kernels than ours (``flash_attention_2`` and so on)
    copy padded keys to a batch without padding. Gradients do not reach what a BufferedCache stored in an earlier call.

    A model that turns out to have no use for the cache, as one with tokens of its own, is left alone from then on.
    """

    device_type = "cuda"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, "buffered")
        self.left_alone = True  # nobody asked for a cache, so nobody is told
        self.fits = True
        config: Any = model.config
        self.config = config.get_text_config(decoder=True)
        self.given: WeakSet[Cache] = WeakSet()

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """A forward's arguments, with a cache if one pays."""
        return super().__call__(arguments) if self.fits and self._pays(arguments) else arguments

    def _pays(self, arguments: dict[str, Any]) -> bool:
        inputs = arguments.get("input_ids")
        inputs = arguments.get("inputs_embeds") if inputs is None else inputs
        is_here = inputs is not None and inputs.device.type == self.device_type
        return is_here and not torch.is_grad_enabled() and self.config._attn_implementation in FUSED

    def _made(self) -> Cache:
        cache = super()._made()
        self.given.add(cache)
        return cache

    def _take_over(self, given: DynamicCache) -> None:
        super()._take_over(given)
        self.given.add(given)

    def run(self, forward: Forward, arguments: dict[str, Any]) -> Any:
        """Call ``forward``; once more without the cache that was given to it, should it not take that."""
        chosen = self(arguments)
        cache = chosen.get("past_key_values")
        try:
            return forward(**chosen)
        except ValueError as error:
            if cache not in self.given or not _gives_back(cache, self.model):
                raise
            result = forward(**arguments)
            self.fits = False
            _note_left_alone(self.model, error)
            return result


def _gives_back(cache: Any, model: nn.Module) -> bool:
    """Turn a cache into a DynamicCache that holds its tokens, for everyone who has it; False where that is unknown.

    Layers that are not of the cache's own kind may have stored tokens of a forward that did not end.
    """
    if type(cache) is not BufferedCache or (cache.tokens.length and len(cache.buffered) < len(cache.layers)):
        return False
    whole = any(cache.layer_types[i] in BOUNDED for i in cache.buffered)
    own = DynamicCache() if whole else DynamicCache(config=model.config)
    for i in cache.buffered if cache.tokens.length else ():
        own.update(cache.layers[i].keys.clone(), cache.layers[i].values.clone(), i)
    cache.__class__, cache.__dict__ = DynamicCache, own.__dict__
    return True
