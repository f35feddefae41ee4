"""Turn the masks of one attention into terms: causal, window, padding; whatever cannot be read is streamed.

and(k <= q + off, k > q + off - W, pad[b, k])  ->  q_offset=off, window_right=0, window_left=W-1, paddings=[pad]
"""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from attnpatch.affine import Affine
from attnpatch.graph import Writes, shape
from attnpatch.masking import is_excluding
from attnpatch.rewrites.expressions import (
    And,
    AtLeastZero,
    Const,
    Load,
    Not,
    Or,
    Sum,
    Unknown,
    Where,
    as_condition,
    number,
)
from attnpatch.rewrites.pullback import Pullback, broadcast
from attnpatch.rule import Streamed, Terms


class MaskReader:
    """Collects the masks of one attention as constraints on (b, h, q, k) and resolves them to terms.

    Args:
        rank: of the scores: 4 for ``[b, h, q, k]``, 3 for ``[b, q, k]``.
        seqlens: seqlen_q and seqlen_k, ints or SymInts.
        writes: the graph's in-place writes.
    """

    def __init__(self, rank: int, seqlens: tuple[Any, Any], writes: Writes) -> None:
        variables = ("b", "h", "q", "k") if rank == 4 else ("b", "q", "k")
        self.indices = tuple(Affine({v: 1}) for v in variables)
        self.seqlen_q, self.seqlen_k = seqlens
        self.pull = Pullback(writes)
        self.masks: list[Streamed] = []
        self.right: list[Affine] = []  # k <= q + bound
        self.left: list[Affine] = []  # k >= q - bound
        self.paddings: list[tuple[Node, Affine]] = []
        self.streamed: list[Streamed] = []

    def add(self, mask: Node, kind: str, factor: float = 1.0) -> None:
        """Read one mask: "additive" (times ``factor > 0``), or bool with True meaning "keep" or "hide"."""
        self.masks.append(Streamed(mask, kind, factor))
        try:
            element = self.pull.element(mask, broadcast(self.indices, mask))
            conditions = _conditions(element) if kind == "additive" else [as_condition(element)]
        except Unknown:
            conditions = [Unknown]
        if kind == "hide":
            conditions = [Not(c) for c in conditions]
        understood = [self._constrain(c) for c in conditions]  # all of them: what is a term still skips blocks
        if not all(understood):
            self.streamed.append(self.masks[-1])

    def _constrain(self, condition: Any) -> bool:
        """Take in a condition under which a key is visible; False when some part of it is not a term."""
        if isinstance(condition, And):
            return all([self._constrain(condition.left), self._constrain(condition.right)])
        if isinstance(condition, Not):
            return self._constrain_negated(condition.operand)
        if isinstance(condition, AtLeastZero):
            return self._bound(condition.expression)
        if isinstance(condition, Load):
            return self._padding(condition)
        return isinstance(condition, Const) and condition.value != 0

    def _constrain_negated(self, condition: Any) -> bool:
        if isinstance(condition, AtLeastZero):
            return self._bound(-condition.expression - 1)
        if isinstance(condition, Not):
            return self._constrain(condition.operand)
        if isinstance(condition, Or):
            return self._constrain(And(Not(condition.left), Not(condition.right)))
        return isinstance(condition, Const) and condition.value == 0

    def _bound(self, expression: Affine) -> bool:
        """``expression >= 0`` as a bound on k relative to q."""
        q, k = expression["q"], expression["k"]
        if self._is_one(self.seqlen_q):  # the only row is q = 0
            q = -k
        rest = expression.without("q", "k")
        if not rest.is_scalar:
            return False
        if (q, k) == (1, -1):
            self.right.append(rest)
        elif (q, k) == (-1, 1):
            self.left.append(rest)
        else:  # q >= 0, k >= 0 and the like hold for every index
            return min(q, k) >= 0 and rest.is_constant and rest.constant >= 0
        return True

    def _padding(self, load: Load) -> bool:
        """``load[b, first + k]`` or ``load[first + k]`` as a padding term."""
        last = load.indices[-1] - Affine({"k": 1}) if load.indices else Affine({"k": 1})
        if not last.is_scalar or len(load.indices) > 2:
            return False
        if len(load.indices) == 2 and load.indices[0] not in (Affine({"b": 1}), Affine()):
            return False
        self.paddings.append((load.node, last))
        return True

    def terms(self) -> Terms:
        """Resolve what was read; bounds that cannot be compared leave every mask streamed."""
        terms = Terms(paddings=list(dict.fromkeys(self.paddings)), streamed=self.streamed)
        try:
            self._set_band(terms)
        except Unknown:
            return Terms(streamed=self.masks)
        return terms

    def _set_band(self, terms: Terms) -> None:
        right, left = self._tightest(self.right), self._tightest(self.left)
        width = right + left if right is not None and left is not None else None
        if width is not None and not width.is_constant:
            raise Unknown(width)
        if right is not None and left is not None and self._is_symmetric(right, left):
            terms.window_right, terms.window_left = right.constant, left.constant
        elif right is not None:
            terms.q_offset, terms.window_right = right, 0
            terms.window_left = None if width is None else width.constant
        elif left is not None:
            terms.q_offset, terms.window_left = -left, 0

    def _is_symmetric(self, right: Affine, left: Affine) -> bool:
        """A band on both sides of the diagonal, an encoder's window, and not a decoder's position."""
        constants = right.is_constant and left.is_constant and right.constant > 0
        if not constants or self._is_one(self.seqlen_q):
            return False
        static = isinstance(self.seqlen_q, int) and isinstance(self.seqlen_k, int)
        return not (static and right.constant == self.seqlen_k - self.seqlen_q)

    @staticmethod
    def _is_one(size: Any) -> bool:
        return isinstance(size, int) and size == 1

    @staticmethod
    def _tightest(bounds: list[Affine]) -> Affine | None:
        """The smallest of bounds that differ by constants."""
        if not bounds:
            return None
        best = bounds[0]
        for bound in bounds[1:]:
            gap = bound - best
            if not gap.is_constant:
                raise Unknown(gap)
            best = bound if gap.constant < 0 else best
        return best


def _conditions(x: Any) -> list[Any]:
    """The conditions under which an additive mask does not exclude; raises Unknown when it also biases."""
    constant = number(x)
    if constant is not None and math.isfinite(constant) and not is_excluding(constant):
        return []  # the same for every key: softmax does not see it
    if isinstance(x, Sum):
        return _conditions(x.left) + _conditions(x.right)
    if isinstance(x, Where):
        if _excludes(x.otherwise):
            return [x.condition, *_conditions(x.then)]
        if _excludes(x.then):
            return [Not(x.condition), *_conditions(x.otherwise)]
    raise Unknown(x)


def _excludes(x: Any) -> bool:
    constant = number(x)
    return constant is not None and is_excluding(constant)


def words(terms: Terms) -> str:
    """The mask as a person says it: ``causal, window 4096, padding``."""
    said = []
    if terms.window_right == 0:
        said.append("causal")
        said += [] if terms.window_left is None else [f"window {terms.window_left + 1}"]
    elif terms.window_right is not None or terms.window_left is not None:
        left = "all" if terms.window_left is None else terms.window_left
        right = "all" if terms.window_right is None else terms.window_right
        said.append(f"window {left} left, {right} right")
    said += ["padding"] if terms.paddings else []
    for mask in terms.streamed:
        kind = "bias" if mask.kind == "additive" else "mask"
        said.append(f"streamed {kind} [{', '.join(str(s) for s in shape(mask.node))}]")
    return ", ".join(said) or "none"
