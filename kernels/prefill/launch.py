"""Host side of triton.prefill."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common.support import (
    capability,
    offset_stride,
    padded_width,
    per_head,
    precision,
    strides,
)
from attnpatch.kernels.prefill.configs import PrefillConfig, choose_config
from attnpatch.kernels.prefill.kernel import _prefill_kernel

SECTION_BYTES = 16 << 20
"""K and V of the heads that run side by side: they should stay in L2. H200, head_dim 128, 128 x 128 tiles: 1.29 ms at
16 MiB, 1.36 at 32, 1.45 at 64."""


def prefill(call: AttentionCall, config: PrefillConfig | None = None) -> Tensor:
    """Run ``call`` on the flash-attention kernel.

    Args:
        call: any call that the backend does not refuse.
        config: tile shapes; default from the table.

    Returns:
        ``[batch, num_heads, seqlen_q, head_dim_v]`` in the layout of ``AttentionCall.empty_output``.
    """
    o = call.empty_output()
    if o.numel() == 0:
        return o
    descriptors = uses_descriptors(call)
    config = config or choose_config(call, descriptors)
    k, k_strides = _rows_argument(call.k, config.BLOCK_N, descriptors)
    v, v_strides = _rows_argument(call.v, config.BLOCK_N, descriptors)
    sinks, alibi_slopes = per_head(call.sinks, call), per_head(call.alibi_slopes, call)
    total_heads = call.batch * call.num_heads
    with torch.cuda.device_of(call.q):
        _prefill_kernel[(-(-call.seqlen_q // config.BLOCK_M) * total_heads,)](
            *(call.q, k, v, call.attn_mask, call.key_padding, call.key_bounds, sinks, alibi_slopes, call.q_offset),
            *(o, call.lse),
            sm_scale=call.sm_scale,
            softcap=call.softcap,
            window_left=call.window_left,
            window_right=call.window_right,
            q_strides=call.q.stride(),
            k_strides=k_strides,
            v_strides=v_strides,
            mask_strides=strides(call.attn_mask),
            padding_strides=strides(call.key_padding),
            bounds_strides=strides(call.key_bounds),
            sinks_strides=strides(sinks),
            slopes_strides=strides(alibi_slopes),
            offset_stride=offset_stride(call),
            o_strides=o.stride(),
            num_heads=call.num_heads,
            total_heads=total_heads,
            heads_per_section=_heads_per_section(call),
            seqlen_q=call.seqlen_q,
            seqlen_k=call.seqlen_k,
            GROUP_SIZE=call.group_size,
            HEAD_DIM=call.head_dim,
            HEAD_DIM_V=call.head_dim_v,
            PRECISION=precision(call.q.dtype),
            BLOCK_D=padded_width(call.head_dim),
            BLOCK_DV=padded_width(call.head_dim_v),
            **config.options(),
        )
    return o


def _heads_per_section(call: AttentionCall) -> int:
    bytes_per_kv_head = max(1, call.seqlen_k) * (call.head_dim + call.head_dim_v) * call.k.element_size()
    return max(1, SECTION_BYTES // bytes_per_kv_head) * call.group_size


def uses_descriptors(call: AttentionCall) -> bool:
    """Whether the TMA unit reads K and V: it needs compute capability 9.0 and their layout; float32 spills with it."""
    narrow = call.k.element_size() == 2
    return narrow and capability(call.k.device) >= (9, 0) and fits_descriptor(call.k) and fits_descriptor(call.v)


def fits_descriptor(x: Tensor) -> bool:
    """Whether TMA can read ``x``: unit inner stride, 16-byte aligned rows, heads, batches and base, no expansion."""
    aligned = all(s > 0 and s * x.element_size() % 16 == 0 for s in _descriptor_strides(x)[:-1])
    return x.numel() > 0 and x.stride(3) == 1 and aligned and x.data_ptr() % 16 == 0


def _rows_argument(x: Tensor, rows: int, descriptor: bool) -> tuple[Tensor | TensorDescriptor, tuple[int, ...] | None]:
    """A tensor descriptor that reads ``rows`` rows, and None; or ``x`` itself and its strides."""
    if not descriptor:
        return x, x.stride()
    block = [1, 1, rows, padded_width(x.shape[3])]
    return TensorDescriptor(x, list(x.shape), list(_descriptor_strides(x)), block), None


def _descriptor_strides(x: Tensor) -> tuple[int, ...]:
    """Strides, but 16 where a dimension of size 1 leaves them without meaning."""
    outer = (16 if n == 1 else stride for n, stride in zip(x.shape[:3], x.stride(), strict=False))
    return (*outer, x.stride(3))
