"""Spellings of "every K/V head repeated for its group", undone: the kernels index head ``h // group_size``.

x[:, :, None].expand(B, H, n, S, D).reshape(B, H * n, S, D)    Hugging Face's repeat_kv
repeat_interleave(x, n, dim=1)
x[:, :, None].repeat(1, 1, n, 1, 1).flatten(1, 2)
x.repeat(1, n, 1, 1) of one head, x.expand(B, n, S, D) of one head     (multi-query attention)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from attnpatch.graph import arg, is_tensor, normal_dim, op, shape


def peel_repeat(node: Node) -> Node | None:
    """The tensor of which ``node`` repeats every head (dim -3) equally often, or None."""
    for spelling in REPEATS:
        source = spelling(node)
        if source is not None:
            return source
    return None


def _expand_reshape(node: Node) -> Node | None:
    """A new dimension after the heads, expanded or repeated, then merged with them."""
    if op(node) not in ("reshape", "view", "flatten") or not _ok(node, 4):
        return None
    wide = arg(node, 0, "input")
    if op(wide) not in ("expand", "broadcast_to", "repeat") or not _ok(wide, 5):
        return None
    narrow = arg(wide, 0, "input")
    if not _ok(narrow, 5) or not _is_one(shape(narrow)[2]) or not _only_dim_grows(narrow, wide, 2):
        return None
    b, h, n, s, d = shape(wide)
    if list(shape(node)) != [b, h * n, s, d]:
        return None
    return _without_new_dim(narrow)


def _without_new_dim(narrow: Node) -> Node | None:
    """``x`` of ``x[:, :, None]`` or ``x.unsqueeze(2)``."""
    if op(narrow) == "unsqueeze" and normal_dim(narrow, arg(narrow, 1, "dim")) == 2:
        return arg(narrow, 0, "input")
    if op(narrow) == "getitem" and isinstance(narrow.args[1], tuple):
        items = [i for i in narrow.args[1] if i is not Ellipsis]
        whole = [i for i in items if i is not None]
        if items[:3] == [slice(None), slice(None), None] and all(i == slice(None) for i in whole):
            return arg(narrow, 0, "input") if _ok(arg(narrow, 0, "input"), 4) else None
    return None


def _repeat_interleave(node: Node) -> Node | None:
    if op(node) != "repeat_interleave" or not _ok(node, 4) or not isinstance(arg(node, 1, "repeats"), int):
        return None
    dim = arg(node, 2, "dim")
    return arg(node, 0, "input") if dim is not None and normal_dim(node, dim) == 1 else None


def _one_head(node: Node) -> Node | None:
    """Repeating or expanding a single head is the same in any order."""
    if op(node) not in ("repeat", "expand", "broadcast_to", "expand_as") or not _ok(node, 4):
        return None
    source = arg(node, 0, "input")
    if not _ok(source, 4) or not _is_one(shape(source)[1]) or not _only_dim_grows(source, node, 1):
        return None
    return source


def _only_dim_grows(narrow: Node, wide: Node, dim: int) -> bool:
    return all(a == b for i, (a, b) in enumerate(zip(shape(narrow), shape(wide), strict=True)) if i != dim)


def _ok(node: Any, rank: int) -> bool:
    return is_tensor(node) and len(shape(node)) == rank


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


REPEATS: tuple[Callable[[Node], Node | None], ...] = (_expand_reshape, _repeat_interleave, _one_head)
"""A new spelling is one function and one entry here."""
