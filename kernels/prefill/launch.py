"""Host side of triton.prefill."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common.launcher import Described, Launch
from attnpatch.kernels.common.support import (
    capability,
    offset_stride,
    padded_width,
    per_head_strides,
    planned,
    precision,
    strides,
)
from attnpatch.kernels.prefill.configs import PrefillConfig, choose_config
from attnpatch.kernels.prefill.kernel import _prefill_kernel

SECTION_BYTES = 16 << 20
"""K and V of the heads that run side by side: they should stay in L2. H200, head_dim 128, 128 x 128 tiles: 1.29 ms at
16 MiB, 1.36 at 32, 1.45 at 64."""

_INPUTS = ("q", "k", "v", "attn_mask", "key_padding", "key_bounds", "sinks", "alibi_slopes", "q_offset", "lse")
"""Fields of the call that the kernel takes."""


def prefill(call: AttentionCall, config: PrefillConfig | None = None) -> Tensor:
    """Run ``call`` on the flash-attention kernel.

    Args:
        call: any call that the backend does not refuse.
        config: tile shapes; default from the table.

    Returns:
        ``[batch, num_heads, seqlen_q, head_dim_v]`` in the layout of ``AttentionCall.empty_output``.
    """
    o = call.empty_output()
    if o.numel() > 0:
        planned(_launch, call, config, uses_descriptors(call), precision(call.q.dtype))(call, o)
    return o


def _launch(call: AttentionCall, config: PrefillConfig | None, descriptors: bool, precision: str) -> Launch:
    config = config or choose_config(call, descriptors)
    programs = -(-call.seqlen_q // config.BLOCK_M) * call.batch * call.num_heads
    undone = {"done": None, "done_strides": None, "DONE_ROWS": None}
    return prefill_launch(call, config, descriptors, precision, programs, ("o",), **undone)


def prefill_launch(
    call: AttentionCall,
    config: PrefillConfig,
    descriptors: bool,
    precision: str,
    programs: int,
    makes: tuple[str, ...],
    **done: Any,
) -> Launch:
    """The kernel on ``call``.

    Args:
        call: any call that the backend does not refuse.
        config: tile shapes.
        descriptors: whether K and V are read by TMA.
        precision: of ``support.precision``.
        programs: one per tile; with ``done`` any number.
        makes: names of the tensors given beside the call: "o", behind "done" where another kernel computes some tiles.
        done: what else the kernel takes of its name.
    """
    return Launch(
        _prefill_kernel,
        programs,
        call,
        _INPUTS,
        makes,
        described={name: _described(x, config.BLOCK_N) for name, x in (("k", call.k), ("v", call.v)) if descriptors},
        sm_scale=call.sm_scale,
        softcap=call.softcap,
        window_left=call.window_left,
        window_right=call.window_right,
        q_strides=call.q.stride(),
        k_strides=None if descriptors else call.k.stride(),
        v_strides=None if descriptors else call.v.stride(),
        mask_strides=strides(call.attn_mask),
        padding_strides=strides(call.key_padding),
        bounds_strides=strides(call.key_bounds),
        sinks_strides=per_head_strides(call.sinks),
        slopes_strides=per_head_strides(call.alibi_slopes),
        offset_stride=offset_stride(call),
        o_strides=call.empty_output().stride(),
        num_heads=call.num_heads,
        total_heads=call.batch * call.num_heads,
        heads_per_section=_heads_per_section(call),
        seqlen_q=call.seqlen_q,
        seqlen_k=call.seqlen_k,
        GROUP_SIZE=call.group_size,
        HEAD_DIM=call.head_dim,
        HEAD_DIM_V=call.head_dim_v,
        PRECISION=precision,
        BLOCK_D=padded_width(call.head_dim),
        BLOCK_DV=padded_width(call.head_dim_v),
        **(done | config.options()),
    )


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


def _described(x: Tensor, rows: int) -> Described:
    """What reads ``rows`` rows of K or V."""
    block = [1, 1, rows, padded_width(x.shape[3])]
    return partial(TensorDescriptor, shape=list(x.shape), strides=list(_descriptor_strides(x)), block_shape=block)


def _descriptor_strides(x: Tensor) -> tuple[int, ...]:
    """Strides, but 16 where a dimension of size 1 leaves them without meaning."""
    outer = (16 if n == 1 else stride for n, stride in zip(x.shape[:3], x.stride(), strict=False))
    return (*outer, x.stride(3))
