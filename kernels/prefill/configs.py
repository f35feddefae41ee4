"""Tile shapes of triton.prefill: a static table, so that nobody pays for tuning and results never change."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common.support import padded_width


class PrefillConfig(NamedTuple):
    """Launch configuration: tiles over queries and keys, warps, pipeline stages, register limit (None: free)."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    def options(self) -> dict[str, int]:
        """Keyword arguments of the kernel launch."""
        return {name: value for name, value in self._asdict().items() if value is not None}


INTERPRETED = PrefillConfig(64, 64, 4, 1)

# Keys: the wider of the padded head dims.
# K and V by tensor descriptors, 16 bit, compute capability 9.0 (228 KiB of shared memory). The best of nine to
# seventeen timed on the H200, bfloat16, causal. Up to 128 several programs share a multiprocessor, so that one
# multiplies while the other exponentiates. Times of cuDNN SDPA over ours: 64: 0.97 (0.78 without the register limit),
# 128: 0.80 at S4096 causal and 0.82 full, 256: 0.78.
DESCRIPTOR = {
    64: PrefillConfig(64, 128, 4, 2, 168),
    128: PrefillConfig(64, 64, 4, 3),
    256: PrefillConfig(128, 64, 8, 2),
}

# Beside a mask with bounds, whose tile of 64 x 128 spills: 0.78 ms to 0.91, causal, and 3.6 to 4.3 with holes; beside
# padding with bounds it spills too.
DESCRIPTOR_MASKED = {**DESCRIPTOR, 64: PrefillConfig(64, 64, 4, 3, 168)}

# By pointers, which cost registers, 16 bit; within the 99 KiB that every chip from 8.0 on grants a program. On the
# H200, causal, cuDNN SDPA's time over ours: 64: 0.88, 128: 0.64; 256 is chosen from compiled code.
POINTER = {
    64: PrefillConfig(64, 64, 4, 3),
    128: PrefillConfig(128, 64, 8, 2),
    256: PrefillConfig(64, 32, 8, 2),
}

# float32: exact products run on the plain FMA units and hold whole rows of q and k in registers; larger tiles spill.
FLOAT32 = {
    64: PrefillConfig(32, 64, 8, 2),
    128: PrefillConfig(16, 32, 8, 2),
    256: PrefillConfig(16, 16, 8, 2),
}


def choose_config(call: AttentionCall, descriptors: bool) -> PrefillConfig:
    """Tile shapes for ``call``; ``descriptors`` says how its K and V are read."""
    if call.q.device.type == "cpu":
        return INTERPRETED
    width = padded_width(max(call.head_dim, call.head_dim_v))
    masked = (call.attn_mask is not None or call.key_padding is not None) and call.key_bounds is not None
    return table(call.q.dtype, descriptors, masked)[max(width, 64)]


def table(dtype: torch.dtype, descriptors: bool, masked: bool = False) -> dict[int, PrefillConfig]:
    """The tile shapes of one dtype and one way of reading K and V; ``masked`` beside bounds."""
    if dtype == torch.float32:
        return FLOAT32
    if not descriptors:
        return POINTER
    return DESCRIPTOR_MASKED if masked else DESCRIPTOR
