"""Calls of torch's scaled_dot_product_attention, most often fed by a repeat and a materialised mask.

before   o = scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=<bool [b, 1, q, k]>, scale=c)
after    o = attnpatch::attention(q, k, v, c, mask terms)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from attnpatch.affine import Affine
from attnpatch.errors import Refused
from attnpatch.graph import Writes, arg, is_tensor, op, shape, value
from attnpatch.rewrites.mask_terms import MaskReader
from attnpatch.rewrites.operands import check_shapes, peel, read, unrepeated
from attnpatch.rule import Rule, Site

_DEFAULTS: dict[str, Any] = {
    "query": None,
    "key": None,
    "value": None,
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
}


def candidates(graph: Graph) -> Iterator[Node]:
    """Every call."""
    for node in graph.nodes:
        if op(node) == "scaled_dot_product_attention" and is_tensor(node):
            yield node


def match(node: Node, writes: Writes) -> Site:
    """The site of an SDPA call."""
    a = {name: arg(node, i, name, default) for i, (name, default) in enumerate(_DEFAULTS.items())}
    if a["dropout_p"]:
        raise Refused(f"dropout_p={a['dropout_p']} is active; fused attention has no dropout")
    q, k, v = peel(a["query"]), *unrepeated(a["key"], a["value"])
    scores = [*shape(q)[:-1], shape(k)[-2]]
    masks = MaskReader(len(scores), (scores[-2], scores[-1]), writes)
    if a["is_causal"] is True:
        masks.right.append(Affine())  # torch aligns is_causal upper-left, whatever the lengths
    if a["attn_mask"] is not None:
        masks.add(a["attn_mask"], "keep" if value(a["attn_mask"]).dtype == torch.bool else "additive")
    check_shapes(q, shape(k), v, k, node, node)
    constant, symbolic = _scale(a["scale"], q)
    reads = [read(x, a[name], node) for x, name in ((q, "query"), (k, "key"), (v, "value"))]
    return Site(
        node, q, k, v, constant, masks.terms(), None, False, symbolic, masks.pull.readers, [node], reads
    )  # fmt: skip


def _scale(scale: Any, q: Node) -> tuple[float, list[tuple[Node, str]]]:
    if isinstance(scale, Node):
        return 1.0, [(scale, "mul")]
    return (float(shape(q)[-1]) ** -0.5 if scale is None else float(scale)), []


RULE = Rule("sdpa_call", candidates, match)
