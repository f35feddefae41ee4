"""triton.prefill: what it takes."""

from __future__ import annotations

from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.dispatch import Backend
from attnpatch.kernels.common import support
from attnpatch.kernels.dense import storage_refusal


def _refuses(call: AttentionCall) -> str | None:
    return support.refusal(call, "triton.prefill") or storage_refusal(call, "triton.prefill")


def _run(call: AttentionCall) -> Tensor:
    from attnpatch.kernels.prefill.launch import prefill  # Triton may be absent: refused above

    return prefill(call)


BACKENDS = {"triton.prefill": Backend("triton.prefill", support.devices(), _refuses, _run)}
