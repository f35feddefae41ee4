"""Host side of triton.decode."""

from __future__ import annotations

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common.support import offset_arguments, padded_width, per_head, precision, strides
from attnpatch.kernels.decode.configs import MAX_SPLITS, DecodeConfig, choose_config, choose_num_splits
from attnpatch.kernels.decode.kernel import _decode_merge_kernel, _decode_split_kernel

MERGE_COLUMNS = 32


def decode(call: AttentionCall, num_splits: int = 0, config: DecodeConfig | None = None) -> Tensor:
    """Run ``call``, of one query row, on the flash-decode kernels.

    Args:
        call: any call that the backend does not refuse.
        num_splits: programs over which the keys of a head are split, at most MAX_SPLITS; 0 lets the shapes
            decide, 1 does without a merge.
        config: tile shapes; default from the table.

    Returns:
        ``[batch, num_heads, 1, head_dim_v]`` in the layout of ``AttentionCall.empty_output``.
    """
    o = call.empty_output()
    if o.numel() == 0:
        return o
    config = config or choose_config(call)
    num_splits = num_splits or choose_num_splits(call)
    with torch.cuda.device_of(call.q):
        if num_splits == 1:
            _split(call, config, o[None], None, None)
        else:
            shape = (num_splits, call.batch, call.num_heads, 1)
            o_partial = call.q.new_empty((*shape, call.head_dim_v), dtype=torch.float32)
            m, l = (call.q.new_empty(shape, dtype=torch.float32) for _ in range(2))
            _split(call._replace(sinks=None, lse=None), config, o_partial, m, l)
            _merge(call, o_partial, m, l, o)
    return o


def _split(call: AttentionCall, config: DecodeConfig, o: Tensor, m: Tensor | None, l: Tensor | None) -> None:
    """Write ``o``, and its rows' maximum and sum, ``[num_splits, batch, num_heads, 1, (head_dim_v)]``."""
    q_offset, offset_stride = offset_arguments(call)
    q, attn_mask, key_bounds = (_rows_are_heads(x, call) for x in (call.q, call.attn_mask, call.key_bounds))
    sinks, alibi_slopes = per_head(call.sinks, call), per_head(call.alibi_slopes, call)
    _decode_split_kernel[(o.shape[0] * call.batch * call.num_kv_heads,)](
        *(q, call.k, call.v, attn_mask, call.key_padding, key_bounds, sinks, alibi_slopes, q_offset),
        *(o, m, l, call.lse),
        sm_scale=call.sm_scale,
        softcap=call.softcap,
        window_left=call.window_left,
        window_right=call.window_right,
        q_strides=strides(q),
        k_strides=call.k.stride(),
        v_strides=call.v.stride(),
        mask_strides=strides(attn_mask),
        padding_strides=strides(call.key_padding),
        bounds_strides=strides(key_bounds),
        sinks_strides=strides(sinks),
        slopes_strides=strides(alibi_slopes),
        offset_stride=offset_stride,
        o_stride_split=o.stride(0),
        o_strides=strides(_rows_are_heads(o[0], call)),
        num_kv_heads=call.num_kv_heads,
        num_splits=o.shape[0],
        seqlen_k=call.seqlen_k,
        GROUP_SIZE=call.group_size,
        HEAD_DIM=call.head_dim,
        HEAD_DIM_V=call.head_dim_v,
        PRECISION=precision(call.q.dtype),
        BLOCK_H=padded_width(call.group_size),
        BLOCK_D=padded_width(call.head_dim),
        BLOCK_DV=padded_width(call.head_dim_v),
        **config._asdict(),
    )


def _merge(call: AttentionCall, o_partial: Tensor, m: Tensor, l: Tensor, o: Tensor) -> None:
    batch, num_heads, _, head_dim_v = o.shape
    sinks = per_head(call.sinks, call)
    _decode_merge_kernel[(batch * num_heads * -(-head_dim_v // MERGE_COLUMNS),)](
        *(o_partial, m, l, sinks, o, call.lse),
        sinks_strides=strides(sinks),
        o_strides=o.stride(),
        num_heads=num_heads,
        total_heads=batch * num_heads,
        num_splits=o_partial.shape[0],
        HEAD_DIM_V=head_dim_v,
        BLOCK_S=MAX_SPLITS,
        BLOCK_DV=MERGE_COLUMNS,
    )


def _rows_are_heads(x: Tensor | None, call: AttentionCall) -> Tensor | None:
    """``[batch, num_heads, 1, n]`` as ``[batch, num_kv_heads, group_size, n]``: a group's heads share every key."""
    return None if x is None else x.squeeze(2).unflatten(1, (call.num_kv_heads, call.group_size))
