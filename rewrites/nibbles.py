"""Whether a tensor comes of codes of 4 bits, before anyone tries to read how."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnpatch.attention_call import PACKED
from attnpatch.graph import arg, is_tensor, op, shape, value
from attnpatch.rewrites.constants import CASTS, ELEMENTWISE, MOVES, PRODUCTS
from attnpatch.rewrites.operands import regroups

_PASSED = frozenset([*CASTS, *ELEMENTWISE, *MOVES, *PRODUCTS, "expand", "index", "embedding", "index_copy"])
_OF_NIBBLES = ("and", "rshift", "bitwise_right_shift", "remainder", "mod", "floordiv", "floor_divide")


def is_unpacked(x: Node) -> bool:
    """Whether ``x`` comes of nibbles of bytes, by steps that may be those of unpacking."""
    seen: set[Node] = set()
    pending = [x]
    while pending:
        node = pending.pop()
        if node in seen or not (op(node) in _PASSED or regroups(node)):
            continue
        seen.add(node)
        source = arg(node, 0, "input")
        if op(node) in _OF_NIBBLES and is_tensor(source) and value(source).dtype == PACKED:
            return True
        pending += node.all_input_nodes if op(node) not in PRODUCTS else _by_square(node)
    return False


def _by_square(node: Node) -> Iterator[Node]:
    """What a product multiplies with a square matrix, as rotations are."""
    inputs = [x for x in node.all_input_nodes if is_tensor(x)]
    if any(len(shape(x)) == 2 and statically_known_true(shape(x)[0] == shape(x)[1]) for x in inputs):
        yield from inputs
