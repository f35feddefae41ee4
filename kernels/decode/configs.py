"""Tile shapes and split counts of triton.decode."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common.support import padded_width

MAX_SPLITS = 128
"""All splits of a head are one tile of the merge."""

PROGRAMS_PER_SM = 2
"""Programs to start per multiprocessor. H200, bfloat16, head_dim 128, seqlen_k 32768: with 64 KV heads 247 us at 2 per
multiprocessor and 249 to 278 at 3 to 6; with 8 KV heads 37.4 us at 2 and 38.6 to 42.4 at 3 to 8."""

SPLIT_KEYS = 256
"""A split this long is worth its share of the merge."""

FILLING_SPLIT_KEYS = 128
"""One this long is, where multiprocessors would idle otherwise. H200, 3 KV heads, head_dim 64, 4096 keys: 32 splits
take 6.3 us, 16 take 7.1."""


class DecodeConfig(NamedTuple):
    """Launch configuration: keys per tile, warps, pipeline stages."""

    BLOCK_N: int
    num_warps: int
    num_stages: int


INTERPRETED = DecodeConfig(64, 4, 1)

# Keys: the wider of the padded head dims. 16 bit; on the H200, bfloat16, each within 3 % of the best of six to ten
# tiles at the split count below: head_dim 128 with 8 to 256 KV heads, 64 with 3, 256 with 64.
HALF = {
    64: DecodeConfig(128, 4, 3),
    128: DecodeConfig(64, 4, 3),
    256: DecodeConfig(32, 4, 3),
}

# float32: exact products run on the plain FMA units and hold whole rows of q and k in registers; larger tiles spill.
FLOAT32 = {
    64: DecodeConfig(64, 4, 2),
    128: DecodeConfig(32, 8, 2),
    256: DecodeConfig(16, 8, 2),
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


def choose_num_splits(call: AttentionCall) -> int:
    """How many programs share the keys of one KV head, from shapes alone: never from a length on the device."""
    processors = multiprocessors(call.q.device)
    groups = call.batch * call.num_kv_heads
    keys = most_visible_keys(call)
    longest = keys // SPLIT_KEYS
    if longest * groups < processors:
        longest = min(keys // FILLING_SPLIT_KEYS, processors // groups)
    return max(1, min(PROGRAMS_PER_SM * processors // groups, longest, MAX_SPLITS))


def most_visible_keys(call: AttentionCall) -> int:
    """Most keys the row may see: the window where both sides are bounded, else all of K."""
    if call.window_left is None or call.window_right is None:
        return call.seqlen_k
    return min(call.seqlen_k, call.window_left + call.window_right + 1)


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; the interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
