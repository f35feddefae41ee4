"""Whether a tensor comes of codes of 4 bits, before anyone tries to read how."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnpatch.attention_call import PACKED
from attnpatch.graph import is_tensor, op, shape, value
from attnpatch.rewrites.constants import CASTS, ELEMENTWISE, MOVES, PRODUCTS
from attnpatch.rewrites.gathers import GATHERS
from attnpatch.rewrites.operands import regroups

_PASSED = frozenset(
    [*CASTS, *ELEMENTWISE, *MOVES, *PRODUCTS, "expand", "index", "embedding", "index_copy", "with_recent"]
)
_OF_NIBBLES = ("and", "rshift", "bitwise_right_shift", "remainder", "mod", "floordiv", "floor_divide")


def is_unpacked(x: Node) -> bool:
    """Whether ``x`` comes of bytes that are cut or looked up, by steps that may be those of unpacking."""
    seen: set[tuple[Node, bool]] = set()
    pending = [(x, False)]
    while pending:
        node, is_cut = state = pending.pop()
        if is_cut and is_tensor(node) and value(node).dtype == PACKED:
            return True
        if state not in seen and (op(node) in _PASSED or regroups(node)):
            seen.add(state)
            pending += [(source, is_cut or cuts) for source, cuts in _sources(node)]
    return False


def _sources(node: Node) -> Iterator[tuple[Node, bool]]:
    """What ``node`` is made of, and whether it cuts that into nibbles or looks a value up by it."""
    found = next((x for x in (spelling(node) for spelling in GATHERS) if x is not None), None)
    ids = None if found is None else found[2]
    for source in _by_square(node) if op(node) in PRODUCTS else node.all_input_nodes:
        yield source, op(node) in _OF_NIBBLES or source is ids


def _by_square(node: Node) -> Iterator[Node]:
    """What a product multiplies with a square matrix, as rotations are."""
    inputs = [x for x in node.all_input_nodes if is_tensor(x)]
    if any(len(shape(x)) == 2 and statically_known_true(shape(x)[0] == shape(x)[1]) for x in inputs):
        yield from inputs
