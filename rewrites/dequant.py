"""K and V multiplied out of integers or 8 bit floats: the codes and their scales instead of the product.

codes.to(dtype) * scale, scale * codes.float(), (codes.float() * scale).to(dtype), codes * scale

A scale belongs to a row (a key of a head), or to less: one that varies along head_dim is no scale of rows. Zero points
and divisions are left as they are: ``k.float() * k_scale[..., None]`` is all that the operator computes. So are
products in float64, for scales are float32 there, and scales that lie on another device than the codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from attnpatch.attention_call import QUANTISED
from attnpatch.graph import CASTS, arg, is_one, is_tensor, op, shape, value
from attnpatch.rewrites.operands import lineage
from attnpatch.rule import Operand

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_codes(x: Operand) -> bool:
    """Whether ``x`` is what the operator takes with a scale."""
    return is_tensor(x.node) and value(x.node).dtype in QUANTISED


def is_made_of_codes(x: Operand) -> bool:
    """Whether codes are somewhere above ``x``."""
    return any(is_tensor(node) and value(node).dtype in QUANTISED for node in lineage(x.node))


def read_factor(x: Operand, feature: tuple[str, ...]) -> tuple[Operand, Operand | None] | None:
    """``x`` less one cast, or less one factor that is the same along ``feature``, and that factor."""
    if x.steps or value(x.node).dtype == torch.float64:
        return None
    if op(x.node) == "mul" and "out" not in x.node.kwargs:
        return _factor(x, feature)
    source = arg(x.node, 0, "input")
    if op(x.node) not in CASTS or not is_tensor(source):
        return None
    kept = value(source).dtype in (*_FLOATS, *QUANTISED) and value(x.node).dtype in _FLOATS
    return (Operand(source, x.dims), None) if kept and value(source).device == value(x.node).device else None


def _factor(x: Operand, feature: tuple[str, ...]) -> tuple[Operand, Operand] | None:
    both = arg(x.node, 0, "input"), arg(x.node, 1, "other")
    for rows, factor in (both, both[::-1]):
        if is_tensor(rows) and shape(rows) == shape(x.node):
            dims = _dims(factor, x)
            if dims is not None and not {axis for dim in dims for axis in dim} & set(feature):
                return Operand(rows, x.dims), Operand(factor, dims)
    return None


def _dims(factor: Any, x: Operand) -> tuple[tuple[str, ...], ...] | None:
    """The dims of a factor that is broadcast to ``x``; None when it is no factor that can be a scale."""
    if isinstance(factor, (int, float)):
        return ()
    if not isinstance(factor, Node) or not is_tensor(factor) or value(factor).dtype not in _FLOATS:
        return None
    if value(factor).device != value(x.node).device:
        return None
    own = x.dims[len(x.dims) - len(shape(factor)) :]
    return tuple(() if is_one(size) else dim for size, dim in zip(shape(factor), own, strict=True))
