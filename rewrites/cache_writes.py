"""K and V written into the two caches of one attention: by one node instead of two.

before   k_cache.index_copy_(2, positions, k); v_cache.index_copy_(2, positions, v)     or k_cache[:, :, positions] = k
after    attnpatch::cache_write(k_cache, v_cache, k, v, positions)

That is one launch less in each layer of a decode step. On a CPU there are no launches to save: nothing is merged there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnpatch.attention_call import QUANTISED
from attnpatch.graph import Writes, arg, emit, is_tensor, memory, normal_dim, op, shape, value, written_by
from attnpatch.rewrites.gathers import one_index


def saves_launches(cache: Tensor) -> bool:
    """Whether one node instead of two is faster where ``cache`` is."""
    return cache.is_cuda


class CacheWrite(NamedTuple):
    """One write of new rows.

    Args:
        node: what writes.
        cache: what is written.
        dim: the dimension that the positions count in.
        positions: where, int ``[rows]``.
        rows: what is written there, of the cache's shape but for ``dim``.
    """

    node: Node
    cache: Node
    dim: int
    positions: Node
    rows: Node

    @property
    def counts_back(self) -> bool:
        """Whether a negative position counts from the end; index_copy_ takes none."""
        return op(self.node) == "setitem"


def merge_cache_writes(graph: Graph) -> None:
    """Merge the writes of K and of V that lie before each attention of the graph."""
    attentions = (torch.ops.attnpatch.attention.default, torch.ops.attnpatch.attention_lse.default)
    positions: dict[Any, Node] = {}
    writes = Writes(graph)
    for node in [n for n in graph.nodes if n.target in attentions]:
        k, v = (_last_write(x, node, writes) for x in node.args[1:3])
        if k is not None and v is not None and _go_together(k, v, writes):
            _merge(graph, k, v, node, writes, positions)
            writes = Writes(graph)


def _last_write(cache: Any, reader: Node, writes: Writes) -> CacheWrite | None:
    """The last write to what ``reader`` reads as K or V."""
    base, stop = memory(cache), writes.position[reader]
    before = [node for node, written in writes.writes if written == base and writes.position[node] < stop]
    return _read(before[-1]) if before else None


def _read(node: Node) -> CacheWrite | None:
    args: Any = node.args
    if op(node) == "index_copy_":
        dim, positions = normal_dim(args[0], arg(node, 1, "dim")), arg(node, 2, "index")
        rows = arg(node, 3, "source")
    elif op(node) == "setitem" and is_tensor(args[0]) and (found := one_index(args[0], args[1])):
        (dim, positions), rows = found, args[2]
    else:
        return None
    write = CacheWrite(node, args[0], dim, positions, rows)
    return write if is_tensor(rows) and _fits(write) else None


def _fits(write: CacheWrite) -> bool:
    """Whether the operator can do it: caches of 3 or 4 dimensions, no codes, nothing that wants a gradient."""
    cache, rows, positions = (value(x) for x in (write.cache, write.rows, write.positions))
    plain = cache.is_floating_point() and cache.dtype not in QUANTISED and saves_launches(cache)
    if not plain or cache.requires_grad or rows.requires_grad or cache.dim() not in (3, 4):
        return False
    if positions.dtype not in (torch.int32, torch.int64) or positions.dim() != 1 or write.dim == cache.dim() - 1:
        return False
    expected = [*cache.shape[: write.dim], positions.shape[0], *cache.shape[write.dim + 1 :]]
    is_expanded = any(isinstance(stride, int) and stride == 0 for stride in cache.stride())
    return _equal(rows.shape, expected) and not is_expanded


def _equal(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def _go_together(k: CacheWrite, v: CacheWrite, writes: Writes) -> bool:
    """Whether both write the same places of two caches, and the first may wait for the second."""
    if memory(k.cache) == memory(v.cache) or (k.dim, k.positions) != (v.dim, v.positions):
        return False
    if k.counts_back != v.counts_back or not _equal(shape(k.cache)[:-1], shape(v.cache)[:-1]):
        return False
    first, last = sorted((k, v), key=lambda write: writes.position[write.node])
    written = any(writes.between(x, first.node, last.node) for x in (first.rows, first.positions))
    return not written and not _is_read_between(first, last.node, writes)


def _is_read_between(first: CacheWrite, stop: Node, writes: Writes) -> bool:
    """Whether something reads or writes the cache after its write and before ``stop``; views do not read."""
    base, low, high = memory(first.cache), writes.position[first.node], writes.position[stop]
    for node, at in writes.position.items():
        if low < at <= high and any(is_tensor(x) and memory(x) == base for x in node.all_input_nodes):
            is_view = is_tensor(node) and memory(node) == base and not written_by(node)
            if not is_view:
                return True
    return False


def _merge(graph: Graph, k: CacheWrite, v: CacheWrite, like: Node, writes: Writes, shared: dict[Any, Node]) -> None:
    last = max((k, v), key=lambda write: writes.position[write.node])
    with graph.inserting_before(last.node):
        positions = k.positions
        if k.counts_back:
            key = (positions, writes.version(positions, last.node), str(shape(k.cache)[k.dim]))
            if key not in shared:
                length = emit(graph, "size", k.cache, k.dim, like=like)
                shared[key] = emit(graph, "remainder", positions, length, like=like)
            positions = shared[key]
        caches = [_arranged(graph, write.cache, write.dim, like) for write in (k, v)]
        rows = [_arranged(graph, write.rows, write.dim, like) for write in (k, v)]
        emit(graph, torch.ops.attnpatch.cache_write.default, *caches, *rows, positions, like=like)
    for write in (k, v):
        write.node.replace_all_uses_with(write.cache)
        graph.erase_node(write.node)


def _arranged(graph: Graph, x: Node, dim: int, like: Node) -> Node:
    """``x`` as ``[.., .., positions, width]``."""
    rank = len(shape(x))
    order = [*(i for i in range(rank - 1) if i != dim), dim, rank - 1]
    if order != sorted(order):
        x = emit(graph, "permute", x, order, like=like)
    return emit(graph, "unsqueeze", x, 0, like=like) if rank == 3 else x
