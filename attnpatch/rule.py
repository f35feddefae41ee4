"""What a rewrite rule produces: a :class:`Site`, everything the operator needs to replace one attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from attnpatch.affine import Affine
from attnpatch.axes import Dims, Step
from attnpatch.graph import Writes, arg


class Operand(NamedTuple):
    """A tensor of a site.

    Args:
        node: the tensor.
        dims: what its dimensions are.
        steps: tensor methods that bring it to the operator's layout.
    """

    node: Node
    dims: Dims
    steps: tuple[Step, ...] = ()


class Turn(NamedTuple):
    """What K or V is of what its codes stand for: ``x = factor * decode(codes)[..., order] @ matrix``.

    Args:
        factor: a positive number.
        order: int64 ``[head_dim]`` on the CPU, or None where the channels keep their order.
        matrix: orthogonal ``[head_dim, head_dim]``, float64 on the CPU, or None.
    """

    factor: float = 1.0
    order: torch.Tensor | None = None
    matrix: torch.Tensor | None = None

    @property
    def inverse(self) -> Turn:
        """What q is multiplied by instead of K, as a turn."""
        order, matrix = self.order, self.matrix
        return Turn(self.factor, None if order is None else order.argsort(), None if matrix is None else matrix.T)


class Scaling(NamedTuple):
    """What integers of 4 bits stand for, of a scale and maybe one more tensor that both have a number per group.

        integer * (step * scale) + (of_scale * scale + of_other * other + of_both * scale * other)

    Args:
        step: of the scale, where it multiplies integers.
        of_scale: in what is added.
        of_other: likewise.
        of_both: likewise, of their product: a zero point has -1.
    """

    step: float
    of_scale: float = 0.0
    of_other: float = 0.0
    of_both: float = 0.0


class Recent(NamedTuple):
    """First and recent tokens of K and V that are kept as they were; see :mod:`attnpatch.recent`.

    Args:
        k_ring: where those of K are, arranged to ``[batch, num_kv_heads, rows, head_dim]``; None where K is no codes,
            and is read itself.
        v_ring: likewise of V.
        read: the node that reads K, or V, ``with_recent(multiplied out, ring, position, new)``.
    """

    k_ring: Operand | None
    v_ring: Operand | None
    read: Node

    @property
    def window(self) -> tuple[Node, Node, Any]:
        """A ring, the position of the forward's first token and how many tokens it has: which tokens are recent."""
        ring, position = arg(self.read, 1, "ring"), arg(self.read, 2, "position")
        return ring, position, arg(self.read, 3, "new")


class Storage(NamedTuple):
    """How K and V lie in memory.

    Args:
        dtype: what attention runs in; q is cast to it, and so are k and v where they are no codes.
        block_table: ids of the pages, arranged to ``[batch, num_blocks]``; k and v are pools then.
        counts_back: whether a negative id counts from the end of the pool.
        k_scales: factors of k's codes, each arranged to three dimensions that broadcast to ``k.shape[:3]``, or a number
            as its node. None when k is not quantised; empty when its codes are its values. Of TBQ4 codes, the norms
            alone, arranged to ``[*k.shape[:3], num_blocks]``; of integers of 4 bits, what k_scaling is of.
        v_scales: likewise of v.
        k_turn: what k is of what its TBQ4 codes stand for.
        v_turn: likewise of v.
        unpacked: nodes that unpack codes, which nothing may read any more.
        kept: sentences that say why K or V is unpacked in the graph although it is made of codes.
        k_scaling: of integers of 4 bits, what they are multiplied by and what is added; None of all else.
        v_scaling: likewise of v.
        recent: tokens that are read as they were, not as what their codes stand for; None = there are none.
    """

    dtype: torch.dtype
    block_table: Operand | None = None
    counts_back: bool = False
    k_scales: list[Operand] | None = None
    v_scales: list[Operand] | None = None
    k_turn: Turn = Turn()
    v_turn: Turn = Turn()
    unpacked: tuple[Node, ...] = ()
    kept: tuple[str, ...] = ()
    k_scaling: Scaling | None = None
    v_scaling: Scaling | None = None
    recent: Recent | None = None


@dataclass(frozen=True)
class Streamed:
    """A mask that stays a tensor.

    Args:
        mask: the mask, its steps leading to ``[batch, heads, seqlen_q, seqlen_k]`` or to sizes of 1 there.
        kind: "additive", or bool with True meaning "keep" or "hide".
        factor: multiplies an additive mask.
    """

    mask: Operand
    kind: str
    factor: float = 1.0

    @property
    def node(self) -> Node:
        """The mask as the graph has it."""
        return self.mask.node


@dataclass
class Terms:
    """A mask as terms over query row q and key k; see :mod:`attnpatch.attention_call`.

    ``q_offset`` is an integer-valued scalar expression (:class:`attnpatch.affine.Affine`). ``paddings``
    are ``(node, first column)`` pairs: ``node[b, first column + k]`` is nonzero for real keys. ``intervals``
    (:class:`attnpatch.rewrites.intervals.Interval`) are one run of keys per row each. ``alibi`` are slopes, a node of
    ``[num_heads]``, and the factor on them.
    """

    q_offset: Affine = field(default_factory=Affine)
    window_left: int | None = None
    window_right: int | None = None
    paddings: list[tuple[Node, Any]] = field(default_factory=list)
    intervals: list[Any] = field(default_factory=list)
    alibi: tuple[Node, float] | None = None
    streamed: list[Streamed] = field(default_factory=list)


@dataclass
class Site:
    """One attention found in a graph.

    Args:
        anchor: the node whose value is attention's output; the operator goes right before it.
        q: query, arranged to ``[batch, num_heads, seqlen_q, head_dim]`` by its steps.
        k: key, not repeated, arranged to ``[batch, num_kv_heads, seqlen_k, head_dim]``, or to
            ``[num_pages, num_kv_heads, page_size, head_dim]`` where it lies in pages.
        v: value, not repeated.
        storage: how both lie in memory.
        sizes: num_heads, num_kv_heads and head_dim.
        sm_scale: constant factor on q.k.
        terms: the mask.
        output: steps from the operator's output to the anchor's layout.
        softcap: cap on the scaled scores.
        scales: further factors on q.k as operands that broadcast to q, with "mul" or "div".
        sinks: one more logit per head in softmax's denominator: a node of ``[num_heads]`` or a number.
        lse: the node that reads the logsumexp of the scores, and the steps from ``[batch, num_heads, seqlen_q]``.
        before: where the operator goes, if not right before the anchor: the logsumexp may be read earlier.
        readers: for scalars of ``terms.q_offset`` that live in tensors, the node that reads their value.
        interior: nodes between the first product and the anchor, which nobody else may read.
        reads: (tensor, the node that reads it) for q, k, v, ids of pages and tensors that scale; writes after a read
            would change what is computed.
    """

    anchor: Node
    q: Operand
    k: Operand
    v: Operand
    storage: Storage
    sizes: tuple[Any, Any, Any]
    sm_scale: float
    terms: Terms
    output: tuple[Step, ...] = ()
    softcap: float | None = None
    scales: list[tuple[Operand, str]] = field(default_factory=list)
    sinks: Node | float | None = None
    lse: Operand | None = None
    before: Node | None = None
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
