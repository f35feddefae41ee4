"""Who reads the values of a tensor: not what looks at its shape alone, and not what nobody reads in turn."""

from __future__ import annotations

from torch.fx import Node

from attnpatch.graph import op, written_by

_OF_SHAPE = ("ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full", "new_empty")
_AS = ("expand_as", "type_as", "view_as", "reshape_as")


def reads(node: Node, user: Node) -> bool:
    """Whether ``user`` needs the values of ``node``, for something that leaves the graph or is written."""
    seen: set[Node] = set()
    pending = [(node, user)]
    while pending:
        source, reader = pending.pop()
        if reader in seen or _is_of_shape(source, reader):
            continue
        if reader.op == "output" or written_by(reader):
            return True
        seen.add(reader)
        pending.extend((reader, x) for x in reader.users)
    return False


def _is_of_shape(source: Node, reader: Node) -> bool:
    """Whether ``reader`` looks at shape, dtype and device only."""
    return op(reader) in (*_OF_SHAPE, "size", "dim") or (op(reader) in _AS and reader.args[0] is not source)
