"""Host side of the flash-decode kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnpatch.attention_call import AttentionCall, is_tbq4
from attnpatch.kernels.common.launcher import Launch, overlapping, overlaps
from attnpatch.kernels.common.support import (
    offset_stride,
    padded_width,
    per_head_strides,
    planned,
    precision,
    strides,
)
from attnpatch.kernels.decode.configs import (
    MANY_ROWS,
    DecodeConfig,
    Plan,
    choose_config,
    choose_merge,
    choose_plan,
)
from attnpatch.kernels.decode.kernel import _split_kernel
from attnpatch.kernels.decode.merge import _merge_kernel
from attnpatch.kernels.decode.queries import _rotate_kernel
from attnpatch.kernels.decode.unpack import MIN_COLUMNS, Form, forms_of, has_whole_norms, is_per_head, unpacks_alike
from attnpatch.tbq4 import blocks_of

_TERMS = ("cu_seqlens_q", "cu_seqlens_k", "sinks", "q_offset", "lse")
_INPUTS = (
    *("q", "k", "v", "k_scale", "v_scale", "k_shift", "v_shift", "block_table"),
    *("attn_mask", "key_padding", "key_bounds", "alibi_slopes"),
)
"""Fields of the call that the split kernel takes; those in _TERMS go to the merge, too."""


_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Launches(NamedTuple):
    """What a call launches, and what it allocates.

    Args:
        launch: the kernel that walks the keys, followed by the one that merges its partial results where there are
            several splits. None where the output is empty.
        output: shape and strides of ``AttentionCall.empty_output``.
        scratch: how many float32 each of the other tensors has that the kernels make: the rotated q, where K is in
            codes, and the partial results, where there is a merge.
    """

    launch: Launch | None
    output: tuple[tuple[int, ...], tuple[int, ...]]
    scratch: tuple[int, ...]


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
    address = call.k.data_ptr() | call.v.data_ptr()  # a plan knows everything else of K and V
    alignment = 16 if address % 16 == 0 else 2 - address % 2
    launches = planned(_launches, call, num_splits, config, precision(call.q.dtype), alignment)
    o = call.q.new_empty_strided(*launches.output)
    if call.cu_seqlens_q is not None:
        o.zero_()
    if launches.launch is not None:
        launches.launch(call, *[call.q.new_empty(size, dtype=torch.float32) for size in launches.scratch], o)
    return o


def _launches(
    call: AttentionCall, num_splits: int, config: DecodeConfig | None, precision: str, alignment: int
) -> Launches:
    o = call.empty_output()
    output = tuple(o.shape), o.stride()
    if o.numel() == 0:
        return Launches(None, output, ())
    config = config or choose_config(call, alignment)
    alignment = alignment if config.BLOCK_M < MANY_ROWS or unpacks_alike(call) else 1
    plan = choose_plan(call, config, num_splits)
    forms = forms_of(call, alignment, config.BLOCK_M)
    shared = _shared(call, config, plan)
    rows = call.num_heads * call.q.shape[0] * call.q.shape[2]
    merge = _merge(call, plan, rows, shared) if plan.merges else None
    launch = _split(call, config, plan, precision, forms, merge, shared)
    scratch = [plan.num_splits * rows * (call.head_dim_v + 2)] if plan.merges else []
    if call.tbq4[0]:
        launch = _rotate(call, forms[0], rows, shared["PDL"], launch)
        scratch.insert(0, rows * (call.head_dim * (2 if call.q.dtype == torch.float32 else 1) // 2 + 1))
    return Launches(launch, output, tuple(scratch))


def _shared(call: AttentionCall, config: DecodeConfig, plan: Plan) -> dict[str, Any]:
    """Arguments of both kernels."""
    return {
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
        "V_BLOCKS": _blocks(call.v, call.v_shift, call.head_dim_v),
        "BLOCK_B": plan.block_b,
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        **overlapping(plan.merges and overlaps(call.q.device)),
    }


def _split(
    call: AttentionCall,
    config: DecodeConfig,
    plan: Plan,
    precision: str,
    forms: list[Form],
    merge: Launch | None,
    shared: dict[str, Any],
) -> Launch:
    k, v = forms
    rotated = ("rotated",) if call.tbq4[0] else ()
    takes = (*_INPUTS, *_TERMS)
    paged = call.block_table is not None
    absent: dict[str, Any] = {"q" if rotated else "rotated": None}
    output = _output_strides(call)
    if plan.merges:
        _, heads, rows, width = (*call.q.shape[:3], call.head_dim_v)
        output = (heads * rows * width, rows * width, width, 1)
        call = call._replace(sinks=None, lse=None)  # the merge's
    return Launch(
        _split_kernel,
        plan.programs,
        call,
        takes[1:] if rotated else takes,
        (*rotated, "o"),
        merge,
        **absent,
        sm_scale=call.sm_scale,
        softcap=call.softcap,
        q_strides=call.q.stride(),
        k_strides=k.strides,
        v_strides=v.strides,
        k_scale_strides=strides(call.k_scale),
        v_scale_strides=strides(call.v_scale),
        k_shift_strides=strides(call.k_shift),
        v_shift_strides=strides(call.v_shift),
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
        K_UNPACK=k.unpack,
        V_UNPACK=v.unpack,
        K_STEPS=k.step,
        V_STEPS=v.step,
        K_TILES=k.tiles,
        V_TILES=v.tiles,
        K_ALIGNED=k.aligned,
        V_ALIGNED=v.aligned,
        K_BLOCKS=_blocks(call.k, call.k_shift, call.head_dim),
        K_SCALE_PER_HEAD=is_per_head(call.k_scale, paged),
        V_SCALE_PER_HEAD=is_per_head(call.v_scale, paged),
        WHOLE_NORMS=has_whole_norms(call),
        DTYPE=_DTYPES[call.q.dtype],
        PRECISION=precision,
        MERGES=plan.merges,
        BLOCK_D=_block_width(call.head_dim, k),
        BLOCK_DV=_block_width(call.head_dim_v, v),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        **shared,
    )


def _rotate(call: AttentionCall, form: Form, rows: int, overlapped: bool, then: Launch) -> Launch:
    return Launch(
        _rotate_kernel,
        rows,
        call,
        ("q",),
        ("rotated",),
        then,
        q_strides=call.q.stride(),
        seqlen_q=call.q.shape[2],
        num_heads=call.num_heads,
        num_rows=rows,
        HEAD_DIM=call.head_dim,
        BLOCKS=_blocks(call.k, call.k_shift, call.head_dim),
        UNPACK=form.unpack,
        DTYPE=_DTYPES[call.q.dtype],
        **overlapping(overlapped),
        BLOCK_D=padded_width(call.head_dim),
        num_warps=1,
    )


def _block_width(head_dim: int, form: Form) -> int:
    """Channels of all tiles, whose planes are as wide as products take them."""
    return form.tiles * max(padded_width(head_dim // form.tiles), MIN_COLUMNS * form.step)


def _blocks(x: Tensor, shift: Tensor | None, head_dim: int) -> tuple[int, ...] | None:
    """Blocks of a row of K or V in TBQ4 codes; None of one that is not."""
    return blocks_of(head_dim) if is_tbq4(x, shift) else None


def _merge(call: AttentionCall, plan: Plan, rows: int, shared: dict[str, Any]) -> Launch:
    return Launch(
        _merge_kernel,
        rows,
        call,
        _TERMS,
        (*((None,) if call.tbq4[0] else ()), "partial", "o"),
        sinks_strides=per_head_strides(call.sinks),
        o_strides=_output_strides(call),
        num_heads=call.num_heads,
        num_rows=rows,
        BLOCK_S=choose_merge(call, plan),
        BLOCK_DV=padded_width(call.head_dim_v),
        **shared,
    )


def _output_strides(call: AttentionCall) -> tuple[int, ...]:
    heads, rows, width = call.num_heads, call.q.shape[2], call.head_dim_v
    return (rows * heads * width, width, heads * width, 1)
