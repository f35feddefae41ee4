"""Spellings of "every K/V head repeated for its group", undone: the kernels index head ``h // group_size``.

x[:, :, None].expand(B, H, n, S, D).reshape(B, H * n, S, D)    Hugging Face's repeat_kv
repeat_interleave(x, n, dim=1)
x.repeat(1, n, 1, 1), cat([x] * n, dim=1), stack([x] * n, 1)   heads in another order: h % num_kv_heads
x.expand(B, n, S, D) of one head                               multi-query attention

A spelling says which axis its source lacks; views and permutations around it are undone elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from attnpatch.axes import Axes, Dims
from attnpatch.graph import arg, is_one, is_tensor, normal_dim, op, shape, varargs
from attnpatch.rule import Operand


def _expand(node: Node, dims: Dims, axes: Axes) -> Operand | None:
    """Dimensions of size 1 that grow, and new ones in front."""
    if op(node) not in ("expand", "broadcast_to", "expand_as"):
        return None
    source = arg(node, 0, "input")
    kept = dims[len(dims) - len(shape(source)) :]
    grown = shape(node)[len(dims) - len(kept) :]
    pairs = zip(kept, shape(source), grown, strict=True)
    return Operand(source, tuple(() if is_one(old) and not is_one(new) else dim for dim, old, new in pairs))


def _repeat(node: Node, dims: Dims, axes: Axes) -> Operand | None:
    """One dimension repeated as a whole: the outer axis of it is the repeat."""
    if op(node) != "repeat":
        return None
    source, counts = arg(node, 0, "input"), varargs(node, 1, "repeats")
    repeated = [i for i, n in enumerate(counts) if not is_one(n)]
    if len(counts) != len(shape(source)) or len(repeated) != 1 or not isinstance(counts[repeated[0]], int):
        return None
    return _without_outer(source, dims, axes, repeated[0], counts[repeated[0]])


def _cat_of_itself(node: Node, dims: Dims, axes: Axes) -> Operand | None:
    if op(node) != "cat":
        return None
    parts = list(arg(node, 0, "tensors"))
    if len(parts) < 2 or any(part is not parts[0] for part in parts):
        return None
    return _without_outer(parts[0], dims, axes, normal_dim(node, arg(node, 1, "dim", 0)), len(parts))


def _stack_of_itself(node: Node, dims: Dims, axes: Axes) -> Operand | None:
    """A new dimension along which all is the same."""
    if op(node) != "stack":
        return None
    parts = list(arg(node, 0, "tensors"))
    at = normal_dim(node, arg(node, 1, "dim", 0))
    if any(part is not parts[0] for part in parts):
        return None
    return Operand(parts[0], (*dims[:at], *dims[at + 1 :]))


def _without_outer(source: Node, dims: Dims, axes: Axes, at: int, count: int) -> Operand | None:
    size = shape(source)[at]
    if not isinstance(size, int):
        return None
    inner = () if size == 1 else _cut(dims[at], axes, (count, size))[1:]
    return Operand(source, (*dims[:at], inner, *dims[at + 1 :])) if size == 1 or inner else None


def _repeat_interleave(node: Node, dims: Dims, axes: Axes) -> Operand | None:
    """Every slice of one dimension repeated: the inner axis of it is the repeat."""
    count, dim = arg(node, 1, "repeats"), arg(node, 2, "dim")
    if op(node) != "repeat_interleave" or not isinstance(count, int) or dim is None or not is_tensor(node):
        return None
    at = normal_dim(node, dim)
    source = arg(node, 0, "input")
    size = shape(source)[at]
    if not isinstance(size, int):
        return None
    outer = () if size == 1 else _cut(dims[at], axes, (size, count))[:-1]
    return Operand(source, (*dims[:at], outer, *dims[at + 1 :])) if size == 1 or outer else None


def _cut(dim: tuple[str, ...], axes: Axes, sizes: tuple[int, int]) -> tuple[str, ...]:
    """The two axes of a dimension, split where it still is one; empty when it is split otherwise."""
    if len(dim) == 1:
        return axes.split(dim[0], sizes)
    return dim if tuple(axes.sizes[axis] for axis in dim) == sizes else ()


REPEATS: tuple[Callable[[Node, Dims, Axes], Operand | None], ...] = (
    _expand,
    _repeat,
    _cat_of_itself,
    _stack_of_itself,
    _repeat_interleave,
)
"""A new spelling is one function and one entry here."""
