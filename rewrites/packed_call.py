"""Operators of torch that run a whole attention layer, projections included: reported, and left as they are."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, Node

from attnpatch.errors import Refused
from attnpatch.graph import Writes, op
from attnpatch.rule import Rule, Site

_PACKED = {
    "multi_head_attention_forward": "sizes known only at run time keep it from being taken apart",
    "_native_multi_head_attention": "torch's fast path for inference; torch.backends.mha.set_fastpath_enabled(False) "
    "shows its attention",
    "_transformer_encoder_layer_fwd": "torch's fast path for inference; torch.backends.mha.set_fastpath_enabled(False) "
    "shows its attention",
}


def candidates(graph: Graph) -> Iterator[Node]:
    """Every call of such an operator."""
    for node in graph.nodes:
        if op(node) in _PACKED:
            yield node


def match(node: Node, writes: Writes) -> Site:
    """Refuse: there is no product to find."""
    raise Refused(f"{op(node)} runs the whole layer as one operator ({_PACKED[op(node)]})")


RULE = Rule("packed_call", candidates, match)
