"""Attention on codes, and on tokens that are kept as they were: two operators and their merge.

before   o = attention(q, with_recent(decode(codes), ring, position, new), ..)
after    rows = recent_keys(ring, position, new)
         o = merge(attention_lse(q, codes, key_bounds=the others), attention_lse(q, ring[rows], attn_mask=mask[rows]))

Positions in the ring are no run of numbers, so that all terms of the mask become one of few keys, shared by all layers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from attnpatch.graph import Writes, shape, value
from attnpatch.mask_emitter import Keys, MaskEmitter
from attnpatch.rule import Operand, Recent, Site


class Kept(NamedTuple):
    """What :func:`attnpatch.recent.recent_keys` gives."""

    keys: Node
    rows: Node
    is_token: Node
    older: Node


class RecentEmitter(MaskEmitter):
    """Builds attention that reads some tokens as they were."""

    def _attention(
        self, tensors: tuple[Any, ...], given: dict[str, Any], like: Node, wants_lse: bool
    ) -> tuple[Node, Node | None]:
        given = {name: x for name, x in {**given, **self.arguments}.items() if x is not None}
        if not wants_lse:
            return self._emit(torch.ops.attnpatch.attention.default, *tensors, like=like, **given), None
        return self._pair(torch.ops.attnpatch.attention_lse.default, *tensors, like=like, **given)

    def _pair(self, target: Any, *args: Any, like: Node, **kwargs: Any) -> tuple[Node, Node]:
        both = self._emit(target, *args, like=like, **kwargs)
        return self._emit(operator.getitem, both, 0, like=like), self._emit(operator.getitem, both, 1, like=like)

    def _of_kept(
        self, site: Site, recent: Recent, q: Node, keys: Keys, masks: dict[str, Any], kept: Kept
    ) -> tuple[Node, Node | None]:
        """Attention on tokens as they were, and its lse."""
        like = site.anchor
        k = self._as_they_were(recent.k_ring, keys.k, kept, like)
        v = self._as_they_were(recent.v_ring, keys.v, kept, like)
        given = {"attn_mask": self._mask(site, q, keys, masks, kept), "softcap": site.softcap}
        return self._attention((q, k, v, site.sm_scale), given, like, wants_lse=True)

    def _kept(self, recent: Recent, like: Node, writes: Writes) -> Kept:
        ring, position, new = recent.window
        key = ("kept", position, writes.version(position, like), new, str(shape(ring)[2]))
        if key not in self.shared:
            found = self._emit(torch.ops.attnpatch.recent_keys.default, ring, position, new, like=like)
            self.shared[key] = Kept(*(self._emit(operator.getitem, found, i, like=like) for i in range(4)))
        return self.shared[key]

    def _older(self, masks: dict[str, Any], kept: Kept, like: Node) -> Node:
        """Bounds of the other keys; see AttentionCall.key_bounds."""
        bounds, is_masked = masks["key_bounds"], masks["attn_mask"] is not None or masks["key_padding"] is not None
        key = ("older", kept, bounds, is_masked)
        if key not in self.shared:
            older = kept.older
            if bounds is not None:
                older = self._emit(torch.minimum, bounds, older, like=like)
            elif is_masked:  # by a mask that nobody has scanned: no run of keys is plainly visible
                ends = self._emit("narrow", older, 3, 0, 2, like=like)
                older = self._emit(torch.nn.functional.pad, ends, (0, 1), like=like)
            self.shared[key] = older
        return self.shared[key]

    def _as_they_were(self, ring: Operand | None, whole: Node, kept: Kept, like: Node) -> Node:
        """These tokens of K or V, of ``whole`` where that is no codes."""
        if ring is None:
            return self._emit("index_select", whole, 2, kept.keys, like=like)
        return self._emit("index_select", self._arranged(ring, like), 2, kept.rows, like=like)

    def _mask(self, site: Site, q: Node, keys: Keys, masks: dict[str, Any], kept: Kept) -> Node:
        """All terms of the mask, and alibi's, as one on these tokens."""
        like = site.anchor
        terms = (x for name, x in masks.items() if name not in ("softcap", "sinks"))
        key = ("mask of kept", kept, *terms, str(shape(q)[2]))
        if key not in self.shared:
            keep = self._fold(operator.and_, list(self._visible(site, q, keys, masks, kept)), like)
            bias = self._fold(operator.add, list(self._added(q, keys, masks, kept, like)), like)
            self.shared[key] = keep if bias is None else self._emit(torch.where, keep, bias, -torch.inf, like=like)
        return self.shared[key]

    def _visible(self, site: Site, q: Node, keys: Keys, masks: dict[str, Any], kept: Kept) -> Iterator[Node]:
        """Conditions on rows and tokens that all hold where one sees the other."""
        like, left, right = site.anchor, masks["window_left"], masks["window_right"]
        yield kept.is_token
        if right is not None:
            yield self._emit(operator.le, self._distance(q, masks, kept, like), right, like=like)
        if left is not None:
            yield self._emit(operator.ge, self._distance(q, masks, kept, like), -left, like=like)
        if site.terms.intervals:
            first, stop = (self._emit("narrow", masks["key_bounds"], 3, i, 1, like=like) for i in (0, 1))
            yield self._emit(operator.ge, kept.keys, self._emit(operator.neg, first, like=like), like=like)
            yield self._emit(operator.lt, kept.keys, stop, like=like)
        if masks["key_padding"] is not None:
            padding = self._emit("index_select", masks["key_padding"], 1, kept.keys, like=like)
            yield self._emit("unsqueeze", self._emit("unsqueeze", padding, 1, like=like), 1, like=like)
        streamed = masks["attn_mask"]
        if streamed is not None and value(streamed).dtype == torch.bool:
            yield self._at_kept(streamed, keys, kept, like)

    def _added(self, q: Node, keys: Keys, masks: dict[str, Any], kept: Kept, like: Node) -> Iterator[Node]:
        """What is added to scores."""
        streamed, slopes = masks["attn_mask"], masks["alibi_slopes"]
        if streamed is not None and value(streamed).dtype != torch.bool:
            yield self._at_kept(streamed, keys, kept, like)
        if slopes is not None:
            away = self._emit("abs", self._distance(q, masks, kept, like), like=like)
            per_head = self._emit("unsqueeze", self._emit("unsqueeze", slopes, -1, like=like), -1, like=like)
            yield self._emit(operator.neg, self._emit(operator.mul, per_head, away, like=like), like=like)

    def _at_kept(self, streamed: Node, keys: Keys, kept: Kept, like: Node) -> Node:
        if str(shape(streamed)[-1]) != str(keys.seqlen_k):  # one column for all keys
            return streamed
        return self._emit("index_select", streamed, -1, kept.keys, like=like)

    def _distance(self, q: Node, masks: dict[str, Any], kept: Kept, like: Node) -> Node:
        """How far each token lies to the right of each row, int64 ``[seqlen_q, tokens]``."""
        rows = self._emit(torch.arange, self._emit("size", q, 2, like=like), device=value(q).device, like=like)
        for offset in (masks["q_offset_tensor"], masks["q_offset"]):
            rows = rows if offset is None else self._emit(operator.add, rows, offset, like=like)
        return self._emit(operator.sub, kept.keys, self._emit("unsqueeze", rows, 1, like=like), like=like)
