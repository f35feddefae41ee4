"""Host side of triton.prefill_hopper."""

from __future__ import annotations

from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnpatch.attention_call import AttentionCall, new_output
from attnpatch.kernels.common.launcher import Described, Launch
from attnpatch.kernels.common.support import (
    offset_stride,
    padded_width,
    per_head_strides,
    planned,
    precision,
    strides,
)
from attnpatch.kernels.prefill.configs import choose_config as choose_rest
from attnpatch.kernels.prefill.launch import prefill_launch
from attnpatch.kernels.prefill_hopper.configs import CONFIGS, HopperConfig
from attnpatch.kernels.prefill_hopper.kernel import CONSUMERS, ROWS, _prefill_hopper_kernel
from attnpatch.kernels.prefill_hopper.masks import key_blocks, seen_keys
from attnpatch.kernels.prefill_hopper.packed import Dealt, dealing_launch, dealt
from attnpatch.kernels.prefill_hopper.ranges import FIELDS, _ranges_kernel
from attnpatch.kernels.prefill_hopper.schedule import TILE_COST
from attnpatch.kernels.prefill_hopper.tables import Table, table
from attnpatch.masking import without_repeats

SECTION_BYTES = 8 << 20
"""K and V of the heads that run side by side: they should stay in L2. On an H200 (2026-11-30) 32 MiB were 1 to 3 %
slower at 4 x 4096 and 16 x 1024 tokens, 1 % faster at head_dim 64 alone."""

BLOCK_M = CONSUMERS.value * ROWS.value

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}

_INPUTS = ("q", "k", "v", "lse", "sinks", "alibi_slopes", "key_bounds", "q_offset")
"""Fields of the call that the kernel takes."""

_PACKING = ("cu_seqlens_q", "cu_seqlens_k")
"""Likewise, of packed sequences."""


class Launches(NamedTuple):
    """What a call launches, and what it allocates.

    Args:
        launch: the kernel, behind the one that finds the ranges of its tiles where there are bounds, and before
            triton.prefill's on the tiles that it leaves where there are masks. None where the output is empty.
        output: shape and strides of ``AttentionCall.empty_output``.
        ranges: shape of the ranges; None without bounds.
        table: the tiles of each program; None where they are packed.
        dealt: size of the table that the launch makes of packed sequences.
    """

    launch: Launch | None
    output: tuple[tuple[int, ...], tuple[int, ...]]
    ranges: tuple[int, ...] | None = None
    table: Table | None = None
    dealt: Dealt | None = None


def prefill_hopper(call: AttentionCall) -> Tensor:
    """Run ``call`` on the flash-attention kernel for Hopper.

    Args:
        call: any call that the backend does not refuse.

    Returns:
        ``[batch, num_heads, seqlen_q, head_dim_v]`` in the layout of ``AttentionCall.empty_output``.
    """
    call = _aligned(with_bounds(call))
    launch, output, ranges, tiles, size = planned(_launches, call)
    o = call.q.new_empty_strided(*output)
    if launch is not None and size is not None:
        launch(call, *size.new(call.q), o, o)
    elif launch is not None and tiles is not None:
        made = () if ranges is None else (call.q.new_empty(ranges, dtype=torch.int32),)
        launch(call, *made, o, *tiles.read())
    return o


def with_bounds(call: AttentionCall) -> AttentionCall:
    """Masks with their bounds, which are all that the kernel knows of them."""
    if call.key_bounds is not None:
        return call
    found = [torch.ops.attnpatch.key_bounds(mask) for mask in masks_of(call)]
    if not found:
        return call
    return call._replace(key_bounds=reduce(torch.minimum, found).expand(call.batch, call.num_heads, call.seqlen_q, 3))


def masks_of(call: AttentionCall) -> list[Tensor]:
    """``[b, h, q, seqlen_k]`` each, with size 1 where it is the same."""
    masks = [] if call.attn_mask is None else [without_repeats(call.attn_mask)]
    return masks if call.key_padding is None else [*masks, call.key_padding[:, None, None, :]]


def _aligned(call: AttentionCall) -> AttentionCall:
    """With copies of what does not lie at a multiple of 16 bytes, as TMA needs it."""
    if (call.q.data_ptr() | call.k.data_ptr() | call.v.data_ptr()) % 16 == 0:
        return call
    return call._replace(q=_copy(call.q), k=_copy(call.k), v=_copy(call.v))


def _copy(x: Tensor) -> Tensor:
    return x if x.data_ptr() % 16 == 0 else x.new_empty_strided(x.shape, x.stride()).copy_(x)


def _launches(call: AttentionCall) -> Launches:
    o = new_output(call.q, call.v)  # the kernel zeroes rows of no sequence
    output = tuple(o.shape), o.stride()
    if o.numel() == 0:
        return Launches(None, output)
    config = choose_config(call)
    if call.cu_seqlens_q is not None:
        return _packed_launches(call, config, o)
    tiles = tile_table(call, config.BLOCK_N)
    ranges = None if call.key_bounds is None else ranges_shape(call, BLOCK_M)
    rest = None if ranges is None or not masks_of(call) else rest_launch(call, ranges, tiles, descriptors=True)
    makes = (*(() if ranges is None else ("ranges",)), "o", "tiles", "num_tiles")
    launch = attention_launch(call, config, o, ranges, tiles, makes, rest)
    return Launches(launch if ranges is None else ranges_launch(call, ranges, BLOCK_M, launch), output, ranges, tiles)


def _packed_launches(call: AttentionCall, config: HopperConfig, o: Tensor) -> Launches:
    size, section = dealt(call, BLOCK_M), _heads_per_section(call, config.BLOCK_N)
    launch = attention_launch(call, config, o, None, size, (None, "tiles", "num_tiles", "o", "o_rows"))
    launch = dealing_launch(call, size, min(section, call.num_heads), BLOCK_M, config.BLOCK_N, launch)
    return Launches(launch, (tuple(o.shape), o.stride()), dealt=size)


def choose_config(call: AttentionCall) -> HopperConfig:
    """The entry of the table that serves ``call``."""
    return CONFIGS[max(padded_width(call.head_dim), padded_width(call.head_dim_v), 64)]


def ranges_shape(call: AttentionCall, block_m: int) -> tuple[int, ...]:
    """Of the int32 ``[batch, num_heads or 1, blocks, FIELDS]`` of a call with bounds: heads may share them."""
    assert call.key_bounds is not None
    return call.batch, call.num_heads if call.key_bounds.stride(1) else 1, -(-call.seqlen_q // block_m), FIELDS


def ranges_launch(call: AttentionCall, shape: tuple[int, ...], block_m: int, then: Launch | None = None) -> Launch:
    """What makes the ranges of ``shape``, and the launch that reads them."""
    batch, heads, blocks, _ = shape
    return Launch(
        _ranges_kernel,
        batch * heads * blocks,
        call,
        ("key_bounds", "q_offset"),
        ("ranges",),
        then,
        bounds_strides=strides(call.key_bounds),
        offset_stride=offset_stride(call),
        num_heads=heads,
        seqlen_q=call.seqlen_q,
        seqlen_k=call.seqlen_k,
        window_left=call.window_left,
        window_right=call.window_right,
        FIELDS=FIELDS,
        HAS_MASKS=bool(masks_of(call)),
        BLOCK_M=block_m,
        num_warps=4,
    )


def attention_launch(
    call: AttentionCall,
    config: HopperConfig,
    o: Tensor,
    ranges: tuple[int, ...] | None,
    tiles: Table | Dealt,
    makes: tuple[str | None, ...],
    then: Launch | None = None,
    v_transposed: Tensor | None = None,
) -> Launch:
    """The attention itself, and ``then``.

    Args:
        call: in 16 bits, or in 8 bits as fp8.py makes it.
        config: its entry of the table.
        o: the output; what is asked of it are shape, strides and dtype.
        ranges: shape of the ranges of its tiles, None without bounds.
        tiles: those of each program.
        makes: see :class:`Launch`.
        then: likewise.
        v_transposed: how the kernel reads V in 8 bits, of which ``makes`` holds the scales.
    """
    packed = call.cu_seqlens_q is not None
    width, width_v = padded_width(call.head_dim), padded_width(call.head_dim_v)
    shares_q = config.SHARES_Q and width == width_v
    return Launch(
        _prefill_hopper_kernel,
        tiles.programs,
        call,
        (*_INPUTS, *_PACKING),
        makes,
        then,
        described={
            "q": _described(call.q, ROWS.value, width),
            "k": _described(call.k, config.BLOCK_N, width),
            "v": _described(call.v, config.BLOCK_N, width_v)
            if v_transposed is None
            else _described(v_transposed, width_v, config.BLOCK_N),
            "o": _described(o, ROWS.value, width_v),
        },
        **({"ranges": None} if ranges is None else {}),
        **({} if packed else {"o_rows": None}),
        **({} if "scales" in makes else {"scales": None}),
        offset_stride=offset_stride(call),
        sm_scale=call.sm_scale,
        softcap=call.softcap,
        window_left=call.window_left,
        window_right=call.window_right,
        sinks_strides=per_head_strides(call.sinks),
        slopes_strides=per_head_strides(call.alibi_slopes),
        bounds_strides=strides(call.key_bounds),
        ranges_strides=_ranges_strides(ranges),
        num_heads=call.num_heads,
        seqlen_q=call.seqlen_q,
        seqlen_k=call.seqlen_k,
        max_tiles=tiles.max_tiles,
        batch=call.batch if packed else None,
        GROUP_SIZE=call.group_size,
        BLOCK_D=width,
        BLOCK_DV=width_v,
        BLOCK_N=config.BLOCK_N,
        STAGES=config.STAGES,
        SHARES_Q=shares_q,
        MAY_HOLD_ANYTHING=v_transposed is None and _may_hold_anything(call),
        HEAD_DIM_V=call.head_dim_v if packed else None,
        BYTES=call.k.element_size(),
        num_warps=4,
    )


def rest_launch(call: AttentionCall, ranges: tuple[int, ...], tiles: Table, descriptors: bool) -> Launch:
    """triton.prefill on the tiles that the kernel leaves: of their rows not all are plain."""
    config = choose_rest(call, descriptors)
    programs = tiles.programs * max(1, BLOCK_M // config.BLOCK_M)  # as many fit the device
    done = {"done_strides": _ranges_strides(ranges), "DONE_ROWS": BLOCK_M}
    return prefill_launch(call, config, descriptors, precision(call.q.dtype), programs, ("done", "o"), **done)


def _described(x: Tensor, rows: int, width: int) -> Described:
    """What TMA reads or writes ``rows`` rows of ``[batch, heads, seqlen, head_dim]`` by."""
    block = [1, 1, rows, width]
    outer = [16 if n == 1 else stride for n, stride in zip(x.shape[:3], x.stride(), strict=False)]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype])
    return partial(TensorDescriptor, shape=list(x.shape), strides=[*outer, 1], block_shape=block, layout=layout)


def _ranges_strides(shape: tuple[int, ...] | None) -> tuple[int, int, int] | None:
    """Over batch, head and tile; one table may serve all heads."""
    if shape is None:
        return None
    _, heads, blocks, fields = shape
    return heads * blocks * fields, blocks * fields if heads > 1 else 0, fields


def _may_hold_anything(call: AttentionCall) -> bool:
    """Whether there may be keys that no query sees, as in a cache with room: those may be no numbers."""
    if call.key_bounds is not None or call.cu_seqlens_q is not None:  # or another sequence's
        return True
    if call.window_left is None and call.window_right is None:
        return False
    if isinstance(call.q_offset, Tensor):
        return True
    before = call.window_left is not None and call.q_offset > call.window_left
    behind = call.window_right is not None and call.q_offset + call.seqlen_q + call.window_right < call.seqlen_k
    return before or behind


def tile_table(call: AttentionCall, block_n: int) -> Table:
    """Depends on lengths in blocks alone, so that lengths share tables."""
    offset = call.seqlen_k - call.seqlen_q if isinstance(call.q_offset, Tensor) else call.q_offset  # a guess, or it
    band = (offset, call.seqlen_q, call.seqlen_k, call.window_left, call.window_right)
    ranges = [seen_keys.fn(m, *band, BLOCK_M) for m in range(0, call.seqlen_q, BLOCK_M)]
    costs = tuple(TILE_COST + key_blocks.fn(*found, block_n)[1] for found in ranges)
    heads = min(_heads_per_section(call, block_n), call.batch * call.num_heads)
    return table(costs, call.batch, call.num_heads, heads, call.q.device)


def _heads_per_section(call: AttentionCall, block_n: int) -> int:
    sequences = call.batch if call.cu_seqlens_q is not None and call.cu_seqlens_k is None else 1
    keys = -(-call.seqlen_k // block_n) * block_n * sequences
    bytes_per_kv_head = keys * (call.head_dim + call.head_dim_v) * call.k.element_size()
    return max(1, SECTION_BYTES // bytes_per_kv_head) * call.group_size
