"""From the operands of the two products back to q, k and v as the kernels want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from attnpatch.errors import Refused
from attnpatch.graph import arg, is_tensor, normal_dim, op, shape, value
from attnpatch.rewrites.kv_repeat import peel_repeat


def peel(node: Node) -> Node:
    """``node`` without the repeat, copies and upcasts that the kernels do not need."""
    while True:
        inner = _upcast_or_copy(node) or _cat_with_empty(node)
        if inner is None:
            return node
        node = inner


def _upcast_or_copy(node: Node) -> Node | None:
    """``x.float()``, ``x.contiguous()``: kernels multiply in x's dtype, accumulate in fp32 and take any strides."""
    if op(node) not in ("to", "float", "type", "contiguous", "double") or not is_tensor(arg(node, 0, "input")):
        return None
    narrow, wide = value(arg(node, 0, "input")).dtype, value(node).dtype
    kept = narrow == wide or (wide == torch.float32 and narrow in (torch.float16, torch.bfloat16))
    return arg(node, 0, "input") if kept and value(node).device == value(arg(node, 0, "input")).device else None


def _cat_with_empty(node: Node) -> Node | None:
    """``cat([torch.tensor([]), x])``: the first update of a dynamic cache."""
    if op(node) != "cat":
        return None
    parts = [p for p in arg(node, 0, "tensors") if shape(p) != torch.Size([0])]
    return parts[0] if len(parts) == 1 else None


def unrepeated(k: Node, v: Node) -> tuple[Node, Node]:
    """K and v without a repeat of their heads, when both repeat equally often; else as they are."""
    k, v = peel(k), peel(v)
    k_source, v_source = peel_repeat(k), peel_repeat(v)
    if k_source is None or v_source is None or shape(k_source)[1] != shape(v_source)[1]:
        return k, v
    return peel(k_source), peel(v_source)


def read(source: Node, operand: Node, reader: Node) -> tuple[Node, Node]:
    """``source`` and the node that reads it on its way to ``operand`` of ``reader``.

    Repeats and casts copy: what is written to the source after that node does not reach the product.
    """
    while operand is not source:
        inputs = operand.all_input_nodes
        reader, operand = operand, next(x for x in inputs if x is source or source in _lineage(x))
    return source, reader


def _lineage(node: Node, depth: int = 8) -> set[Node]:
    above = set(node.all_input_nodes)
    return above.union(*(_lineage(x, depth - 1) for x in above)) if depth else above


def transposed(node: Node) -> Node | None:
    """``x`` when ``node`` is x with its last two dimensions swapped."""
    if op(node) in ("mT",) or (op(node) == "getattr" and arg(node, 1, "other") == "mT"):
        return arg(node, 0, "input")
    rank = len(shape(node))
    if op(node) == "transpose":
        dims = {normal_dim(node, arg(node, i, f"dim{i - 1}")) for i in (1, 2)}
        return arg(node, 0, "input") if dims == {rank - 1, rank - 2} else None
    if op(node) == "permute":
        order = [d % rank for d in _permutation(node)]
        return arg(node, 0, "input") if order == [*range(rank - 2), rank - 1, rank - 2] else None
    return None


def _permutation(node: Node) -> Any:
    """The dims of a permute, given as one tuple or one by one."""
    dims = arg(node, 1, "dims")
    return node.args[1:] if isinstance(dims, int) else dims


def check_shapes(q: Node, k_shape: Sequence[Any], v: Node, k: Node, product: Node, output: Node) -> None:
    """Refuse products that are not ``[b, h, q, d] x [b, h or fewer, k, d] -> [b, h, q, k]``."""
    sizes = f"q {_said(shape(q))}, k {_said(k_shape)}, v {_said(shape(v))}"
    dtypes = [value(x).dtype for x in (q, k, v)]
    if len(set(dtypes)) != 1:
        raise Refused(f"q, k and v have different dtypes: {', '.join(str(d) for d in dtypes)}")
    if len({len(shape(q)), len(k_shape), len(shape(v))}) != 1 or len(k_shape) not in (3, 4):
        raise Refused(f"only [batch, heads, seqlen, head_dim] and [batch, seqlen, head_dim] are folded: {sizes}")
    if shape(q)[-1] != k_shape[-1] or not shape(q)[0] == k_shape[0] == shape(v)[0]:
        raise Refused(f"batch or head_dim do not fit together: {sizes}")
    if len(k_shape) == 4 and (k_shape[1] != shape(v)[1] or shape(q)[1] % k_shape[1]):
        raise Refused(f"the heads do not fit together: {sizes}")
    for result in (product, output):
        if list(shape(result))[:-1] != list(shape(q))[:-1]:
            raise Refused(f"a product broadcasts q: {sizes}, its result {_said(shape(result))}")


def _said(size: Sequence[Any]) -> str:
    return f"[{', '.join(str(s) for s in size)}]"
