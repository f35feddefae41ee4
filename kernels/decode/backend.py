"""triton.tbq4, triton.decode, triton.append and triton.paged: what each takes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from attnpatch.attention_call import MAX_APPEND, AttentionCall, width_of
from attnpatch.dispatch import Backend
from attnpatch.kernels.common import support


def _not_tbq4(call: AttentionCall) -> str | None:
    return None if any(call.tbq4) else "neither K nor V is TBQ4 codes"


def _not_decode(call: AttentionCall) -> str | None:
    if call.block_table is not None:
        return "K lies in pages"
    if call.cu_seqlens_q is not None:
        return "the queries are packed"
    return None if call.seqlen_q == 1 else f"{call.seqlen_q} query rows; triton.decode takes one"


def _not_append(call: AttentionCall) -> str | None:
    if call.block_table is not None:
        return "K lies in pages"
    if call.cu_seqlens_q is not None or call.k_scale is not None or call.v_scale is not None:
        return None  # no other Triton kernel packs sequences or reads keys in 8 or 4 bits
    if call.seqlen_q > MAX_APPEND:
        return f"{call.seqlen_q} query rows; triton.append takes up to {MAX_APPEND}"
    return None if call.seqlen_k > call.seqlen_q else "K is not longer than q"


def _not_paged(call: AttentionCall) -> str | None:
    return "K does not lie in pages" if call.block_table is None else None


def _refuses_groups(call: AttentionCall) -> str | None:
    for name, x, shift in (("k", call.k, call.k_shift), ("v", call.v, call.v_shift)):
        if shift is None:
            continue
        groups = shift.shape[3]
        size = width_of(x) // groups
        if size % 2 or support.width_of_groups(x, shift) > support.MAX_HEAD_DIM:
            return (
                f"{name}_scale is of {groups} groups of {size} channels, which are to be even and no more than "
                f"{support.MAX_HEAD_DIM // support.SMALLEST_TILE}, each in a tile of {support.SMALLEST_TILE} at least"
            )
    return None


def _run(call: AttentionCall) -> Tensor:
    from attnpatch.kernels.decode.launch import decode  # Triton may be absent: refused above

    return decode(call)


def _backend(name: str, is_not: Callable[[AttentionCall], str | None]) -> Backend:
    def refuses(call: AttentionCall) -> str | None:
        return is_not(call) or support.refusal(call, name) or _refuses_groups(call)

    return Backend(name, support.devices(), refuses, _run)


BACKENDS = {
    "triton.tbq4": _backend("triton.tbq4", _not_tbq4),
    "triton.decode": _backend("triton.decode", _not_decode),
    "triton.append": _backend("triton.append", _not_append),
    "triton.paged": _backend("triton.paged", _not_paged),
}
