"""A recorder of steps that does on a CPU what a CUDA graph does on a device."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from attnpatch import dispatch


class Recorder:
    """Captures as CUDA does: nothing is written while capturing, and a replay reads the tensors captured with."""

    def __init__(self):
        self.captures = self.replays = 0
        self.fails_with = None
        self.keeps_casts = []
        self.before_replay = lambda: None

    def __call__(self, function, args, pool):
        if self.fails_with is not None:
            raise RuntimeError(self.fails_with)
        self.captures += 1
        self.keeps_casts.append(torch.is_autocast_cache_enabled())
        before = tree_map_only(Tensor, torch.clone, list(args))
        outputs = function(*args)
        for x, old in zip(args, before, strict=True):
            if isinstance(x, Tensor):
                x.data.copy_(old)  # a capture writes nothing, yet counts versions
        for x in outputs:
            if isinstance(x, Tensor) and x.is_floating_point():
                x.data.fill_(torch.nan)

        def replay():
            self.before_replay()
            self.replays += 1
            with dispatch.recording():  # no Python of the operator runs in a replay
                results = function(*args)
            for x, result in zip(outputs, results, strict=True):
                if isinstance(x, Tensor):
                    x.copy_(result)

        return replay, outputs
