"""Masks whose rows see one run of keys, ``first <= k < stop``, with edges that cost O(seqlen): no mask is ever built.

    (k - p) // c == (q - p) // c                    chunks             first = (q - p) // c * c + p, stop = first + c
    ids[k] == ids[q], ids a running sum             packed documents   edges by binary search in ids
    k <= q or (ids[k] == ids[q] and ids[q] >= 0)    blocks that look ahead: causal, and all of one's own block
    k <= q or k < n                                 a prefix that all see

The conjunction of two runs is a run. The disjunction is one when both start at the first key, or both hold the row's
own position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from attnpatch.affine import Affine
from attnpatch.edges import Chosen, Edge, Floor, Latest, Search, Smallest
from attnpatch.graph import arg, normal_dim, op, shape, value
from attnpatch.mask_words import conjunction, disjunction
from attnpatch.rewrites.expressions import And, AtLeastZero, Const, Equal, FloorDiv, Load, Not, Or, negation

Q, K = Affine({"q": 1}), Affine({"k": 1})

BEHIND_EVERY_KEY = 2**30


@dataclass(frozen=True)
class Interval:
    """One run of keys per row.

    Args:
        first: edge, None for the first key.
        stop: edge, None for the end of K.
        own: what a row's position is, less q, if the run holds it or is empty; None if it may not hold it.
        word: what such a mask is called; empty when it hides nothing.
    """

    first: Edge | None = None
    stop: Edge | None = None
    own: Affine | None = None
    word: str = ""


class NoInterval(Exception):
    """Rows may see keys that are no run."""


def interval(condition: Any) -> Interval:
    """The run of keys for which ``condition`` on (b, q, k) holds.

    Raises:
        NoInterval: it may be no run, or nothing proves that it is.
    """
    if isinstance(condition, And):
        return _both(condition.left, condition.right)
    if isinstance(condition, Or):
        return _either(interval(condition.left), interval(condition.right))
    if isinstance(condition, Not) and isinstance(condition.operand, (And, Or, Not, AtLeastZero)):
        return interval(_pushed(condition.operand))
    if isinstance(condition, AtLeastZero):
        return _bound(condition.expression)
    if isinstance(condition, Equal):
        return _equal(condition.left, condition.right)
    if isinstance(condition, Const) and condition.value:
        return Interval()
    raise NoInterval


def _pushed(x: Any) -> Any:
    """``not x`` with the negation pushed inwards."""
    if isinstance(x, AtLeastZero):
        return AtLeastZero(-x.expression - 1)
    if isinstance(x, Not):
        return x.operand
    kind = Or if isinstance(x, And) else And
    return kind(negation(x.left), negation(x.right))


def _both(left: Any, right: Any) -> Interval:
    """A conjunction; a condition on the row alone empties the other's run where it does not hold."""
    for guard, other in ((left, right), (right, left)):
        if isinstance(guard, AtLeastZero) and not guard.expression["k"]:
            return _guarded(guard.expression, interval(other))
    a, b = interval(left), interval(right)
    first = _joined(Latest, a.first, b.first)
    words = (_left_word(x, y) or x.word for x, y in ((a, b), (b, a)))
    return Interval(first, _joined(Smallest, a.stop, b.stop), _same_own(a, b), conjunction(*words))


def _guarded(condition: Affine, run: Interval) -> Interval:
    """``run`` in rows where ``condition >= 0``; elsewhere it begins behind every key and ends before the first."""
    if run.stop is None:
        raise NoInterval
    first = Chosen(condition, Affine() if run.first is None else run.first, BEHIND_EVERY_KEY)
    word = run.word if run.word == "blocks" else f"{run.word} in some rows"  # which are in a block, their ids say
    return Interval(first, Chosen(condition, run.stop, 0), run.own, word)


def _either(a: Interval, b: Interval) -> Interval:
    from_start = a.first is None and b.first is None
    if not from_start and _same_own(a, b) is None:
        raise NoInterval
    first = None if a.first is None or b.first is None else Smallest(a.first, b.first)
    stop = None if a.stop is None or b.stop is None else Latest(a.stop, b.stop)
    return Interval(first, stop, _same_own(a, b), disjunction(a.word, b.word))


def _joined(kind: Any, a: Edge | None, b: Edge | None) -> Edge | None:
    return kind(a, b) if a is not None and b is not None else (b if a is None else a)


def _same_own(a: Interval, b: Interval) -> Affine | None:
    """The row's own position, if both hold it."""
    return next((x.own for x, y in ((a, b), (b, a)) if x.own is not None and _holds(y, x.own)), None)


def _holds(run: Interval, own: Affine) -> bool:
    """Whether ``run`` holds ``q + own``, by itself or as a bound on the left of it."""
    if run.own == own or (run.first is None and run.stop is None):
        return True
    gap = _gap(run, own)
    return gap is not None and gap >= 0


def _gap(run: Interval, own: Affine) -> int | None:
    """How far the first key of a run without an end lies to the left of ``q + own``, where that is a number."""
    gap = Q + own - run.first if isinstance(run.first, Affine) and run.stop is None else None
    return gap.constant if gap is not None and gap.is_constant else None


def _left_word(run: Interval, other: Interval) -> str:
    """``window 5`` for a bound on the left of ``other``'s rows."""
    gap = None if other.own is None else _gap(run, other.own)
    return "" if gap is None or gap < 0 else f"window {gap + 1}"


def _bound(expression: Affine) -> Interval:
    """``expression >= 0`` with k in it: one edge. The row's own position is where a causal bound says."""
    if expression["k"] == -1:  # k <= rest
        rest = expression + K
        causal = rest["q"] == 1
        word = "causal" if causal else _edge_word("prefix", rest + 1, "bounded")
        return Interval(None, rest + 1, rest - Q if causal else None, word)
    if expression["k"] == 1:
        return Interval(K - expression, None, None, _edge_word("from", K - expression, "bounded left"))
    raise NoInterval


def _edge_word(word: str, edge: Affine, by_row: str) -> str:
    """``word`` and what the edge is: ``prefix 5``, ``prefix per sequence``; ``by_row`` where it depends on the row."""
    loads = [i for atom in edge.coefficients if isinstance(atom, Load) for i in atom.indices]
    if edge["q"] or any(i["q"] for i in loads):
        return by_row
    if edge.is_constant:
        return f"{word} {edge.constant}"
    per = next((name for variable, name in (("h", "head"), ("b", "sequence")) if any(i[variable] for i in loads)), "")
    return f"{word} per {per}" if per else word


def _equal(left: Any, right: Any) -> Interval:
    if isinstance(left, FloorDiv) and isinstance(right, FloorDiv) and left.divisor == right.divisor:
        return _chunk(left, right)
    if isinstance(left, Load) and isinstance(right, Load) and left.node is right.node:
        return _same_id(left, right)
    raise NoInterval


def _chunk(left: FloorDiv, right: FloorDiv) -> Interval:
    """``(k + s) // c == (q + t) // c``."""
    of_k, of_q = (left, right) if left.numerator["k"] else (right, left)
    shift = of_k.numerator - K
    if of_k.numerator["k"] != 1 or shift["q"] or of_q.numerator["k"] or of_q.numerator["q"] not in (0, 1):
        raise NoInterval
    floor = Floor(of_q.numerator, of_k.divisor)
    own = of_q.numerator - shift - Q if of_q.numerator["q"] else None  # a single row is always at q = 0
    return Interval((floor, -shift), (floor, -shift + of_k.divisor), own, f"chunk {of_k.divisor}")


def _same_id(left: Load, right: Load) -> Interval:
    """``ids[b, k + s] == ids[b, q + t]`` where equal ids are neighbours."""
    of_k, of_q = (left, right) if left.indices[-1]["k"] else (right, left)
    shift, row = of_k.indices[-1] - K, of_q.indices[-1]
    same_rest = of_k.indices[:-1] == of_q.indices[:-1] and len(of_k.indices) in (1, 2)
    if of_k.indices[-1]["k"] != 1 or row["q"] not in (0, 1) or row["k"] or shift != Affine() or not same_rest:
        raise NoInterval
    runs = is_running_sum(of_k.node)
    if not runs and not numbers_runs(of_k.node):
        raise NoInterval
    first, stop = (Search(of_k.node, row, right=r, by_runs=not runs) for r in (False, True))
    return Interval(first, stop, row - Q if row["q"] else None, "documents" if runs else "blocks")


def is_running_sum(node: Any) -> bool:
    """Whether ``node`` is a cumsum of what cannot be negative along its last dimension: it never falls."""
    while op(node) in ("sub", "add", "to", "int", "long", "contiguous") and isinstance(node.args[0], Node):
        if not _is_wide(node) or (op(node) in ("sub", "add") and not isinstance(node.args[1], int)):
            return False
        node = node.args[0]
    if op(node) != "cumsum" or not _is_wide(node):
        return False
    return normal_dim(node, arg(node, 1, "dim")) == len(shape(node)) - 1 and _is_flag(arg(node, 0, "input"))


def _is_wide(node: Node) -> bool:
    """Whether numbers up to the length of any sequence do not wrap."""
    return value(node).dtype in (torch.int32, torch.int64)


def _is_flag(node: Any) -> bool:
    """Whether ``node`` holds truth values, cast or not."""
    while op(node) in ("to", "int", "long", "float"):
        node = arg(node, 0, "input")
    return value(node).dtype == torch.bool


def numbers_runs(node: Any) -> bool:
    """``where(c, cumsum(c & ~previous(c)) - 1, -1)``: every run of true has a number of its own, all else -1.

    A static cache pads them with more -1.
    """
    if op(node) == "pad" and len(arg(node, 1, "pad")) == 2 and arg(node, 3, "value") == -1:
        return numbers_runs(arg(node, 0, "input"))
    if op(node) != "where" or node.args[2] != -1:
        return False
    condition, numbers = node.args[:2]
    if not is_running_sum(numbers):
        return False
    while op(numbers) != "cumsum":
        numbers = numbers.args[0]
    starts = arg(numbers, 0, "input")
    while op(starts) in ("to", "int", "long"):
        starts = arg(starts, 0, "input")
    return op(starts) == "and" and starts.args[0] is condition and _is_not_previous(starts.args[1], condition)


def _is_not_previous(node: Any, condition: Node) -> bool:
    """``~pad(condition, (1, 0))[:, :-1]``."""
    cut = node.args[0] if op(node) == "not" else None
    padded = cut.args[0] if isinstance(cut, Node) and op(cut) == "getitem" else None
    if not isinstance(padded, Node) or op(padded) != "pad" or padded.args[0] is not condition:
        return False
    items = cut.args[1] if isinstance(cut, Node) else None
    last = items[-1] if isinstance(items, tuple) else items
    return tuple(arg(padded, 1, "pad")) == (1, 0) and last == slice(None, -1) and not arg(padded, 3, "value", 0)
