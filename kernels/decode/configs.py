"""Tile shapes and split counts of triton.decode."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common.support import padded_width

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


INTERPRETED = DecodeConfig(64, 4, 1, 1)

# Keys: the wider of the padded head dims. 16 bit.
HALF = {
    64: DecodeConfig(128, 4, 3, 3),
    128: DecodeConfig(64, 4, 3, 3),
    256: DecodeConfig(32, 4, 3, 3),
}

# float32: exact products run on the plain FMA units and hold a whole row of q and k in registers; larger tiles spill.
FLOAT32 = {
    64: DecodeConfig(64, 4, 2, 4),
    128: DecodeConfig(32, 8, 2, 4),
    256: DecodeConfig(32, 8, 2, 2),
}


def choose_config(call: AttentionCall) -> DecodeConfig:
    """Tile shapes for ``call``, from its dtype and widest head dim."""
    if call.q.device.type == "cpu":
        return INTERPRETED
    width = padded_width(max(call.head_dim, call.head_dim_v))
    return table(call.q.dtype)[max(width, 64)]


def table(dtype: torch.dtype) -> dict[int, DecodeConfig]:
    """The tile shapes of one dtype."""
    return FLOAT32 if dtype == torch.float32 else HALF


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


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; the interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
