"""What a rewrite rule produces: a :class:`Site`, everything the operator needs to replace one attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from attnpatch.affine import Affine
from attnpatch.graph import Writes


@dataclass(frozen=True)
class Streamed:
    """A mask that stays a tensor.

    Args:
        node: the mask, broadcastable to the scores.
        kind: "additive", or bool with True meaning "keep" or "hide".
        factor: multiplies an additive mask.
    """

    node: Node
    kind: str
    factor: float = 1.0


@dataclass
class Terms:
    """A mask as terms over query row q and key k; see :mod:`attnpatch.attention_call`.

    ``q_offset`` is an integer-valued scalar expression (:class:`attnpatch.affine.Affine`). ``paddings``
    are ``(node, first column)`` pairs: ``node[b, first column + k]`` is nonzero for real keys.
    """

    q_offset: Affine = field(default_factory=Affine)
    window_left: int | None = None
    window_right: int | None = None
    paddings: list[tuple[Node, Any]] = field(default_factory=list)
    streamed: list[Streamed] = field(default_factory=list)


@dataclass
class Site:
    """One attention found in a graph.

    Args:
        anchor: the node whose value is attention's output; the operator goes right before it.
        q: query node.
        k: key node, not repeated, ``[..., seqlen_k, head_dim]``.
        v: value node, not repeated.
        sm_scale: constant factor on q.k.
        terms: the mask.
        softcap: cap on the scaled scores.
        k_is_transposed: whether ``k`` is ``[..., head_dim, seqlen_k]``.
        symbolic_scale: further factors on q.k, as nodes (SymFloat, tensors of one element) with "mul" or "div".
        readers: for scalars of ``terms.q_offset`` that live in tensors, the node that reads their value.
        interior: nodes between the first product and the anchor, which nobody else may read.
        reads: (tensor, the node that reads it) for q, k, v and tensors that scale; writes after a read would change
            what is computed.
    """

    anchor: Node
    q: Node
    k: Node
    v: Node
    sm_scale: float
    terms: Terms
    softcap: float | None = None
    k_is_transposed: bool = False
    symbolic_scale: list[tuple[Node, str]] = field(default_factory=list)
    readers: dict[Node, Node] = field(default_factory=dict)
    interior: list[Node] = field(default_factory=list)
    reads: list[tuple[Node, Node]] = field(default_factory=list)


@dataclass(frozen=True)
class Rule:
    """A way attention is written.

    Args:
        name: what it matches, as reports show it.
        candidates: nodes of the graph that may be such an attention. Each ends in the report.
        match: the site at a candidate.
            Raises :class:`attnpatch.errors.Refused` with a sentence when it cannot be folded exactly.
    """

    name: str
    candidates: Callable[[Any], Iterator[Node]]
    match: Callable[[Node, Writes], Site]
