"""K and V gathered from a pool of pages or tokens: the pool and the ids of what is picked, instead of the copy.

pool[ids], pool[:, ids]                  ids of any rank, one id per page or per token
index_select(pool, dim, ids)
embedding(ids, pool)
pool[ids][:, :, 0], pool[ids].unbind(2)  K and V in one pool

What the dimensions mean is known from the gathered tensor, so that any layout of the pool is the same gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Node

from attnpatch.axes import Dims, Step
from attnpatch.graph import arg, is_empty, is_tensor, normal_dim, op, shape, value
from attnpatch.rule import Operand


class Gather(NamedTuple):
    """One gather.

    Args:
        pool: what is picked from.
        dims: of the pool, the picked one left out.
        dim: the picked one.
        ids: what is picked.
        counts_back: whether a negative id counts from the end of the pool.
        steps: what is done to the pool first.
    """

    pool: Node
    dims: Dims
    dim: int
    ids: Operand
    counts_back: bool
    steps: tuple[Step, ...] = ()

    def source(self, picked: str) -> Operand:
        """The pool, its axis of pages or tokens called ``picked``."""
        return Operand(self.pool, (*self.dims[: self.dim], (picked,), *self.dims[self.dim :]), self.steps)

    @property
    def size(self) -> Any:
        """How many pages or tokens the pool has."""
        return shape(self.pool)[self.dim + sum(step[1][0] <= self.dim for step in self.steps)]


def read_gather(x: Operand) -> Gather | None:
    """The gather that made ``x``, a part of what was gathered included."""
    if x.steps:
        return None
    part = _selected(x.node)
    if part is None:
        return _gather(x.node, x.dims)
    whole, dim, index = part
    found = _gather(whole, (*x.dims[:dim], (), *x.dims[dim:]))
    if found is None or found.dim <= dim < found.dim + len(found.ids.dims):
        return None
    dim -= len(found.ids.dims) - 1 if dim > found.dim else 0
    before = dim < found.dim
    rest = dim if before else dim - 1
    dims = (*found.dims[:rest], *found.dims[rest + 1 :])
    return found._replace(dims=dims, dim=found.dim - before, steps=(("select", (dim, index)),))


def _selected(node: Node) -> tuple[Node, int, int] | None:
    """The tensor that ``node`` takes one slice of, the dimension and which: ``x[:, 0]``, ``x.unbind(1)[0]``."""
    source, items = arg(node, 0, "input"), arg(node, 1, "other")
    if op(node) == "select" and isinstance(arg(node, 2, "index"), int):
        return source, normal_dim(source, arg(node, 1, "dim")), arg(node, 2, "index")
    if op(node) != "getitem":
        return None
    if op(source) == "unbind" and isinstance(items, int):
        whole = arg(source, 0, "input")
        return whole, normal_dim(whole, arg(source, 1, "dim", 0)), items
    items = items if isinstance(items, tuple) else (items,)
    at = [i for i, item in enumerate(items) if type(item) is int]
    if len(at) != 1 or not all(_is_whole(item) for i, item in enumerate(items) if i != at[0]):
        return None
    return (source, at[0], items[at[0]]) if is_tensor(source) else None


def _gather(node: Node, dims: Dims) -> Gather | None:
    found = next((x for x in (spelling(node) for spelling in GATHERS) if x is not None), None)
    if found is None:
        return None
    pool, dim, ids = found
    rank = len(shape(ids))
    integers = value(ids).dtype in (torch.int32, torch.int64) and value(ids).device == value(pool).device
    if not integers or not rank or is_empty(pool):
        return None
    kept = (*dims[:dim], *dims[dim + rank :])
    return Gather(pool, kept, dim, Operand(ids, dims[dim : dim + rank]), op(node) in ("getitem", "index"))


def _index(node: Node) -> tuple[Node, int, Node] | None:
    """``pool[:, ids]``."""
    if op(node) not in ("getitem", "index") or not is_tensor(node) or not is_tensor(arg(node, 0, "input")):
        return None
    pool, items = arg(node, 0, "input"), arg(node, 1, "other" if op(node) == "getitem" else "indices")
    if op(node) == "index":  # None stands for a whole dimension there
        items = [slice(None) if i is None else i for i in items]
    found = one_index(pool, items)
    return None if found is None else (pool, *found)


def one_index(x: Node, items: Any) -> tuple[int, Node] | None:
    """Of ``x[items]`` the one dimension that a tensor indexes, and that tensor; all else is whole."""
    items = list(items) if isinstance(items, (tuple, list)) else [items]
    tensors = [i for i, item in enumerate(items) if is_tensor(item)]
    whole = all(item is Ellipsis or is_tensor(item) or _is_whole(item) for item in items)
    if len(tensors) != 1 or not whole:
        return None
    at = tensors[0]
    hidden = len(shape(x)) - len(items) if Ellipsis in items[:at] else 0
    return at + hidden, items[at]


def _is_whole(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _index_select(node: Node) -> tuple[Node, int, Node] | None:
    if op(node) != "index_select" or not is_tensor(node):
        return None
    pool, ids = arg(node, 0, "input"), arg(node, 2, "index")
    return (pool, normal_dim(pool, arg(node, 1, "dim")), ids) if len(shape(ids)) == 1 else None


def _embedding(node: Node) -> tuple[Node, int, Node] | None:
    """``F.embedding(ids, pool)``, and torch's own with the two exchanged; one that changes the pool is not."""
    if op(node) != "embedding" or not is_tensor(node):
        return None
    if node.target is F.embedding:
        ids, pool = (arg(node, i, name) for i, name in enumerate(("input", "weight")))
        return (pool, 0, ids) if arg(node, 3, "max_norm") is None else None
    ids, pool = (arg(node, i, name) for i, name in ((1, "indices"), (0, "weight")))
    return pool, 0, ids


GATHERS: tuple[Callable[[Node], tuple[Node, int, Node] | None], ...] = (_index, _index_select, _embedding)
"""Spellings: the pool, its dimension that is picked from, and the ids."""
