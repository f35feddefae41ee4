"""triton.prefill_hopper, and triton.prefill_fp8, which is its kernel on 8 bit floats: what they take."""

from __future__ import annotations

import importlib.metadata
from functools import cache

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.dispatch import FP8, Backend
from attnpatch.kernels.common import support
from attnpatch.kernels.dense import storage_refusal

NAME = "triton.prefill_hopper"

FP8_WIDTHS = (64, 128, 256)
"""Of heads that are multiplied as 8 bit floats."""

MAX_BATCH, MAX_HEADS = 1 << 15, 1 << 16
"""Of an entry of the table of tiles, which has 16 bits for each."""

GLUON = ("3.6", "3.7", "3.8", "3.9")
"""Versions of Triton for whose Gluon the kernel is written: Gluon is experimental, and changes."""


def _refuses(call: AttentionCall) -> str | None:
    storage = storage_refusal(call, NAME, packed=True)
    return support.refusal(call, NAME) or _chip(call) or storage or _terms(call) or _places(call)


def _chip(call: AttentionCall) -> str | None:
    major, minor = support.capability(call.q.device)
    if torch.version.hip is not None:  # whose chips have such numbers, too
        return "its warpgroup products are those of NVIDIA's chips"
    if (major, minor) != (9, 0):
        return f"compute capability {major}.{minor} is not 9.0, whose warpgroup products it is written for"
    if _triton() not in GLUON:
        return f"it is written in Gluon of Triton {GLUON[0]} to {GLUON[-1]}, not {_triton()}"
    return None


@cache
def _triton() -> str:
    """The first two numbers of its version; it is not imported."""
    try:
        return ".".join(importlib.metadata.version("triton").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:  # of a nightly build, which has another name
        return "an unknown version"


def _terms(call: AttentionCall) -> str | None:
    if call.q.dtype == torch.float32:
        return "float32 is multiplied exactly by triton.prefill alone"
    if call.attn_mask is not None and call.attn_mask.dtype != torch.bool:
        return f"an attn_mask, here {call.attn_mask.dtype}, is streamed by triton.prefill alone"
    if call.batch == 0:
        return "no sequence is packed"
    if call.attn_mask is not None and call.key_bounds is None and call.num_heads > 1 and call.attn_mask.stride(1) != 0:
        return "an attn_mask of its own for each head comes without key_bounds, and a scan of it takes too long"
    if call.batch >= MAX_BATCH or call.num_heads >= MAX_HEADS:
        return f"{call.batch} sequences of {call.num_heads} heads are not below {MAX_BATCH} of {MAX_HEADS}"
    return None


def _places(call: AttentionCall) -> str | None:
    """TMA wants rows of neighbours, all other strides in multiples of 16 bytes, and nothing expanded."""
    for name, x in _named(call):
        if x.numel() == 0:
            return f"{name} {tuple(x.shape)} is empty"
        outer = [stride for n, stride in zip(x.shape[:3], x.stride(), strict=False) if n > 1]
        if x.stride(3) != 1 or any(stride <= 0 or stride * x.element_size() % 16 for stride in outer):
            return f"{name} has strides {x.stride()}; TMA reads rows of neighbours, multiples of 16 bytes apart"
    if call.head_dim_v * call.q.element_size() % 16:
        return f"head_dim_v {call.head_dim_v} is no multiple of 8, so that TMA cannot write each head's rows"
    return None


def _run(call: AttentionCall) -> Tensor:
    from attnpatch.kernels.prefill_hopper.launch import prefill_hopper  # Triton may be absent: refused above

    return prefill_hopper(call)


def _fp8_refuses(call: AttentionCall) -> str | None:
    storage = storage_refusal(call, FP8)
    return support.refusal(call, FP8) or _chip(call) or storage or _fp8_terms(call) or _fp8_sizes(call)


def _fp8_terms(call: AttentionCall) -> str | None:
    if not call.asks_for_fp8:
        return "it rounds to 8 bit floats, and runs only prefills of which prefill_dtype='fp8' allows that"
    return _terms(call)


def _fp8_sizes(call: AttentionCall) -> str | None:
    if call.head_dim != call.head_dim_v or call.head_dim not in FP8_WIDTHS:
        widths = ", ".join(map(str, FP8_WIDTHS))
        return f"head_dim {call.head_dim} by {call.head_dim_v} is none of {widths}, the same for k and v"
    return next((f"{name} {tuple(x.shape)} is empty" for name, x in _named(call) if x.numel() == 0), None)


def _named(call: AttentionCall) -> tuple[tuple[str, Tensor], ...]:
    return ("q", call.q), ("k", call.k), ("v", call.v)


def _run_fp8(call: AttentionCall) -> Tensor:
    from attnpatch.kernels.prefill_hopper.fp8 import prefill_fp8

    return prefill_fp8(call)


BACKENDS = {
    NAME: Backend(NAME, ("cuda",), _refuses, _run),
    FP8: Backend(FP8, ("cuda",), _fp8_refuses, _run_fp8),
}
"""Those of this folder."""
