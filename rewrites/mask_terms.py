"""Turn the masks of one attention into terms: causal, window, padding; whatever cannot be read is streamed.

and(k <= q + off, k > q + off - W, pad[b, k])  ->  q_offset=off, window_right=0, window_left=W-1, paddings=[pad]
"""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnpatch.affine import Affine
from attnpatch.axes import Axes, Dims, Layout
from attnpatch.edges import affines, can_load, searched
from attnpatch.errors import Refused
from attnpatch.graph import is_one, is_tensor, place, shape, value
from attnpatch.mask_words import AND, split
from attnpatch.masking import is_excluding
from attnpatch.rewrites.expressions import (
    And,
    AtLeastZero,
    Const,
    Load,
    Magnitude,
    Not,
    Or,
    Sloped,
    Sum,
    Unknown,
    Where,
    as_condition,
    number,
)
from attnpatch.rewrites.intervals import Interval, NoInterval, interval
from attnpatch.rewrites.pullback import Pullback, broadcast
from attnpatch.rule import Operand, Streamed, Terms


class MaskReader:
    """Collects the masks of one attention as constraints on (b, h, q, k) and resolves them to terms.

    Args:
        axes: of the attention.
        layout: what they are.
        seqlens: seqlen_q and seqlen_k, ints or SymInts.
        pull: reads the elements of masks.
    """

    def __init__(self, axes: Axes, layout: Layout, seqlens: tuple[Any, Any], pull: Pullback) -> None:
        self.axes, self.layout = axes, layout
        self.seqlen_q, self.seqlen_k = seqlens
        self.pull = pull
        self.masks: list[Streamed] = []
        self.right: list[Affine] = []  # k <= q + bound
        self.left: list[Affine] = []  # k >= q - bound
        self.paddings: list[tuple[Node, Affine]] = []
        self.intervals: list[Interval] = []
        self.conditions: list[Any] = []
        self.alibi: tuple[Node, float] | None = None
        self.alibi_own = Affine()
        self.alibi_needs_causal = True
        self.streamed: list[Streamed] = []

    def element(self, x: Any, dims: Dims) -> Any:
        """The element of ``x`` where it is broadcast to a tensor of the given dims."""
        indices = tuple(self._index(dim) for dim in dims)
        return self.pull.element(x, broadcast(indices, x) if is_tensor(x) else ())

    def _index(self, dim: tuple[str, ...]) -> Affine:
        """A dimension's index in terms of b, h, q and k; parts of these have names of their own."""
        for variable, group in zip("bhqk", self.layout, strict=True):
            if dim == group and dim:
                return Affine({variable: 1})
        sizes = [self.axes.sizes[axis] for axis in dim]
        if not all(isinstance(size, int) for size in sizes[1:]):
            return Affine({"*".join(dim): 1})
        index = Affine()
        for axis, size in zip(dim, sizes, strict=True):
            index = (index * size if index != Affine() else index) + self._axis(axis)
        return index

    def _axis(self, axis: str) -> Affine:
        single = {group[0]: v for v, group in zip("bhqk", self.layout, strict=True) if len(group) == 1}
        return Affine({single.get(axis, axis): 1})

    def _aligned(self, x: Node, dims: Dims) -> Dims:
        """The dims of ``x``, which broadcasts to a tensor of dims ``dims``."""
        sizes = shape(x)
        kept = dims[len(dims) - len(sizes) :]
        return tuple(() if is_one(size) else dim for size, dim in zip(sizes, kept, strict=True))

    def _arranged(self, x: Node, dims: Dims, target: Dims) -> Operand:
        """``x`` with the steps to ``target``; a broadcast from the right needs none."""
        own = self._aligned(x, dims)
        right = target[len(target) - len(own) :]
        if len(own) <= len(target) and all(a in (b, ()) for a, b in zip(own, right, strict=True)):
            return Operand(x, own)
        return Operand(x, own, tuple(self.axes.plan(own, target)))

    def for_rows(self, x: Any, dims: Dims) -> Operand:
        """A factor that is the same for all keys, so that it may multiply q instead of the scores."""
        if not is_tensor(x) or value(x).numel() == 1:
            return Operand(x, ())
        return self._arranged(x, dims, (*self.layout[:3], ()))

    def per_head(self, x: Node, dims: Dims) -> Node | float:
        """The tensor of one value per head that ``x`` is a view of, or the number it holds."""
        element = self.element(x, dims)
        constant = number(element)
        if constant is not None:
            return constant
        if not isinstance(element, Load) or element.indices != (Affine({"h": 1}),):
            raise Refused(f"the sinks are not one logit per head ({place(x)})")
        return element.node

    def is_one_where_visible(self, x: Node, dims: Dims) -> bool:
        """Whether ``x`` is 1 wherever the masks read so far let a key be seen."""
        element = self.element(x, dims)
        return isinstance(element, Where) and number(element.then) == 1.0 and element.condition in self.conditions

    def add(self, mask: Node, kind: str, factor: float, dims: Dims) -> None:
        """Read one mask of scores of the given dims: "additive" (times ``factor``), or bool: "keep" or "hide"."""
        self.masks.append(Streamed(self._arranged(mask, dims, self.layout.scores), kind, factor))
        alibi = self.alibi
        try:
            conditions, biases = self._read(mask, kind, factor, dims)
        except Unknown:
            self.streamed.append(self.masks[-1])
            return
        self.conditions += conditions
        understood = [self._constrain(c) for c in conditions]  # all of them: what is a term still skips blocks
        if all(understood):
            self.streamed += biases
        else:  # the mask as it is, and its slopes with it
            self.streamed.append(self.masks[-1])
            self.alibi = alibi

    def _read(self, mask: Node, kind: str, factor: float, dims: Dims) -> tuple[list[Any], list[Streamed]]:
        """The conditions under which a mask does not exclude, and the biases that it adds besides."""
        element = self.element(mask, dims)
        if kind != "additive":
            condition = as_condition(element)
            return [condition if kind == "keep" else Not(condition)], []
        conditions, biases = _parts(element, factor)
        slopes = [bias for bias in biases if isinstance(bias, Sloped)]
        rest = [bias for bias in biases if not isinstance(bias, Sloped)]
        if any(isinstance(bias, Load) and value(bias.node).numel() >= value(mask).numel() for bias in rest):
            return conditions, self.masks[-1:]  # nothing is won by streaming its parts
        streamed = [self._bias(bias, factor) for bias in rest]
        if slopes:
            self._slope(slopes, factor)
        return conditions, streamed

    def _slope(self, slopes: list[Sloped], factor: float) -> None:
        """ALiBi: a slope per head times the distance from the row's own position; see :meth:`_set_alibi`."""
        slope, node = slopes[0].slope, slopes[0].slope.node if slopes[0].slope else None
        if len(slopes) > 1 or self.alibi or slope is None or node is None or slope.indices != (Affine({"h": 1}),):
            raise Unknown(slopes)
        distance, sign = slopes[0].distance, -1.0
        if isinstance(distance, Magnitude):
            self.alibi_needs_causal, distance = False, distance.expression
        distance = -distance if distance["q"] == -1 else distance
        if slopes[0].distance == -distance:  # k - q is minus the distance of a key that is not ahead
            sign = 1.0
        own = distance - Affine({"q": 1, "k": -1})
        if not own.is_scalar:
            raise Unknown(slopes)
        self.alibi, self.alibi_own = (node, sign * factor * slopes[0].factor), own

    def _bias(self, bias: Any, factor: float) -> Streamed:
        """A bias that is a tensor of its own within the mask: ALiBi and a causal mask in one, say."""
        if not isinstance(bias, Load) or self.pull.writes.between(bias.node, bias.node, self.pull.now):
            raise Unknown(bias)
        groups = dict(zip("bhqk", self.layout, strict=True))
        plain = {Affine({v: 1}): group for v, group in groups.items()}
        if any(i != Affine() and i not in plain for i in bias.indices):
            raise Unknown(bias)
        own = tuple(plain.get(i, ()) for i in bias.indices)
        if not all(self._has_size(n, dim) for n, dim in zip(shape(bias.node), own, strict=True)):
            raise Unknown(bias)
        return Streamed(self._arranged(bias.node, own, self.layout.scores), "additive", factor)

    def _has_size(self, size: Any, dim: tuple[str, ...]) -> bool:
        return bool(statically_known_true(size == self.axes.size(dim)))

    def _constrain(self, condition: Any) -> bool:
        """Take in a condition under which a key is visible; False when some part of it is not a term."""
        if isinstance(condition, And):
            return all([self._constrain(condition.left), self._constrain(condition.right)]) or self._run(condition)
        if isinstance(condition, Not):
            return self._constrain_negated(condition.operand)
        if isinstance(condition, AtLeastZero):
            return self._bound(condition.expression)
        if isinstance(condition, Load):
            return self._padding(condition)
        return (isinstance(condition, Const) and condition.value != 0) or self._run(condition)

    def _run(self, condition: Any) -> bool:
        """A condition under which each row sees one run of keys."""
        try:
            found = interval(condition)
        except NoInterval:
            return False
        atoms = (atom for x in affines(found) for atom in x.coefficients if isinstance(atom, Load))
        if not all(can_load(atom.indices) for atom in atoms) or self._is_patched(found):
            return False
        self.intervals.append(found)
        return True

    def _is_patched(self, found: Interval) -> bool:
        """Whether something on the way to ids that are searched is written: then how they are made proves nothing."""
        above = list(dict.fromkeys(searched(found)))
        for node in above:  # grows while it is walked
            above += [x for x in node.all_input_nodes if x not in above]
        return any(self.pull.writes.touches(node) for node in above)

    def _constrain_negated(self, condition: Any) -> bool:
        if isinstance(condition, AtLeastZero):
            return self._bound(-condition.expression - 1)
        if isinstance(condition, Not):
            return self._constrain(condition.operand)
        if isinstance(condition, Or):
            return self._constrain(And(Not(condition.left), Not(condition.right)))
        return (isinstance(condition, Const) and condition.value == 0) or self._run(Not(condition))

    def _bound(self, expression: Affine) -> bool:
        """``expression >= 0`` as a bound on k relative to q."""
        q, k = expression["q"], expression["k"]
        if is_one(self.seqlen_q):  # the only row is q = 0
            q = -k
        rest = expression.without("q", "k")
        if not rest.is_scalar or (q, k) == (0, -1) or (q, k) == (0, 1):
            return self._run(AtLeastZero(expression))
        if (q, k) == (1, -1):
            self.right.append(rest)
        elif (q, k) == (-1, 1):
            self.left.append(rest)
        elif not (min(q, k) >= 0 and rest.is_constant and rest.constant >= 0):  # as q >= 0, k >= 0 are for every index
            return self._run(AtLeastZero(expression))
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
        paddings, intervals = list(dict.fromkeys(self.paddings)), list(dict.fromkeys(self.intervals))
        terms = Terms(paddings=paddings, intervals=intervals, streamed=self.streamed)
        try:
            self._set_band(terms)
            self._set_alibi(terms)
        except Unknown:
            return Terms(streamed=self.masks)
        return terms

    def _set_alibi(self, terms: Terms) -> None:
        """The kernels' bias is ``-slope * |q + q_offset - k|``: the positions must be those of the band."""
        if self.alibi is None:
            return
        banded = terms.window_left is not None or terms.window_right is not None
        if self.alibi_needs_causal and terms.window_right != 0:
            raise Unknown(self.alibi)
        if not banded:
            terms.q_offset = self.alibi_own
        if terms.q_offset != self.alibi_own:
            raise Unknown(self.alibi)
        terms.alibi = self.alibi

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
        elif left is not None and left.is_constant and left.constant >= 0:
            terms.window_left = left.constant
        elif left is not None:
            terms.q_offset, terms.window_left = -left, 0

    def _is_symmetric(self, right: Affine, left: Affine) -> bool:
        """A band on both sides of the diagonal, an encoder's window, and not a decoder's position."""
        constants = right.is_constant and left.is_constant and right.constant > 0
        if not constants or is_one(self.seqlen_q):
            return False
        static = isinstance(self.seqlen_q, int) and isinstance(self.seqlen_k, int)
        return not (static and right.constant == self.seqlen_k - self.seqlen_q)

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


def _parts(x: Any, factor: float) -> tuple[list[Any], list[Any]]:
    """The conditions under which an additive mask, times ``factor``, does not exclude, and what it adds then."""
    constant = number(x)
    if constant is not None and math.isfinite(constant) and not _excludes(x, factor):
        return [], []  # the same for every key: softmax does not see it
    if isinstance(x, Sum):
        left, right = _parts(x.left, factor), _parts(x.right, factor)
        return left[0] + right[0], left[1] + right[1]
    if isinstance(x, Where):
        for hides, condition, rest in ((x.otherwise, x.condition, x.then), (x.then, Not(x.condition), x.otherwise)):
            if _excludes(hides, factor):
                conditions, biases = _parts(rest, factor)
                return [condition, *conditions], biases
    return [], [x]


def _excludes(x: Any, factor: float) -> bool:
    constant = number(x)
    return constant is not None and is_excluding(math.copysign(constant, constant * factor), abs(factor))


def words(terms: Terms) -> list[str]:
    """The mask as a person says it: ``causal``, ``window 4096``, ``padding``."""
    said = []
    if terms.window_right == 0:
        said.append("causal")
        said += [] if terms.window_left is None else [f"window {terms.window_left + 1}"]
    elif terms.window_right is not None or terms.window_left is not None:
        left = "all" if terms.window_left is None else terms.window_left
        right = "all" if terms.window_right is None else terms.window_right
        said.append(f"window {left} left, {right} right")
    runs = [word for run in terms.intervals for word in split(run.word, AND)]
    said += [word for word in dict.fromkeys(runs) if word not in said]
    said += ["padding"] if terms.paddings else []
    said += ["ALiBi"] if terms.alibi else []
    for mask in terms.streamed:
        kind = "bias" if mask.kind == "additive" else "mask"
        said.append(f"streamed {kind} [{', '.join(str(s) for s in shape(mask.node))}]")
    return said
