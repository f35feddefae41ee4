"""triton.decode: what it takes."""

from __future__ import annotations

from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.dispatch import Backend
from attnpatch.kernels.common import support


def _refuses(call: AttentionCall) -> str | None:
    if call.seqlen_q != 1:
        return f"{call.seqlen_q} query rows; triton.decode takes one"
    return support.refusal(call, "triton.decode")


def _run(call: AttentionCall) -> Tensor:
    from attnpatch.kernels.decode.launch import decode  # Triton may be absent: refused above

    return decode(call)


BACKENDS = {"triton.decode": Backend("triton.decode", support.devices(), _refuses, _run)}
