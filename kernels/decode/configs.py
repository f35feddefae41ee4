"""Tile shapes and split counts of triton.decode."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from attnpatch.attention_call import AttentionCall

MAX_SPLITS = 128
"""All splits of a head are one tile of the merge."""

MIN_SPLIT_KEYS = 256
"""A shorter split costs more in ramp-up and merging than it brings."""

WAVES = 2
"""Programs to start per program that the chip can hold."""


class DecodeConfig(NamedTuple):
    """Launch configuration: keys per tile, warps, pipeline stages, and how many programs fit one multiprocessor."""

    BLOCK_N: int
    num_warps: int
    num_stages: int
    programs_per_sm: int

    def options(self) -> dict[str, int]:
        """Keyword arguments of the kernel launch."""
        return {"BLOCK_N": self.BLOCK_N, "num_warps": self.num_warps, "num_stages": self.num_stages}


CONFIGS: tuple[tuple[int, DecodeConfig], ...] = ()

INTERPRETED = DecodeConfig(64, 4, 1, 1)


def choose_config(call: AttentionCall) -> DecodeConfig:
    """Tile shapes for ``call``, from its dtype and widest head dim."""
    if call.q.device.type == "cpu":
        return INTERPRETED
    wide = max(call.head_dim, call.head_dim_v) * call.q.element_size()
    return next(config for limit, config in CONFIGS if wide <= limit)


def choose_num_splits(call: AttentionCall, config: DecodeConfig) -> int:
    """How many programs share the keys of one KV head, from shapes alone: never from a length on the device.

    Enough for WAVES of what the chip holds, none shorter than MIN_SPLIT_KEYS.
    """
    programs = WAVES * config.programs_per_sm * multiprocessors(call.q.device)
    wanted = programs // (call.batch * call.num_kv_heads)
    longest = -(-most_visible_keys(call) // MIN_SPLIT_KEYS)
    return max(1, min(wanted, longest, MAX_SPLITS))


def most_visible_keys(call: AttentionCall) -> int:
    """Most keys the row may see: the window where both sides are bounded, else all of K."""
    if call.window_left is None or call.window_right is None:
        return call.seqlen_k
    return min(call.seqlen_k, call.window_left + call.window_right + 1)


@lru_cache(maxsize=None)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; the interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
