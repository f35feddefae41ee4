"""Tile shapes of triton.prefill_hopper: a static table, so that nobody pays for tuning and results never change."""

from __future__ import annotations

from typing import NamedTuple


class HopperConfig(NamedTuple):
    """Keys of a block, stages of the ring of K and V, and whether the output leaves through the buffer of Q."""

    BLOCK_N: int
    STAGES: int
    SHARES_Q: bool = False


CONFIGS = {
    64: HopperConfig(128, 4),
    128: HopperConfig(128, 2),
    256: HopperConfig(64, 2, True),
}
"""By the wider of the padded head dims. From a feasibility study on an H200 (2026-11-29, Triton 3.6, bfloat16): BLOCK_N
64 at 128 took 1.14 to 1.17 ms where 128 took 0.91, three stages through Q's buffer 0.97 to 1.02."""

EIGHT_BIT_CONFIGS = {
    64: HopperConfig(128, 4),
    128: HopperConfig(128, 4),
    256: HopperConfig(64, 4),
}
"""The same of Q, K and V in 8 bits; the output, in 16, has a buffer of its own."""
