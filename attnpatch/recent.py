"""Tokens that a cache of codes also keeps as they were: the first ones, and a window of the most recent.

They lie in a ring ``[batch, num_kv_heads, FIRST + size, head_dim]``: position ``p`` in row ``p`` where it is one of the
first, else in row ``FIRST + (p - FIRST) % size``. It has room for the window and for MAX_APPEND tokens, so that as many
can be taken back, or stored by one forward, without losing a token of the window.

``with_recent`` is K or V as a forward reads it: rows of the ring where they are kept, what codes stand for elsewhere. A
rewritten graph has two attentions instead, on codes and on the rows that ``recent_keys`` names, and merges them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnpatch.attention_call import MAX_APPEND

FIRST = 4
"""Tokens at the front that stay: all queries look at them, and their keys lie far from the mean of all."""

SCHEMAS = (
    "with_recent(Tensor stored, Tensor ring, Tensor position, SymInt new) -> Tensor",
    "recent_keys(Tensor ring, Tensor position, SymInt new) -> (Tensor, Tensor, Tensor, Tensor)",
)


def rows_for(recent: int) -> int:
    """Rows of a ring that keeps a window of so many tokens."""
    return FIRST + recent + MAX_APPEND


def window_of(num_rows: int) -> int:
    """Tokens of the window that a ring of so many rows keeps."""
    return num_rows - FIRST - MAX_APPEND


def with_recent(stored: Tensor, ring: Tensor, position: Tensor, new: int) -> Tensor:
    """K or V of a sequence, its first tokens and those of the window as they were.

    The window is that of the forward's first token: its own position and those just before, and the tokens that follow
    it in the same forward. What lies behind them is no token: a graph that is rewritten does not read it.

    Args:
        stored: ``[batch, num_kv_heads, seqlen_k, head_dim]``, what the codes stand for.
        ring: ``[batch, num_kv_heads, num_rows, head_dim]``, with these tokens.
        position: int64 ``[]``, of the forward's first token.
        new: its tokens; 0 where they are not in the ring.

    Returns:
        A new tensor like ``stored``.
    """
    return torch.ops.attnpatch.with_recent(stored, ring, position, new)


def _with_recent(stored: Tensor, ring: Tensor, position: Tensor, new: int) -> Tensor:
    keys = torch.arange(stored.shape[2], device=stored.device)
    kept = (keys < FIRST) | (keys >= _begin(position, ring.shape[2]))
    kept = kept & (keys < position + new)
    return torch.where(kept[:, None], ring.index_select(2, _rows(keys, ring.shape[2])), stored)


def recent_keys(ring: Tensor, position: Tensor, new: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a ring keeps for a forward.

    Args:
        ring: ``[batch, num_kv_heads, num_rows, head_dim]``.
        position: int64 ``[]``, of the forward's first token.
        new: its tokens, in the ring already.

    Returns:
        The positions, int64 ``[n]`` for ``n = FIRST + window - 1 + new``, which repeat the last one where there are
        fewer. Their rows of the ring, int64 ``[n]``. Which are none of the repetitions, bool ``[n]``. And the other
        keys, before the window, as int32 ``[1, 1, 1, 3]`` of :attr:`attnpatch.attention_call.AttentionCall.key_bounds`.
    """
    return torch.ops.attnpatch.recent_keys(ring, position, new)


def _recent_keys(ring: Tensor, position: Tensor, new: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = ring.shape[2]
    begin, last = _begin(position, num_rows), position + (new - 1)
    keys = torch.arange(FIRST + window_of(num_rows) - 1 + new, device=position.device)
    keys = torch.where(keys < FIRST, keys, keys - FIRST + begin)
    others = torch.stack((torch.full_like(begin, -FIRST), begin, torch.ones_like(begin))).to(torch.int32)
    tokens = keys.minimum(last)
    return tokens, _rows(tokens, num_rows), keys <= last, others.view(1, 1, 1, 3)


def _begin(position: Tensor, num_rows: int) -> Tensor:
    """The first position of the window of a forward that begins at ``position``, behind the first tokens."""
    return (position - (window_of(num_rows) - 1)).clamp(min=FIRST)


def _rows(positions: Tensor, num_rows: int) -> Tensor:
    """Rows of the ring in which positions lie."""
    return torch.where(positions < FIRST, positions, FIRST + (positions - FIRST) % (num_rows - FIRST))


COMPOSITES: dict[str, Callable[..., Any]] = {"with_recent": _with_recent, "recent_keys": _recent_keys}
"""Operators that are what their operations are, on every device and with gradients."""
