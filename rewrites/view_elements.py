"""Elements of views: where an element of a reshaped, indexed or expanded tensor lies in its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from attnpatch.affine import Affine, scalar_affine
from attnpatch.graph import arg, is_one, is_tensor, normal_dim, op, shape, value
from attnpatch.rewrites.expressions import Unknown

if TYPE_CHECKING:
    from attnpatch.rewrites.pullback import Pullback


def _add_batch_dim(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    """Inside vmap a tensor lacks the dimension that vmap runs over; its index is known by vmap's level."""
    dim, level = arg(node, 1, "batch_dim"), arg(node, 2, "level")
    return pull.element(arg(node, 0, "input"), (*indices[:dim], pull.levels[level], *indices[dim:]))


def _remove_batch_dim(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    """Leave vmap: dimension ``dim`` is what ran at ``level``."""
    level, dim = arg(node, 1, "level"), arg(node, 3, "out_dim")
    pull.levels[level] = indices[dim]
    try:
        return pull.inside(arg(node, 0, "input"), indices[:dim] + indices[dim + 1 :])
    finally:
        del pull.levels[level]


def _expand(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    return pull.operand(node, arg(node, 0, "input"), indices)


def _unsqueeze(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    dim = normal_dim(node, arg(node, 1, "dim"))
    return pull.element(arg(node, 0, "input"), indices[:dim] + indices[dim + 1 :])


def _transpose(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    a, b = (normal_dim(node, arg(node, i, f"dim{i - 1}")) for i in (1, 2))
    order = list(indices)
    order[a], order[b] = order[b], order[a]
    return pull.element(arg(node, 0, "input"), tuple(order))


def _reshape(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    """Only reshapes that add or drop dimensions of size 1."""
    source = shape(arg(node, 0, "input"))
    kept = [i for i, size in zip(indices, shape(node), strict=True) if not is_one(size)]
    wide = [s for s in shape(node) if not is_one(s)]
    if wide != [s for s in source if not is_one(s)]:
        raise Unknown(node)
    return pull.element(arg(node, 0, "input"), tuple(Affine() if is_one(s) else kept.pop(0) for s in source))


def _getitem(pull: Pullback, node: Node, indices: tuple[Affine, ...]) -> Any:
    source, items = arg(node, 0, "input"), arg(node, 1, "other")
    if not isinstance(value(source), Tensor):
        raise Unknown(node)
    as_tuple = isinstance(items, tuple) or op(node) == "index"
    items = list(items) if as_tuple else [items]
    batched = bool(pull.levels) and any(is_tensor(i) for i in items)  # a scalar in vmap is a tensor outside of it
    if op(node) == "index" or batched or any(is_tensor(i) and value(i).dim() > 0 for i in items):
        return _gather(pull, node, source, items, indices)
    return pull.element(source, _sliced(node, source, items, list(indices)))


def _sliced(node: Node, source: Node, items: list[Any], indices: list[Affine]) -> tuple[Affine, ...]:
    """Indices into ``source`` of basic indexing: None, slices, integers and one Ellipsis."""
    consumed = sum(item is not None and item is not Ellipsis for item in items)
    fill = [slice(None)] * (len(shape(source)) - consumed)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items = items[:at] + fill + items[at + 1 :]
    out: list[Affine] = []
    for item in items:
        if item is None:
            indices.pop(0)
        elif isinstance(item, slice):
            out.append(_slice_start(node, item, shape(source)[len(out)]) + indices.pop(0) * (item.step or 1))
        else:
            out.append(_position(node, item, shape(source)[len(out)]))
    return tuple(out)


def _slice_start(node: Node, item: slice, size: Any) -> Affine:
    if not isinstance(item.step or 1, int) or (item.step or 1) < 0:
        raise Unknown(node)
    return Affine() if item.start is None else _position(node, item.start, size)


def _position(node: Node, item: Any, size: Any) -> Affine:
    """An index of basic indexing, counted from the front."""
    position = scalar_affine(item)
    if position is None or (position.is_constant and position.constant < 0 and not isinstance(size, int)):
        raise Unknown(node)
    if position.is_constant and position.constant < 0:
        return Affine(constant=max(0, position.constant + size))
    return position


def _gather(pull: Pullback, node: Node, source: Node, items: list[Any], indices: tuple[Affine, ...]) -> Any:
    """Advanced indexing ``source[t0, t1, ...]`` by integer tensors in the leading dimensions."""
    tensors = [i for i in items if isinstance(i, Node)]
    if len(tensors) != len(items) or any(value(t).dtype == torch.bool for t in tensors):
        raise Unknown(node)
    rest = len(shape(source)) - len(tensors)
    lead = indices[: len(indices) - rest]
    where = pull.indices(node, tensors, lead)
    if not all(isinstance(i, Affine) and min(i.constant, 0, *i.coefficients.values()) == 0 for i in where):
        raise Unknown(node)  # a negative position counts from the end
    return pull.element(source, (*where, *indices[len(indices) - rest :]))


VIEW_ELEMENTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("getitem", "index"), _getitem),
    "_add_batch_dim": _add_batch_dim,
    "_remove_batch_dim": _remove_batch_dim,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    **dict.fromkeys(("view", "reshape", "squeeze"), _reshape),
}
"""How each view's element follows from its input's. A new view is one function and one line here."""
