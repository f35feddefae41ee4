"""``generate()`` that starts the next token before it knows whether this one was the last.

Its loop asks the device after every token whether all sequences have ended, and waits for the answer with nothing
queued behind. transformers can ask one token late (``DeferredStopCheck``, huggingface/transformers#47975): where a
sequence ends by itself that costs a forward more, which is taken back before ``generate()`` returns. It does so on
Apple's devices alone.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation import utils

from attnpatch.caches.buffered import BufferedCache


def defer_stops() -> None:
    """Let ``generate()`` ask one token late where it runs on a cache of ours on a GPU; all else stays as it is."""
    utils.DeferredStopCheck = Deferred


class Deferred(utils.DeferredStopCheck):
    """transformers' own, for a :class:`BufferedCache` on a GPU, too."""

    device_type = "cuda"

    @classmethod
    def is_supported(cls, device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        """Whether a forward too many can be taken back.

        Layers that keep no more than a window would from now on have to keep more, and be compiled for that: where
        the caller gets such a cache, stops are not deferred.
        """
        if not isinstance(cache, BufferedCache) or device.type != cls.device_type:
            return bool(super().is_supported(device, cache, cache_is_returned, is_assistant))
        return not is_assistant and (not cache_is_returned or len(cache.buffered) == len(cache.layers))
