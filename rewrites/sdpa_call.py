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
from attnpatch.axes import Axes, Dims
from attnpatch.errors import Refused
from attnpatch.graph import Writes, arg, is_tensor, op, shape, value
from attnpatch.rewrites.arrangement import Arrangement, Roles
from attnpatch.rewrites.mask_terms import MaskReader
from attnpatch.rewrites.operands import Reading, said
from attnpatch.rewrites.pullback import Pullback
from attnpatch.rule import Operand, Rule, Site

_DEFAULTS: dict[str, Any] = {
    "query": None,
    "key": None,
    "value": None,
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
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
    axes = Axes()
    q, k, v, roles = _operands(axes, a)
    reading = Reading(writes, (q.node, k.node, v.node), (node,) * 3, node)
    plan = Arrangement(axes, q, k, v, roles, reading)
    masks = MaskReader(axes, plan.layout, plan.seqlens, Pullback(writes, node))
    if a["is_causal"] is True:
        masks.right.append(Affine())  # torch aligns is_causal upper-left, whatever the lengths
    if a["attn_mask"] is not None:
        kind = "keep" if value(a["attn_mask"]).dtype == torch.bool else "additive"
        masks.add(a["attn_mask"], kind, 1.0, axes.resolve((*roles.shared, *roles.rows, roles.key)))
    constant, scales = _scale(a["scale"], q.node)
    out = axes.resolve((*roles.shared, *roles.rows, roles.feature_v))
    output = tuple(axes.plan((*plan.layout[:3], plan.feature_v), out))
    return Site(
        node, plan.q, plan.k, plan.v, plan.storage, plan.sizes, constant, masks.terms(), output,
        scales=scales, readers=masks.pull.readers, interior=[node], reads=plan.reads,
    )  # fmt: skip


def _operands(axes: Axes, a: dict[str, Any]) -> tuple[Operand, Operand, Operand, Roles]:
    """q, k and v as given, ``[..., seqlen, head_dim]``; with ``enable_gqa`` K and V have fewer heads."""
    q, k, v = a["query"], a["key"], a["value"]
    if not len(shape(q)) == len(shape(k)) == len(shape(v)) or len(shape(q)) < 3:
        raise Refused(f"q {said(shape(q))}, k {said(shape(k))} and v {said(shape(v))} differ in rank")
    lead = tuple((axes.new(size),) for size in shape(q)[:-2])
    row, key, feature, feature_v = ((axes.new(n),) for n in (*shape(q)[-2:-1], *shape(k)[-2:], shape(v)[-1]))
    own = [_lead(axes, lead, x, bool(a["enable_gqa"])) for x in (k, v)]
    return (
        Operand(q, (*lead, row, feature)),
        Operand(k, (*own[0], key, feature)),
        Operand(v, (*own[1], key, feature_v)),
        Roles(lead, (row,), key, feature, feature_v),
    )


def _lead(axes: Axes, lead: Dims, x: Node, grouped: bool) -> Dims:
    """The leading dims of K or V: those of q, () where it broadcasts, the outer part of the heads of a group."""
    heads, mine = lead[-1][0], shape(x)[-3]
    if grouped and heads in axes.sizes and axes.sizes[heads] != mine:
        axes.split(heads, (mine, axes.sizes[heads] // mine))
    dims = axes.resolve(lead)
    dims = (*dims[:-1], dims[-1][:1]) if grouped else dims
    sizes = zip(dims, shape(x)[:-2], strict=True)
    return tuple(() if isinstance(n, int) and n == 1 and axes.sizes[dim[0]] != 1 else dim for dim, n in sizes)


def _scale(scale: Any, q: Node) -> tuple[float, list[tuple[Operand, str]]]:
    if isinstance(scale, Node):
        return 1.0, [(Operand(scale, ()), "mul")]
    return (float(shape(q)[-1]) ** -0.5 if scale is None else float(scale)), []


RULE = Rule("sdpa_call", candidates, match)
