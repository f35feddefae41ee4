"""Host side of the flash-decode kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common.launcher import Launch
from attnpatch.kernels.common.support import (
    capability,
    offset_stride,
    padded_width,
    per_head_strides,
    planned,
    precision,
    strides,
)
from attnpatch.kernels.decode.configs import DecodeConfig, Plan, choose_config, choose_merge, choose_plan
from attnpatch.kernels.decode.kernel import _merge_kernel, _split_kernel
from attnpatch.kernels.decode.unpack import is_per_head, unpacking

_TERMS = ("cu_seqlens_q", "cu_seqlens_k", "sinks", "q_offset", "lse")
_INPUTS = ("q", "k", "v", "k_scale", "v_scale", "block_table", "attn_mask", "key_padding", "key_bounds", "alibi_slopes")
"""Fields of the call that the split kernel takes; those in _TERMS go to the merge, too."""


class Launches(NamedTuple):
    """What a call launches.

    Args:
        split: the kernel that walks the keys.
        merge: the one that merges its partial results, or None: a single split.
        partial: how many float32 those are.
    """

    split: Launch
    merge: Launch | None
    partial: int


def decode(call: AttentionCall, num_splits: int = 0, config: DecodeConfig | None = None) -> Tensor:
    """Run ``call`` on the flash-decode kernels.

    Args:
        call: any call that a backend of this folder does not refuse.
        num_splits: programs over which the keys of a tile of rows are split; 0 lets the shapes decide, 1 does
            without a merge.
        config: tile shapes; default from the table.

    Returns:
        ``[batch, num_heads, seqlen_q, head_dim_v]``, or packed as q is, in the layout of
        ``AttentionCall.empty_output``.
    """
    o = call.empty_output()
    if o.numel() == 0:
        return o
    in_words = (call.k.data_ptr() | call.v.data_ptr()) % 2 == 0  # a plan knows everything of K and V but their address
    launches = planned(_launches, call, num_splits, config, precision(call.q.dtype), in_words)
    if launches.merge is None:
        launches.split(call, o)
    else:
        partial = call.q.new_empty(launches.partial, dtype=torch.float32)
        launches.split(call, partial)
        launches.merge(call, partial, o)
    return o


def _launches(
    call: AttentionCall, num_splits: int, config: DecodeConfig | None, precision: str, in_words: bool
) -> Launches:
    config = config or choose_config(call)
    plan = choose_plan(call, config, num_splits)
    shared = {
        "window_left": call.window_left,
        "window_right": call.window_right,
        "offset_stride": offset_stride(call),
        "batch": call.batch,
        "seqlen_q": call.q.shape[2],
        "seqlen_k": call.seqlen_k,
        "num_splits": plan.num_splits,
        "parts": plan.parts,
        "least_share": plan.least_share,
        "most_share": plan.most_share,
        "GROUP_SIZE": call.group_size,
        "HEAD_DIM_V": call.head_dim_v,
        "BLOCK_B": plan.block_b,
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "PDL": plan.merges and _overlaps(call.q.device),
    }
    rows = call.num_heads * call.q.shape[0] * call.q.shape[2]
    merge = _merge(call, plan, rows, shared) if plan.merges else None
    return Launches(
        _split(call, config, plan, precision, in_words, shared), merge, plan.num_splits * rows * (call.head_dim_v + 2)
    )


def _split(
    call: AttentionCall, config: DecodeConfig, plan: Plan, precision: str, in_words: bool, shared: dict[str, Any]
) -> Launch:
    (k_unpack, k_strides), (v_unpack, v_strides) = (unpacking(x, call.q.dtype, in_words) for x in (call.k, call.v))
    paged = call.block_table is not None
    output = _output_strides(call)
    if plan.merges:
        _, heads, rows, width = (*call.q.shape[:3], call.head_dim_v)
        output = (heads * rows * width, rows * width, width, 1)
        call = call._replace(sinks=None, lse=None)  # the merge's
    return Launch(
        _split_kernel,
        plan.programs,
        call,
        (*_INPUTS, *_TERMS),
        ("o",),
        sm_scale=call.sm_scale,
        softcap=call.softcap,
        q_strides=call.q.stride(),
        k_strides=k_strides,
        v_strides=v_strides,
        k_scale_strides=strides(call.k_scale),
        v_scale_strides=strides(call.v_scale),
        table_strides=strides(call.block_table),
        mask_strides=strides(call.attn_mask),
        padding_strides=strides(call.key_padding),
        bounds_strides=strides(call.key_bounds),
        sinks_strides=per_head_strides(call.sinks),
        slopes_strides=per_head_strides(call.alibi_slopes),
        o_stride_split=call.q.shape[0] * output[0],
        o_strides=output,
        num_kv_heads=call.num_kv_heads,
        num_pages=call.k.shape[0] if paged else None,
        HEAD_DIM=call.head_dim,
        PAGE_SIZE=call.page_size if paged else 0,
        ONE_QUERY=call.seqlen_q == 1 and call.cu_seqlens_q is None,
        K_UNPACK=k_unpack,
        V_UNPACK=v_unpack,
        K_SCALE_PER_HEAD=is_per_head(call.k_scale, paged),
        V_SCALE_PER_HEAD=is_per_head(call.v_scale, paged),
        PRECISION=precision,
        MERGES=plan.merges,
        BLOCK_D=padded_width(call.head_dim),
        BLOCK_DV=padded_width(call.head_dim_v),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **shared,
    )


def _merge(call: AttentionCall, plan: Plan, rows: int, shared: dict[str, Any]) -> Launch:
    return Launch(
        _merge_kernel,
        rows,
        call,
        _TERMS,
        ("partial", "o"),
        sinks_strides=per_head_strides(call.sinks),
        o_strides=_output_strides(call),
        num_heads=call.num_heads,
        num_rows=rows,
        BLOCK_S=choose_merge(call, plan),
        BLOCK_DV=padded_width(call.head_dim_v),
        **({"launch_pdl": True} if shared["PDL"] else {}),
        **shared,
    )


def _output_strides(call: AttentionCall) -> tuple[int, ...]:
    heads, rows, width = call.num_heads, call.q.shape[2], call.head_dim_v
    return (rows * heads * width, width, heads * width, 1)


def _overlaps(device: torch.device) -> bool:
    """Whether there is programmatic dependent launch: the merge starts up while the split kernel still runs."""
    return device.type == "cuda" and capability(device) >= (9, 0)
