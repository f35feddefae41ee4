"""Host side of triton.prefill."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common.support import capability, offset_arguments, padded_width, precision, strides
from attnpatch.kernels.prefill.configs import PrefillConfig, choose_config
from attnpatch.kernels.prefill.kernel import _prefill_kernel

SECTION_BYTES = 32 << 20
"""K and V of the heads that run side by side should stay in L2."""


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
    config = config or choose_config(call)
    k, k_strides = _rows_argument(call.k, config.BLOCK_N)
    v, v_strides = _rows_argument(call.v, config.BLOCK_N)
    q_offset, offset_stride = offset_arguments(call)
    total_heads = call.batch * call.num_heads
    with torch.cuda.device_of(call.q):
        _prefill_kernel[(-(-call.seqlen_q // config.BLOCK_M) * total_heads,)](
            *(call.q, k, v, call.attn_mask, call.key_padding, q_offset, o),
            sm_scale=call.sm_scale,
            softcap=call.softcap,
            window_left=call.window_left,
            window_right=call.window_right,
            q_strides=call.q.stride(),
            k_strides=k_strides,
            v_strides=v_strides,
            mask_strides=strides(call.attn_mask),
            padding_strides=strides(call.key_padding),
            offset_stride=offset_stride,
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


def _rows_argument(x: Tensor, rows: int) -> tuple[Tensor | TensorDescriptor, tuple[int, ...] | None]:
    """``x`` and its strides, or a tensor descriptor and None where the TMA unit can read its layout."""
    if capability(x.device) < (9, 0) or not fits_descriptor(x):
        return x, x.stride()
    block = [1, 1, rows, padded_width(x.shape[3])]
    return TensorDescriptor(x, list(x.shape), list(_descriptor_strides(x)), block), None


def fits_descriptor(x: Tensor) -> bool:
    """Whether TMA can read ``x``: unit inner stride, 16-byte aligned rows, heads, batches and base, no expansion."""
    aligned = all(s > 0 and s * x.element_size() % 16 == 0 for s in _descriptor_strides(x)[:-1])
    return x.numel() > 0 and x.stride(3) == 1 and aligned and x.data_ptr() % 16 == 0


def _descriptor_strides(x: Tensor) -> tuple[int, ...]:
    """Strides with those of dimensions of size 1, which mean nothing and may be anything, made multiples of 16."""
    return tuple(16 if n == 1 and d < 3 else s for d, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True)))
