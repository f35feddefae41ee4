"""Host side of triton.prefill_fp8: Q, K and V in 8 bit floats, then the kernel for Hopper on them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall, new_output
from attnpatch.kernels.common.launcher import Launch
from attnpatch.kernels.common.support import offset_stride, planned
from attnpatch.kernels.prefill_hopper.configs import EIGHT_BIT_CONFIGS
from attnpatch.kernels.prefill_hopper.launch import attention_launch, tile_table
from attnpatch.kernels.prefill_hopper.quantise import _largest_kernel, _quantise_kernel
from attnpatch.kernels.prefill_hopper.tables import Table

BLOCK = 128
"""Rows that a program turns into 8 bits."""

EIGHT_BITS = torch.float8_e4m3fn


class Launches(NamedTuple):
    """What a call launches, and what it allocates.

    Args:
        quantise: Q, K and V in 8 bits, behind the largest number of each block.
        attention: on those.
        blocks: of BLOCK rows.
        q, k, v: shapes of the three in 8 bits; V is transposed, and its keys fill blocks.
        output: shape and strides of ``AttentionCall.empty_output``.
        table: the tiles of each program.
    """

    quantise: Launch
    attention: Launch
    blocks: int
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    output: tuple[tuple[int, ...], tuple[int, ...]]
    table: Table


def prefill_fp8(call: AttentionCall) -> Tensor:
    """Run ``call`` on products of 8 bit floats.

    Args:
        call: any call that the backend does not refuse.

    Returns:
        ``[batch, num_heads, seqlen_q, head_dim_v]`` in the layout of ``AttentionCall.empty_output``.
    """
    plan = planned(_launches, call)
    q, k, v, scales = quantised(call, plan)
    o = call.q.new_empty_strided(*plan.output)
    plan.attention(call._replace(q=q, k=k, v=v), scales, o, *plan.table.read())
    return o


def quantised(call: AttentionCall, plan: Launches) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K and V as the kernel reads them, and two scales per head."""
    q, k, v = (call.q.new_empty(shape, dtype=EIGHT_BITS) for shape in (plan.q, plan.k, plan.v))
    largest = call.q.new_empty(plan.blocks, dtype=torch.float32)
    scales = call.q.new_empty((call.batch, call.num_heads, 2), dtype=torch.float32)
    plan.quantise(call, largest, q, k, v, scales)
    return q, k, v, scales


def _launches(call: AttentionCall) -> Launches:
    k_blocks = -(-call.seqlen_k // BLOCK)
    shapes = call.q.shape, call.k.shape, (*call.k.shape[:2], call.head_dim_v, k_blocks * BLOCK)
    q, k, v = (call.q.new_empty(shape, dtype=EIGHT_BITS) for shape in shapes)
    eight_bits = call._replace(q=q, k=k, v=v.transpose(2, 3)[:, :, : call.seqlen_k])
    blocks = call.batch * (call.num_heads * -(-call.seqlen_q // BLOCK) + 2 * call.num_kv_heads * k_blocks)
    config, o = EIGHT_BIT_CONFIGS[call.head_dim], new_output(call.q, call.v)
    tiles = tile_table(eight_bits, config.BLOCK_N)
    makes = ("scales", "o", "tiles", "num_tiles")
    attention = attention_launch(eight_bits, config, o, None, tiles, makes, v_transposed=v)
    return Launches(_quantise(call, blocks), attention, blocks, *shapes, (tuple(o.shape), o.stride()), tiles)


def _quantise(call: AttentionCall, blocks: int) -> Launch:
    values: dict[str, Any] = {
        "q_strides": call.q.stride(),
        "k_strides": call.k.stride(),
        "v_strides": call.v.stride(),
        "offset_stride": offset_stride(call),
        "window_left": call.window_left,
        "window_right": call.window_right,
        "batch": call.batch,
        "num_heads": call.num_heads,
        "num_kv_heads": call.num_kv_heads,
        "seqlen_q": call.seqlen_q,
        "seqlen_k": call.seqlen_k,
        "HEAD_DIM": call.head_dim,
        "BLOCK": BLOCK,
        "num_warps": 4,
    }
    takes = ("q", "k", "v", "q_offset")
    then = Launch(_quantise_kernel, blocks, call, takes, ("largest", "q8", "k8", "v8", "scales"), **values)
    return Launch(_largest_kernel, blocks, call, takes, ("largest",), then, **values)
