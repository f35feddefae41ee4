"""Which keys a tile of query rows can see, for backends that loop on the host; bounds and offsets are read there."""

from __future__ import annotations

from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.masking import without_repeats


def without_idle_terms(call: AttentionCall) -> AttentionCall:
    """The call without what its ``key_bounds`` say is idle: masks where every row is plain, bounds that hide nothing.

    Reads the bounds on the host: on a GPU that waits for the device.
    """
    if call.key_bounds is None or call.key_bounds.numel() == 0:
        return call
    minus_first, stop, plain = without_repeats(call.key_bounds).flatten(end_dim=2).amin(dim=0).tolist()
    if plain:
        call = call._replace(attn_mask=None, key_padding=None)
    return call._replace(key_bounds=None) if minus_first >= 0 and stop >= call.seqlen_k else call


def key_range(call: AttentionCall, first_row: int, last_row: int) -> tuple[int, int]:
    """Keys ``[low, high)`` that some row of ``first_row..last_row`` may see under the band and the bounds.

    A ``q_offset`` tensor and ``key_bounds`` are read on the host: on a GPU that waits for the device.
    """
    first_offset, last_offset = _offset_bounds(call.q_offset)
    low = 0 if call.window_left is None else max(0, first_row + first_offset - call.window_left)
    high = call.seqlen_k
    if call.window_right is not None:
        high = max(0, min(high, last_row + last_offset + call.window_right + 1))
    if call.key_bounds is not None and call.key_bounds.numel() > 0:
        rows = without_repeats(call.key_bounds[:, :, first_row : last_row + 1])
        minus_first, stop, _ = rows.flatten(end_dim=2).amax(dim=0).tolist()
        low, high = max(low, -minus_first), max(0, min(high, stop))
    return min(low, high), high


def _offset_bounds(q_offset: int | Tensor) -> tuple[int, int]:
    """Smallest and largest offset of any sequence."""
    if isinstance(q_offset, Tensor):
        return int(q_offset.min()), int(q_offset.max())
    return q_offset, q_offset
