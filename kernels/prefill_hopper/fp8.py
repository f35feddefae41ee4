"""Host side of triton.prefill_fp8: Q, K and V in 8 bit floats, then the kernel for Hopper on them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall, new_output
from attnpatch.kernels.common.launcher import Launch
from attnpatch.kernels.common.support import offset_stride, planned, strides
from attnpatch.kernels.prefill.launch import uses_descriptors
from attnpatch.kernels.prefill_hopper.configs import EIGHT_BIT_CONFIGS
from attnpatch.kernels.prefill_hopper.launch import (
    BLOCK_M,
    attention_launch,
    masks_of,
    ranges_launch,
    ranges_shape,
    rest_launch,
    tile_table,
    with_bounds,
)
from attnpatch.kernels.prefill_hopper.quantise import _largest_kernel, _quantise_kernel, _seen_kernel
from attnpatch.kernels.prefill_hopper.tables import Table

BLOCK = BLOCK_M
"""Rows that a program turns into 8 bits: of Q, those of a tile."""

ROWS, KEYS = 512, 32
"""That a program compares at a time to find the keys that some row sees."""

EIGHT_BITS = torch.float8_e4m3fn


class Launches(NamedTuple):
    """What a call launches, and what it allocates.

    Args:
        quantise: Q, K and V in 8 bits, behind the largest number of each block and, with bounds, the keys seen.
        attention: on those, behind the ranges of its tiles where there are bounds.
        rest: triton.prefill in 16 bits on the tiles that it leaves where there are masks, or None.
        kv_blocks: of BLOCK rows of K and of V.
        q, k, v: shapes of the three in 8 bits; V is transposed, and its keys fill blocks.
        output: shape and strides of ``AttentionCall.empty_output``.
        table: the tiles of each program.
        ranges: shape of the ranges; None without bounds.
    """

    quantise: Launch
    attention: Launch
    rest: Launch | None
    kv_blocks: int
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    output: tuple[tuple[int, ...], tuple[int, ...]]
    table: Table
    ranges: tuple[int, ...] | None


def prefill_fp8(call: AttentionCall) -> Tensor:
    """Run ``call`` on products of 8 bit floats.

    Args:
        call: any call that the backend does not refuse.

    Returns:
        ``[batch, num_heads, seqlen_q, head_dim_v]`` in the layout of ``AttentionCall.empty_output``.
    """
    call = with_bounds(call)
    plan = planned(launches, call, bool(masks_of(call)) and uses_descriptors(call))
    q, k, v, scales = quantised(call, plan)
    ranges = () if plan.ranges is None else (call.q.new_empty(plan.ranges, dtype=torch.int32),)
    o = call.q.new_empty_strided(*plan.output)
    plan.attention(call._replace(q=q, k=k, v=v), *ranges, scales, o, *plan.table.read())
    if plan.rest is not None:
        plan.rest(call, *ranges, o)
    return o


def quantised(call: AttentionCall, plan: Launches) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K and V as the kernel reads them, and their scales: of each block of rows of a head, and of its output."""
    q, k, v = (call.q.new_empty(shape, dtype=EIGHT_BITS) for shape in (plan.q, plan.k, plan.v))
    largest = call.q.new_empty(plan.kv_blocks, dtype=torch.float32)
    scales = call.q.new_empty((call.batch, call.num_heads, -(-call.seqlen_q // BLOCK) + 1), dtype=torch.float32)
    seen = () if plan.ranges is None else (call.q.new_empty((call.batch, call.seqlen_k), dtype=torch.int8),)
    plan.quantise(call, *seen, largest, q, k, v, scales)
    return q, k, v, scales


def launches(call: AttentionCall, descriptors: bool = False) -> Launches:
    """What ``call``, whose masks have bounds, launches; ``descriptors``: whether TMA reads K and V in 16 bits."""
    k_blocks = -(-call.seqlen_k // BLOCK)
    shapes = call.q.shape, call.k.shape, (*call.k.shape[:2], call.head_dim_v, k_blocks * BLOCK)
    q, k, v = (call.q.new_empty(shape, dtype=EIGHT_BITS) for shape in shapes)
    eight_bits = call._replace(q=q, k=k, v=v.transpose(2, 3)[:, :, : call.seqlen_k])
    kv_blocks = 2 * call.batch * call.num_kv_heads * k_blocks
    blocks = call.batch * call.num_heads * -(-call.seqlen_q // BLOCK) + kv_blocks
    config, o = EIGHT_BIT_CONFIGS[call.head_dim], new_output(call.q, call.v)
    tiles = tile_table(eight_bits, config.BLOCK_N)
    ranges = None if call.key_bounds is None else ranges_shape(call, BLOCK_M)
    makes = (*(() if ranges is None else ("ranges",)), "scales", "o", "tiles", "num_tiles")
    attention = attention_launch(eight_bits, config, o, ranges, tiles, makes, v_transposed=v)
    attention = attention if ranges is None else ranges_launch(eight_bits, ranges, BLOCK_M, attention)
    rest = None if ranges is None or not masks_of(call) else rest_launch(call, ranges, tiles, descriptors)
    output = tuple(o.shape), o.stride()
    quantise = _quantise(call, blocks, kv_blocks)
    return Launches(quantise, attention, rest, kv_blocks, *shapes, output, tiles, ranges)


def _quantise(call: AttentionCall, blocks: int, kv_blocks: int) -> Launch:
    values: dict[str, Any] = {
        "k_strides": call.k.stride(),
        "v_strides": call.v.stride(),
        "offset_stride": offset_stride(call),
        "window_left": call.window_left,
        "window_right": call.window_right,
        "batch": call.batch,
        "num_kv_heads": call.num_kv_heads,
        "seqlen_q": call.seqlen_q,
        "seqlen_k": call.seqlen_k,
        "HEAD_DIM": call.head_dim,
        "BLOCK": BLOCK,
        "num_warps": max(4, call.head_dim // 32),  # the numbers of a block of Q stay in registers
    }
    of_q: dict[str, Any] = {"q_strides": call.q.stride(), "num_heads": call.num_heads}
    takes, seen = ("k", "v", "q_offset"), () if call.key_bounds is None else ("seen",)
    if not seen:
        values["seen"] = None
    makes = (*seen, "largest", "q8", "k8", "v8", "scales")
    then = Launch(_quantise_kernel, blocks, call, ("q", *takes), makes, **values, **of_q)
    then = Launch(_largest_kernel, kv_blocks, call, takes, (*seen, "largest"), then, **values)
    return _seen(call, then) if seen else then


def _seen(call: AttentionCall, then: Launch) -> Launch:
    """The keys that some row sees, and what reads that."""
    assert call.key_bounds is not None
    return Launch(
        _seen_kernel,
        call.batch * -(-call.seqlen_k // KEYS),
        call,
        ("key_bounds", "key_padding", "q_offset"),
        ("seen",),
        then,
        bounds_strides=strides(call.key_bounds),
        padding_strides=strides(call.key_padding),
        offset_stride=offset_stride(call),
        window_left=call.window_left,
        window_right=call.window_right,
        heads=call.num_heads if call.key_bounds.stride(1) else 1,
        seqlen_q=call.seqlen_q,
        seqlen_k=call.seqlen_k,
        ROWS=ROWS,
        KEYS=KEYS,
        num_warps=4,
    )
