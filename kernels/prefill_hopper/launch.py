"""Host side of triton.prefill_hopper."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common.support import offset_stride, padded_width, per_head, per_head_strides, strides
from attnpatch.kernels.prefill_hopper.configs import CONFIGS
from attnpatch.kernels.prefill_hopper.kernel import CONSUMERS, ROWS, _prefill_hopper_kernel, key_blocks, seen_keys
from attnpatch.kernels.prefill_hopper.ranges import tile_ranges
from attnpatch.kernels.prefill_hopper.schedule import TILE_COST, assign

SECTION_BYTES = 16 << 20
"""K and V of the heads that run side by side: they should stay in L2."""

BLOCK_M = CONSUMERS.value * ROWS.value

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def prefill_hopper(call: AttentionCall) -> Tensor:
    """Run ``call`` on the flash-attention kernel for Hopper.

    Args:
        call: any call that the backend does not refuse.

    Returns:
        ``[batch, num_heads, seqlen_q, head_dim_v]`` in the layout of ``AttentionCall.empty_output``.
    """
    o = call.empty_output()
    if o.numel() == 0:
        return o
    call = _with_bounds(call)
    ranges = None if call.key_bounds is None else tile_ranges(call, BLOCK_M)
    width, width_v = padded_width(call.head_dim), padded_width(call.head_dim_v)
    config = CONFIGS[max(width, width_v, 64)]
    tiles, num_tiles = _tiles(call, config.BLOCK_N)
    sinks, alibi_slopes = per_head(call.sinks, call), per_head(call.alibi_slopes, call)
    with torch.cuda.device_of(call.q):
        _prefill_hopper_kernel[(len(tiles),)](
            _descriptor(call.q, ROWS.value, width),
            _descriptor(call.k, config.BLOCK_N, width),
            _descriptor(call.v, config.BLOCK_N, width_v),
            _descriptor(o, ROWS.value, width_v),
            *(call.lse, sinks, alibi_slopes, call.key_bounds, call.key_padding, ranges, tiles, num_tiles),
            q_offset=call.q_offset,
            offset_stride=offset_stride(call),
            sm_scale=call.sm_scale,
            softcap=call.softcap,
            window_left=call.window_left,
            window_right=call.window_right,
            sinks_strides=per_head_strides(sinks),
            slopes_strides=per_head_strides(alibi_slopes),
            bounds_strides=strides(call.key_bounds),
            padding_strides=strides(call.key_padding),
            ranges_strides=None if ranges is None else _ranges_strides(ranges),
            num_heads=call.num_heads,
            seqlen_q=call.seqlen_q,
            seqlen_k=call.seqlen_k,
            max_tiles=tiles.shape[1] - 1,
            GROUP_SIZE=call.group_size,
            BLOCK_D=width,
            BLOCK_DV=width_v,
            BLOCK_N=config.BLOCK_N,
            STAGES=config.STAGES,
            SHARES_Q=config.SHARES_Q and width == width_v,
            MAY_HOLD_ANYTHING=_may_hold_anything(call),
            num_warps=4,
        )
    return o


def _descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """What TMA reads and writes ``rows`` rows of ``[batch, heads, seqlen, head_dim]`` by; zeros come from outside."""
    if x.data_ptr() % 16:
        x = x.clone()
    block = [1, 1, rows, width]
    outer = [16 if n == 1 else stride for n, stride in zip(x.shape[:3], x.stride(), strict=False)]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), [*outer, 1], block, layout)


def _with_bounds(call: AttentionCall) -> AttentionCall:
    """Padding with its bounds, by which whole blocks are left out."""
    if call.key_padding is None or call.key_bounds is not None:
        return call
    bounds = torch.ops.attnpatch.key_bounds(call.key_padding[:, None, None, :])
    return call._replace(key_bounds=bounds.expand(call.batch, call.num_heads, call.seqlen_q, 3))


def _ranges_strides(ranges: Tensor) -> tuple[int, int, int]:
    """Over batch, head and tile; one table may serve all heads."""
    return ranges.stride(0), ranges.stride(1) if ranges.shape[1] > 1 else 0, ranges.stride(2)


def _may_hold_anything(call: AttentionCall) -> bool:
    """Whether there may be keys that no query sees, as in a cache with room: those may be no numbers."""
    if call.key_bounds is not None:
        return True
    if call.window_right is None:
        return False
    return isinstance(call.q_offset, Tensor) or call.q_offset + call.seqlen_q + call.window_right < call.seqlen_k


def _tiles(call: AttentionCall, block_n: int) -> tuple[Tensor, Tensor]:
    bytes_per_kv_head = max(1, call.seqlen_k) * (call.head_dim + call.head_dim_v) * call.k.element_size()
    section = max(1, SECTION_BYTES // bytes_per_kv_head) * call.group_size
    offset = (
        call.q_offset if isinstance(call.q_offset, int) else call.seqlen_k - call.seqlen_q
    )  # on the device: a guess
    band = (offset, call.seqlen_q, call.seqlen_k, call.window_left, call.window_right)
    return _scheduled(band, block_n, (call.batch, call.num_heads), section, call.q.device)


@lru_cache(maxsize=256)
def _scheduled(
    band: tuple[int, int, int, int | None, int | None],
    block_n: int,
    heads: tuple[int, int],
    section: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The tiles of each program on the device, and how many; made once per shape."""
    starts = range(0, band[1], BLOCK_M)
    costs = [TILE_COST + key_blocks.fn(*seen_keys.fn(m, *band, BLOCK_M), block_n)[1] for m in starts]
    programs = min(torch.cuda.get_device_properties(device).multi_processor_count, len(costs) * heads[0] * heads[1])
    tiles, num_tiles = assign(costs, *heads, section, programs)
    return torch.from_numpy(tiles).to(device), torch.from_numpy(num_tiles).to(device)
