"""Which keys a tile of query rows can see, for backends that loop on the host."""

from __future__ import annotations

from torch import Tensor

from attnpatch.attention_call import AttentionCall


def key_range(call: AttentionCall, first_row: int, last_row: int) -> tuple[int, int]:
    """Keys ``[low, high)`` that some row of ``first_row..last_row`` may see under the band.

    A ``q_offset`` tensor is read on the host: on a GPU that waits for the device.
    """
    first_offset, last_offset = _offset_bounds(call.q_offset)
    low = 0 if call.window_left is None else max(0, first_row + first_offset - call.window_left)
    high = call.seqlen_k
    if call.window_right is not None:
        high = max(0, min(high, last_row + last_offset + call.window_right + 1))
    return min(low, high), high


def _offset_bounds(q_offset: int | Tensor) -> tuple[int, int]:
    """Smallest and largest offset of any sequence."""
    if isinstance(q_offset, Tensor):
        return int(q_offset.min()), int(q_offset.max())
    return q_offset, q_offset
