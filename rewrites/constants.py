"""Tensors of a graph that are the same in every run: constants that were traced in, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg

from attnpatch.errors import Refused
from attnpatch.graph import CASTS as FLOAT_CASTS
from attnpatch.graph import Writes, arg, is_tensor, op, place, shape, value
from attnpatch.rewrites.products import Product, einsum_operands, read_product

CASTS = (*FLOAT_CASTS, "long", "int")
"""Operations that change the dtype at most."""

MADE = ("tensor", "arange", "eye", "full", "ones", "zeros")
"""Operations that make a tensor of numbers."""

ELEMENTWISE = (
    *("and", "or", "xor", "rshift", "bitwise_right_shift", "lshift", "bitwise_left_shift"),
    *("add", "sub", "mul", "div", "floordiv", "floor_divide", "mod", "remainder", "neg"),
)
"""Operations on channels, each on its own."""

MOVES = (
    *("stack", "cat", "split", "split_with_sizes", "chunk", "unbind", "getitem", "select", "narrow", "slice"),
    *("index_select", "repeat", "repeat_interleave", "transpose", "permute", "movedim", "mT"),
)
"""Operations that only say which element goes where."""

PRODUCTS = ("matmul", "mm", "einsum", "linear")
"""Products with a matrix."""

_VIEWS = ("view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "T", "t")
_PURE = frozenset(
    [*CASTS, *ELEMENTWISE, *MOVES, *_VIEWS, "index", "matmul", "mm", "getattr", "lift_fresh_copy", "block_diag", "kron"]
)
_WHERE = ("device", "layout", "pin_memory", "requires_grad")


class Constants:
    """Values of constant tensors, on the CPU.

    Args:
        writes: the graph's in-place writes: what is written is no constant. Neither are parameters and inputs; buffers
            that the graph's module holds are.
    """

    def __init__(self, writes: Writes) -> None:
        self.writes = writes
        self._known: dict[Node, Tensor | None] = {}

    def value(self, node: Any) -> Tensor | None:
        """The value of ``node``, or None."""
        if not is_tensor(node) or value(node).requires_grad:
            return None
        if node not in self._known:
            kept = not self.writes.touches(node)
            self._known[node] = self._read(node) if kept else None
        return self._known[node]

    def _read(self, node: Node) -> Tensor | None:
        if node.op == "get_attr":
            return _attribute(node)
        inputs = node.all_input_nodes
        if not (op(node) in MADE and not inputs) and not (op(node) in _PURE and inputs):
            return None
        known = {x: self.value(x) for x in inputs}
        return None if any(x is None for x in known.values()) else run(node, known)


def run(node: Node, inputs: dict[Node, Any]) -> Any:
    """What ``node`` gives of other inputs, on the CPU; None where it fails on them."""
    args: Any
    kwargs: Any
    args, kwargs = map_arg((node.args, node.kwargs), inputs.__getitem__)
    if op(node) in CASTS:
        return args[0].to(value(node).dtype)
    target = getattr(type(args[0]), node.target) if isinstance(node.target, str) else node.target
    try:
        return target(*args, **{name: x for name, x in kwargs.items() if name not in _WHERE})
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None


def _attribute(node: Node) -> Tensor | None:
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    plain = isinstance(found, Tensor) and not isinstance(found, (nn.Parameter, FakeTensor))
    return found.detach().cpu() if plain and not found.is_meta else None


def right_matrix(node: Node, constants: Constants) -> tuple[Node, Tensor]:
    """What a product multiplies from the right with a constant matrix, over its last dimension, and that matrix.

    Raises:
        Refused: neither operand is such a matrix.
    """
    for product in _products(node):
        for x, other in ((product.left, product.right), (product.right, product.left)):
            matrix, mine, theirs = constants.value(other), product.letters(x), product.letters(other)
            if matrix is None or matrix.dim() != 2 or mine[-1] not in theirs:
                continue
            left = theirs[1 - theirs.index(mine[-1])]
            if product.out_letters == (*mine[:-1], left):
                return x, matrix if theirs[0] == mine[-1] else matrix.T
    names = " and ".join(x.name for x in node.all_input_nodes)
    raise Refused(f"{names} are multiplied, and neither is a constant matrix ({place(node)})")


def _products(node: Node) -> Iterator[Product]:
    """The product at ``node``, if it is one of two tensors."""
    if op(node) == "linear" and arg(node, 2, "bias") is None:
        x, weight = arg(node, 0, "input"), arg(node, 1, "weight")
        rows = tuple(f"r{i}" for i in range(len(shape(x)) - 1))
        yield Product(x, weight, (*rows, "C"), ("Z", "C"), (*rows, "Z"))
    elif op(node) == "mm":
        yield Product(arg(node, 0, "input"), arg(node, 1, "mat2"), ("Y", "C"), ("C", "Z"), ("Y", "Z"))
    elif op(node) == "matmul" or (op(node) == "einsum" and len(einsum_operands(node)[1]) == 2):
        yield read_product(node)
