"""Attention written out.

before   s = matmul(q, k.transpose(-1, -2)); s = s * scale; s = softcap(s); s = s + mask
         p = dropout(softmax(s)); o = matmul(p, v)
after    o = attnpatch::attention(q, k, v, scale, mask terms)

The products say which axis of which tensor is a row, a key, a feature, so that every layout is the same attention:
``bhid,bhjd->bhij``, ``[batch * heads, seqlen, head_dim]`` through bmm, five dimensions of grouped heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from attnpatch.affine import Affine
from attnpatch.axes import Axes, Dims, Layout
from attnpatch.errors import Refused
from attnpatch.graph import CASTS, Writes, arg, is_tensor, normal_dim, op, place, shape, value
from attnpatch.rewrites.arrangement import Arrangement, Roles
from attnpatch.rewrites.expressions import number
from attnpatch.rewrites.mask_terms import MaskReader
from attnpatch.rewrites.operands import RESHAPES, Reading, regroups, said
from attnpatch.rewrites.products import Product, is_product, multiplies, permutation, read_product
from attnpatch.rewrites.pullback import Pullback
from attnpatch.rewrites.readers import reads
from attnpatch.rewrites.scores import Fold, ancestors, drops_sink, fold_bias, same_size, trace
from attnpatch.rewrites.softmaxes import Softmax, is_softmax, read_softmax
from attnpatch.rule import Operand, Rule, Site


def candidates(graph: Graph) -> Iterator[Node]:
    """Softmaxes between two products of tensors with 3 or more dimensions; routers and poolers are not."""
    for node in graph.nodes:
        if is_tensor(node) and is_softmax(node) and _product_above(node) and _product_below(node, node):
            yield node


def _product_above(node: Node) -> bool:
    return any(multiplies(x) for x in ancestors(node))


_CARRIERS = frozenset(
    [
        *(*CASTS, *RESHAPES, "getitem", "narrow", "transpose", "permute", "movedim", "mT", "expand", "cat"),
        *("dropout", "mul", "div", "add", "sub", "masked_fill", "where", "pad", "as_strided"),
    ]
)
"""What may stand between a softmax and its product, besides what keeps the number of probabilities."""


def _product_below(node: Node, softmax: Node, depth: int = 16) -> bool:
    for user in node.users:
        if multiplies(user):
            return not (op(user) == "baddbmm" and user.args[0] is node)
        carries = op(user) in _CARRIERS or (is_tensor(user) and same_size(user, softmax))
        if depth and carries and _product_below(user, softmax, depth - 1):
            return True
    return False


class Walk:
    """The nodes of one attention in order, and what the dimensions of each are.

    Attributes:
        scores: from the softmax's input up to the product q k^T.
        weights: from the softmax down to what is multiplied with v.
        second_node: the product with v.
        tail: views after it that undo how it merges dimensions, the last one left out.
        anchor: the last of product and views.
        dims: of every node on the way.
    """

    def __init__(self, softmax: Softmax, axes: Axes) -> None:
        self.softmax, self.axes = softmax, axes
        self.scores = trace(softmax.scores)
        self.weights, self.anchor = _to_value_product(softmax.node)
        self.first = read_product(self.scores[-1])
        self.second = read_product(self.anchor)
        self.second_node = self.anchor
        self.tail: list[Node] = []
        self.dims: dict[Node, Dims] = {}
        self.letters: dict[str, str] = {}
        self._name_axes()

    def _name_axes(self) -> None:
        """Follow the dims from the first product to the last."""
        dims = self._operand_dims(self.first, self.scores[-1], self.first.out_letters)
        self.dims[self.scores[-1]] = dims
        for source, node in zip(self.scores[::-1], self.scores[-2::-1], strict=False):
            self._forward(source, node)
        self.dims[self.softmax.node] = self.dims[self.softmax.scores]
        for source, node in zip([self.softmax.node, *self.weights], self.weights, strict=False):
            self._forward(source, node)
        self.dims = {node: self.axes.resolve(dims) for node, dims in self.dims.items()}

    def _operand_dims(self, product: Product, x: Node, letters: tuple[str, ...]) -> Dims:
        """The dims of an operand or the result of the first product; names its axes at first sight."""
        for letter, size in zip(letters, shape(x), strict=True):
            if letter and letter not in self.letters:
                self.letters[letter] = self.axes.new(size)
        return tuple((self.letters[letter],) if letter else () for letter in letters)

    def _forward(self, source: Node, node: Node) -> None:
        dims, order = self.axes.resolve(self.dims[source]), permutation(node)
        if order is not None:
            self.dims[node] = tuple(dims[i] for i in order)
        elif regroups(node):
            regrouped = self.axes.regroup(dims, shape(source), shape(node))
            if regrouped is None:
                raise Refused(f"a view cuts the scores across rows and keys ({place(node)})")
            self.dims[node] = regrouped
        elif op(node) in ("getitem", "narrow") and not self._drops_sinks(node, dims):
            raise Refused(f"{op(node)} takes a part of the scores or probabilities ({place(node)})")
        elif len(shape(node)) != len(dims):
            raise Refused(f"{op(node)} at {place(node)} broadcasts the scores {said(shape(source))}")
        else:
            self.dims[node] = dims

    @property
    def _has_sinks(self) -> bool:
        """Whether a column that is no key joined the scores; what is cut off after softmax must be that."""
        return any(op(node) == "cat" for node in self.scores)

    def _drops_sinks(self, node: Node, dims: Dims) -> bool:
        after = node in self.weights and self._has_sinks and self.key in dims
        return after and drops_sink(node, dims.index(self.key))

    def check_sinks(self) -> None:
        """Refuse probabilities that keep the column of the sinks."""
        cuts = sum(op(node) in ("getitem", "narrow") and not regroups(node) for node in self.weights)
        if cuts != self._has_sinks:
            raise Refused(f"the product with v does not leave out the sinks ({place(self.second_node)})")

    def resolved(self, node: Node) -> Dims:
        """The dims of a node, splits that came later included."""
        return self.axes.resolve(self.dims[node])

    def operands(self) -> tuple[Operand, Operand]:
        """Q and k as the first product has them: k is the one with the axis that softmax is over."""
        key = self.resolved(self.softmax.node)[self.softmax.dim]
        both = [
            Operand(x, self._operand_dims(self.first, x, self.first.letters(x)))
            for x in (self.first.left, self.first.right)
        ]
        has = [key[0] in {a for dim in self.axes.resolve(x.dims) for a in dim} for x in both] if key else []
        if sorted(has) != [False, True]:
            raise Refused(
                f"softmax is over dim {self.softmax.said_dim}, not over the keys ({place(self.softmax.node)})"
            )
        return (both[0], both[1]) if has[1] else (both[1], both[0])

    def value(self) -> Operand:
        """V, its dims named by those of the weights it is multiplied with."""
        weights = self.weights[-1] if self.weights else self.softmax.node
        product = self.second
        named = dict(zip(product.letters(weights), self.resolved(weights), strict=True))
        v = product.right if weights is product.left else product.left
        mine = product.letters(v)
        own = [i for i, letter in enumerate(mine) if letter and letter not in named]
        summed = [letter for letter in named if letter and letter not in product.out_letters]
        if len(own) != 1 or [named[x] for x in summed] != [self.key]:
            said_dim, where = self.softmax.said_dim, place(self.softmax.node)
            raise Refused(f"softmax is over dim {said_dim}, the product with v sums over another dimension ({where})")
        self.feature_v = (self.axes.new(shape(v)[own[0]]),)
        named[mine[own[0]]] = self.feature_v
        self.dims[self.anchor] = tuple(named[x] for x in product.out_letters)
        return Operand(v, tuple(named[x] if x else () for x in mine))

    def follow_views(self, layout: Layout) -> None:
        """Move the anchor below a view that takes apart again what the layout of the product merged."""
        groups = {axis: i for i, group in enumerate(layout) for axis in group}
        while len(self.anchor.users) == 1 and any(
            len({groups.get(axis) for axis in dim}) > 1 for dim in self.resolved(self.anchor)
        ):
            view = next(iter(self.anchor.users))
            dims = self.resolved(self.anchor)
            regrouped = self.axes.regroup(dims, shape(self.anchor), shape(view)) if regroups(view) else None
            if regrouped is None:
                return
            self.tail.append(self.anchor)
            self.anchor, self.dims[view] = view, regrouped

    @property
    def key(self) -> tuple[str, ...]:
        """The axis that softmax is over."""
        return self.resolved(self.softmax.node)[self.softmax.dim]


def match(node: Node, writes: Writes) -> Site:
    """The site around the softmax at ``node``."""
    site, shifted = _match(node, writes, may_shift=True)
    if shifted and (site.softcap, site.sinks, site.lse) != (None, None, None):
        site, _ = _match(node, writes, may_shift=False)
    return site


def _match(node: Node, writes: Writes, may_shift: bool) -> tuple[Site, bool]:
    """The site, and whether its scores are the original's but for a number per row."""
    softmax = read_softmax(node)
    if softmax is None:
        raise Refused(f"{op(node)} is another function than softmax ({place(node)})")
    walk = Walk(softmax, Axes())
    operands = (*walk.operands(), walk.value())
    places = (walk.scores[-1], walk.scores[-1], walk.second_node)
    reading = Reading(writes, (operands[0].node, operands[1].node, operands[2].node), places, walk.anchor)
    factor, k = _unscaled(operands[1], reading)
    plan = Arrangement(walk.axes, operands[0], k, operands[2], _roles(walk, operands[1]), reading, may_shift)
    walk.follow_views(plan.layout)
    layout = Layout(*walk.axes.resolve(plan.layout))  # the views may have split axes once more
    fold = _fold(walk, MaskReader(walk.axes, layout, plan.seqlens, Pullback(writes, walk.scores[-1])), factor)
    return _site(walk, plan, layout, fold, writes), plan.shifted


def _fold(walk: Walk, masks: MaskReader, factor: float) -> Fold:
    """What lies between the product and the softmax; ``factor`` is K's own."""
    fold = Fold(masks)
    fold.sinks = walk.softmax.denominator
    fold.walk(walk.scores, {n: walk.resolved(n) for n in walk.scores})
    walk.check_sinks()
    _check_zeroed(walk, fold)
    _fold_product(fold, walk, factor)
    return fold


def _site(
    walk: Walk,
    plan: Arrangement,
    layout: Layout,
    fold: Fold,
    writes: Writes,
) -> Site:
    inside = [*fold.interior, *walk.softmax.interior, walk.softmax.node, *walk.weights, *walk.tail]
    lse = _lse(walk, fold, set(inside), layout)
    reads = plan.reads + [(x.node, walk.scores[-1]) for x, _ in fold.scales if is_tensor(x.node)]
    own = walk.axes.resolve((*layout[:3], plan.feature_v))
    return Site(
        walk.anchor, plan.q, plan.k, plan.v, plan.storage, plan.sizes, fold.sm_scale, fold.masks.terms(),
        tuple(walk.axes.plan(own, walk.resolved(walk.anchor))), fold.softcap, fold.scales,
        fold.sinks, lse, _first_reader(lse, plan.v.node, walk.anchor, writes), fold.masks.pull.readers,
        inside, reads,
    )  # fmt: skip


def _roles(walk: Walk, k: Operand) -> Roles:
    """What the letters of the products mean."""
    left, right, out = walk.first.left_letters, walk.first.right_letters, walk.first.out_letters
    dims = {x: (walk.letters[x],) for x in walk.letters}
    of_k = set(walk.first.letters(k.node))
    summed = [x for x in left if x and x in right and x not in out]
    alone = [x for x in of_k if x and (x not in left or x not in right)]
    if len(summed) != 1 or len(alone) != 1:
        where = place(walk.scores[-1])
        raise Refused(f"what is multiplied last before softmax is no q k^T: it sums over {summed} ({where})")
    return Roles(
        tuple(dims[x] for x in out if x and x in left and x in right),
        tuple(dims[x] for x in out if x and x not in of_k),
        walk.key,
        dims[summed[0]],
        walk.feature_v,
    )


def _unscaled(k: Operand, reading: Reading) -> tuple[float, Operand]:
    """K without a constant factor, which moves to the scale."""
    factor, node, pull = 1.0, k.node, Pullback(reading.writes, k.node)
    while op(node) in ("mul", "div") and is_tensor(source := arg(node, 0, "input")):
        constant = number(pull.operand(node, arg(node, 1, "other"), (Affine(),) * len(shape(node))))
        if constant is None or shape(source) != shape(node) or not reading.is_kept(node, source):
            break
        factor *= constant if op(node) == "mul" else 1 / constant
        node = source
    return factor, Operand(node, k.dims)


def _fold_product(fold: Fold, walk: Walk, factor: float) -> None:
    """What the first product adds and multiplies itself: ``baddbmm(bias, q, k, beta, alpha)``, K's factor."""
    alpha, beta, node = walk.first.alpha, walk.first.beta, walk.scores[-1]
    if walk.first.bias is not None:
        if not isinstance(beta, (int, float)):
            raise Refused(f"beta of {op(node)} is known only at run time ({place(node)})")
        fold_bias(fold, node, walk.first.bias, fold.factor * beta)
    if isinstance(alpha, Node):
        fold.scales.append((Operand(alpha, ()), "mul"))
        alpha = 1
    fold.factor *= alpha * factor


def _to_value_product(softmax: Node) -> tuple[list[Node], Node]:
    """The nodes between softmax and ``p @ v``, and that product."""
    passed: list[Node] = []
    node = softmax
    while True:
        user = _only_reader(node)
        if is_product(user) and not (op(user) == "baddbmm" and user.args[0] is node):
            return passed, user
        if op(user) == "dropout":
            _check_dropout(user)
        elif not _keeps_weights(user):
            raise Refused(f"{op(user) or user.op} reads the attention probabilities ({place(user)})")
        passed.append(user)
        node = user


def _keeps_weights(node: Node) -> bool:
    """Whether ``node`` only casts, copies, views or reorders the probabilities, or drops the sink's column."""
    zeroes_nan = op(node) == "nan_to_num" and arg(node, 1, "nan", 0.0) in (0, 0.0, None)
    zeroes = op(node) in ("masked_fill", "masked_fill_")  # _check_zeroed says where
    moves = regroups(node) or permutation(node) is not None or op(node) in ("getitem", "narrow")
    return (op(node) in CASTS and value(node).is_floating_point()) or zeroes_nan or zeroes or moves


def _check_zeroed(walk: Walk, fold: Fold) -> None:
    """Probabilities may be zeroed only where a mask hides the scores already: there they are zero."""
    hidden = {s.node for s in fold.masks.masks if s.kind == "hide"}
    for node in (n for n in walk.weights if op(n) in ("masked_fill", "masked_fill_")):
        if fold.constant(arg(node, 2, "value")) != 0.0 or arg(node, 1, "mask") not in hidden:
            raise Refused(f"{op(node)} changes the attention probabilities ({place(node)})")


def _only_reader(node: Node) -> Node:
    readers = [user for user in node.users if reads(node, user)] or list(node.users)  # a whole attention may be unread
    if len(readers) == 1 and sum(x is node for x in tree_leaves((readers[0].args, readers[0].kwargs))) == 1:
        return readers[0]
    others = [r for r in readers if not _product_below_or_is(r)] or readers[-1:]
    raise Refused(f"the attention probabilities are also read by {_reader(others[0])}")


def _product_below_or_is(node: Node) -> bool:
    return multiplies(node) or _product_below(node, node)


def _reader(node: Node) -> str:
    if node.op == "output":
        return "the caller: they are returned (output_attentions)"
    return f"{op(node)} ({place(node)})"


def _check_dropout(node: Node) -> None:
    p, training = arg(node, 1, "p", 0.5), arg(node, 2, "training", node.kwargs.get("train", True))
    if training and (isinstance(p, Node) or p > 0):
        raise Refused(f"dropout with p={p} is active in training; fused attention has none")


def _lse(walk: Walk, fold: Fold, inside: set[Node], layout: Layout) -> Operand | None:
    """The one other reader of the scores that attention can serve: their logsumexp. Refuses every further one."""
    read_inside = [*fold.interior, *walk.softmax.interior]
    outside = [(node, user) for node in read_inside for user in node.users if user not in inside and reads(node, user)]
    if not outside:
        return None
    node, user = outside[0]
    at = walk.scores.index(node) if node in walk.scores else len(walk.scores)
    whole = all(op(x) in CASTS for x in walk.scores[:at])
    if len(outside) > 1 or op(user) != "logsumexp" or not whole or fold.sinks is not None or fold.shifted:
        raise Refused(f"the scores are also read by {_reader(user)}; returning them needs their memory")
    dims, keepdim = walk.resolved(node), arg(user, 2, "keepdim", False)
    dim = arg(user, 1, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) else dim
    if dims[normal_dim(node, dim)] != layout.key:
        raise Refused(f"logsumexp over other dimensions than the keys reads the scores ({place(user)})")
    left = tuple(() if d == layout.key else d for d in dims if keepdim or d != layout.key)
    return Operand(user, left, tuple(walk.axes.plan(layout[:3], left)))


def _first_reader(lse: Operand | None, v: Node, anchor: Node, writes: Writes) -> Node | None:
    """The first reader of the logsumexp if it comes before the product with v: the operator must be there by then."""
    if lse is None:
        return None
    first = min((*lse.node.users, anchor), key=writes.position.__getitem__)
    if writes.position[first] < writes.position[v]:
        raise Refused(f"the logsumexp of the scores is read before v is computed ({place(first)})")
    return None if first is anchor else first


RULE = Rule("eager_attention", candidates, match)
