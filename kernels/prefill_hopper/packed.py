"""Host side of dealing.py: tables of tiles of packed sequences, made by each launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common.launcher import Launch
from attnpatch.kernels.common.support import offset_stride
from attnpatch.kernels.prefill_hopper.dealing import _blocks_kernel, _deal_kernel

SEQUENCES_AT_ONCE = 256
"""Among which a program looks for its own."""

BLOCKS_AT_ONCE = 1024
"""With which a program compares its own."""


class Dealt(NamedTuple):
    """How large the table of tiles may be, whatever the lengths.

    Args:
        blocks: most query blocks of all sequences, and of the rows behind them.
        programs: that stay for the whole launch.
        max_tiles: most tiles of one.
    """

    blocks: int
    programs: int
    max_tiles: int

    def new(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for blocks, tiles and their numbers, on the device of ``like``."""
        blocks = like.new_empty(self.blocks, dtype=torch.int64)
        tiles = like.new_empty((self.programs, self.max_tiles + 1), dtype=torch.int64)
        return blocks, tiles, like.new_empty(self.programs, dtype=torch.int32)


def dealt(call: AttentionCall, block_m: int) -> Dealt:
    """Of a packed call; each sequence, and the rows behind the last, may have a block that is not full."""
    blocks = min((call.seqlen_q + (call.batch + 1) * (block_m - 1)) // block_m, call.seqlen_q)
    multiprocessors = torch.cuda.get_device_properties(call.q.device).multi_processor_count
    programs = min(multiprocessors, blocks * call.num_heads)
    return Dealt(blocks, programs, -(-blocks * call.num_heads // programs))


def dealing_launch(
    call: AttentionCall, size: Dealt, section: int, block_m: int, block_n: int, then: Launch | None = None
) -> Launch:
    """What deals the tiles of a packed call out, ``section`` heads side by side, and the launch that reads them."""
    deal = Launch(
        _deal_kernel,
        size.blocks,
        call,
        (),
        ("blocks", "tiles", "num_tiles"),
        then,
        num_blocks=size.blocks,
        num_heads=call.num_heads,
        section=section,
        num_programs=size.programs,
        max_tiles=size.max_tiles,
        BLOCK_H=1 << (call.num_heads - 1).bit_length(),
        BLOCK=BLOCKS_AT_ONCE,
        num_warps=4,
    )
    return Launch(
        _blocks_kernel,
        size.blocks,
        call,
        ("cu_seqlens_q", "cu_seqlens_k", "q_offset"),
        ("blocks",),
        deal,
        offset_stride=offset_stride(call),
        window_left=call.window_left,
        window_right=call.window_right,
        batch=call.batch,
        seqlen_q=call.seqlen_q,
        seqlen_k=call.seqlen_k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_B=SEQUENCES_AT_ONCE,
        num_warps=4,
    )
