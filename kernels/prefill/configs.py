"""Tile shapes of triton.prefill."""

from __future__ import annotations

from typing import NamedTuple

import torch


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


def choose_config(call) -> PrefillConfig:
    if call.q.device.type == "cpu":
        return INTERPRETED
    raise NotImplementedError
