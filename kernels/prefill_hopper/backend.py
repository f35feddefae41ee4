"""triton.prefill_hopper: what it takes."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.dispatch import Backend
from attnpatch.kernels.common import support
from attnpatch.kernels.dense import storage_refusal

NAME = "triton.prefill_hopper"


def _refuses(call: AttentionCall) -> str | None:
    return support.refusal(call, NAME) or storage_refusal(call, NAME) or _chip(call) or _terms(call) or _places(call)


def _chip(call: AttentionCall) -> str | None:
    major, minor = support.capability(call.q.device)
    if major != 9:
        return f"compute capability {major}.{minor} is not 9.0, whose warpgroup products it is written for"
    if call.q.dtype == torch.float32:
        return "float32 is multiplied exactly by triton.prefill"
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        return "this Triton has no Gluon (pip install 'triton>=3.6')"
    return None


def _terms(call: AttentionCall) -> str | None:
    return None if call.attn_mask is None else "a mask is read by triton.prefill"


def _places(call: AttentionCall) -> str | None:
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        outer = [s for n, s in zip(x.shape[:3], x.stride(), strict=False) if n > 1]
        if x.numel() == 0 or x.stride(3) != 1 or any(s <= 0 or s * x.element_size() % 16 for s in outer):
            return f"{name} of strides {x.stride()} is nothing that TMA reads"
    return None


def _run(call: AttentionCall) -> Tensor:
    from attnpatch.kernels.prefill_hopper.launch import prefill_hopper  # Triton may be absent: refused above

    return prefill_hopper(call)


BACKENDS = {NAME: Backend(NAME, ("cuda",), _refuses, _run)}
"""The backend of this folder."""
