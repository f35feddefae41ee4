"""Reads the nodes that unpack codes: what each channel that they give is made of, see :mod:`channels`.

before   y = table[stack((codes & 15, codes >> 4), -1).flatten(-2).long()] * norms;  x = y @ rotation
after    codes, norms, and the mixture that every channel of x is

Leading dimensions are rows, and each row must be made of the same row of codes and norms. What follows them are
channels, which may be viewed, cut, stacked, looked up, added, and multiplied with constants in any way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnpatch.attention_call import PACKED
from attnpatch.axes import Axes, Dims
from attnpatch.errors import Refused
from attnpatch.graph import arg, is_one, is_tensor, memory, op, place, shape, value
from attnpatch.rewrites.channels import (
    Basis,
    Bytes,
    Channels,
    Mixture,
    added,
    looked_up,
    mixture_of,
    multiplied,
    numbers,
    picked,
    turned,
)
from attnpatch.rewrites.constants import CASTS, ELEMENTWISE, MOVES, PRODUCTS, Constants, right_matrix, run
from attnpatch.rewrites.gathers import GATHERS
from attnpatch.rewrites.nibbles import is_unpacked
from attnpatch.rewrites.operands import Reading, regroups, said
from attnpatch.rewrites.products import permutation

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_EXPANDS = ("expand", "expand_as", "broadcast_to")


class Leaf(NamedTuple):
    """Codes or norms, or scales or zero points.

    Args:
        node: the tensor.
        rows: what its leading dimensions are; one more is bytes, or blocks or groups, which norms of one may lack.
    """

    node: Node
    rows: Dims


class Unpacking:
    """Reads one tensor down to its codes and norms.

    Args:
        axes: of the attention.
        reading: when K and V are read, and what is written.
        constants: of the graph.
        basis: what the channels are to be made of.

    Attributes:
        codes: the bytes, once they are found.
        norms: likewise, one tensor; of integers, two at most.
        steps: the nodes that were read.
    """

    def __init__(self, axes: Axes, reading: Reading, constants: Constants, basis: Basis) -> None:
        self.axes, self.reading, self.constants, self.basis = axes, reading, constants, basis
        self.codes: Leaf | None = None
        self.norms: tuple[Leaf, ...] = ()
        self.steps: dict[Node, tuple[Dims, Channels]] = {}

    def read(self, node: Node, rows: Dims) -> Channels:
        """What the channels of ``node`` are made of.

        Args:
            node: a tensor.
            rows: what its leading dimensions are; the others are channels.

        Raises:
            Refused: they are made of something else, or in another way.
        """
        rows = self.axes.resolve(rows)
        if node in self.steps:
            return self._again(node, rows)
        before = self.codes, self.norms, dict(self.steps)
        try:
            read = self._step(node, rows)
        except Refused:
            is_norms = self.codes is before[0]
            self.codes, self.norms, self.steps = before
            leaf = self._leaf(node, rows, is_norms)
            if leaf is None:
                raise
            read = leaf
        self.steps[node] = rows, read
        return read

    def _again(self, node: Node, rows: Dims) -> Channels:
        known, read = self.steps[node]
        if self.axes.resolve(known) != rows:
            raise Refused(f"{node.name} is read as rows of two kinds")
        return read

    # Leaves

    def _leaf(self, node: Node, rows: Dims, is_norms: bool) -> Channels | None:
        """A tensor that is codes or norms, by its dtype and width; None when it is neither."""
        head_dim, num_norms, integers = self.basis
        own = tuple(shape(node)[len(rows) :])
        if value(node).dtype == PACKED and own == (head_dim // 2,):
            self.codes = _only("codes", self.codes, Leaf(node, rows))
            return Bytes(torch.arange(head_dim // 2), torch.arange(256, dtype=torch.uint8).expand(head_dim // 2, 256))
        if not is_norms or not _are_numbers(own):
            return None
        if integers:
            count = math.prod(own)
            fits = 0 < count <= num_norms and head_dim % count == 0 and count == max((1, *own))
            return self._norms(node, rows, own) if fits and value(node).dtype in _FLOATS else None
        fits = own in ((num_norms,), () if num_norms == 1 else None)
        return self._norms(node, rows, own) if fits and value(node).dtype == torch.float16 else None

    def _norms(self, node: Node, rows: Dims, own: tuple[int, ...]) -> Mixture:
        leaf, most = Leaf(node, rows), 2 if self.basis.integers else 1
        if leaf not in self.norms:
            if len(self.norms) == most:
                raise Refused(f"norms are read from {', '.join(x.node.name for x in self.norms)} and {node.name}")
            self.norms = (*self.norms, leaf)
        first, count = 1 + self.basis.num_norms * self.norms.index(leaf), math.prod(own)
        weights = torch.zeros(count, *self.basis.size, dtype=torch.float64)
        weights[:, first : first + count, 0] = torch.eye(count)
        return Mixture(weights.reshape(*own, *self.basis.size))

    # Steps

    def _step(self, node: Node, rows: Dims) -> Channels:
        name = op(node)
        if not _are_numbers(shape(node)[len(rows) :]):
            raise Refused(f"{node.name} {said(shape(node))} has channels whose number is known only at run time")
        if name in CASTS:
            return self._cast(node, rows)
        if name in ELEMENTWISE and "out" not in node.kwargs and "alpha" not in node.kwargs:
            return self._elementwise(node, rows)
        if name in PRODUCTS:
            return self._product(node, rows)
        for spelling in GATHERS:
            found = spelling(node)
            if found is not None:
                return self._lookup(node, rows, *found)
        if regroups(node):
            return self._view(node, rows)
        if name in _EXPANDS:
            return self._expand(node, rows)
        if name in MOVES:
            return self._move(node, rows)
        raise self._refused(node, rows)

    def _refused(self, node: Node, rows: Dims) -> Refused:
        head_dim, num_norms, integers = self.basis
        if op(node) == "index_copy":
            return Refused(f"new rows are put in as they are ({place(node)})")
        dtype, width = str(value(node).dtype).removeprefix("torch."), said(shape(node)[len(rows) :])
        if value(node).dtype == PACKED:
            return Refused(f"{node.name} has {width} bytes for a vector of {head_dim} channels, not {head_dim // 2}")
        if is_unpacked(node) or not value(node).is_floating_point():
            return Refused(f"{op(node) or node.name} at {place(node)} is no step of unpacking")
        if integers:
            return Refused(f"{node.name} in {dtype} has {width} numbers a row, which are no scales of groups")
        if dtype == "float16":
            return Refused(f"{node.name} has {width} norms for a vector of {head_dim} channels, not {num_norms}")
        return Refused(f"{node.name} in {dtype} is no constant, and norms are float16")

    def _cast(self, node: Node, rows: Dims) -> Channels:
        x, dtype = self.read(arg(node, 0, "input"), rows), value(node).dtype
        if isinstance(x, Bytes):
            return Bytes(x.place, x.table.to(dtype))
        if dtype not in _FLOATS:
            raise Refused(f"unpacked values are cast to {str(dtype).removeprefix('torch.')} ({place(node)})")
        return x

    def _elementwise(self, node: Node, rows: Dims) -> Channels:
        given = {x: self._operand(x, node, rows) for x in node.all_input_nodes}
        sides = [arg(node, 0, "input"), *([] if op(node) == "neg" else [arg(node, 1, "other")])]
        both = [given[x] if isinstance(x, Node) else x for x in sides]
        packed = [x for x in both if isinstance(x, Bytes)]
        if packed and not any(isinstance(x, Mixture) for x in both) and _is_of_one_byte(packed):
            return self._of_bytes(node, rows, packed[0], given)
        mixtures = [mixture_of(_tensor(x), self.basis) for x in both]
        return self._mixed(node, rows, mixtures)

    def _of_bytes(self, node: Node, rows: Dims, first: Bytes, given: dict[Node, Any]) -> Bytes:
        tables = {x: y.table if isinstance(y, Bytes) else y[..., None] if y.dim() else y for x, y in given.items()}
        table = run(node, tables)
        if table is None:
            raise self._refused(node, rows)
        table = table.to(value(node).dtype)
        return Bytes(first.place.expand(table.shape[:-1]), table)

    def _mixed(self, node: Node, rows: Dims, x: list[Mixture]) -> Mixture:
        name = op(node)
        if name in ("add", "sub"):
            return added(x[0], x[1], 1 if name == "add" else -1)
        if name == "neg":
            return Mixture(-x[0].weights)
        if name == "mul":
            return multiplied(x[0], x[1], self.basis)
        if name == "div" and not node.kwargs and not x[1].weights[..., 1:].any() and not x[1].weights[..., 1:, :].any():
            return multiplied(x[0], Mixture(_inverse(x[1].weights)), self.basis)
        raise self._refused(node, rows)

    def _operand(self, x: Node, node: Node, rows: Dims) -> Channels | Tensor:
        """One side of an elementwise operation, whose dimensions align from the right."""
        if not is_tensor(x):
            raise self._refused(node, rows)
        width = len(shape(node)) - len(rows)
        constant = self.constants.value(x)
        if constant is not None:
            return self._of_channels(constant, width, node)
        own = max(0, len(shape(x)) - width)
        return self.read(x, _broadcast(rows[len(rows) - own :], shape(x)[:own], shape(node)[len(rows) - own :]))

    def _of_channels(self, constant: Tensor, width: int, node: Node) -> Tensor:
        lead = max(0, constant.dim() - width)
        if any(size != 1 for size in constant.shape[:lead]):
            raise Refused(f"a constant differs from row to row ({place(node)})")
        return constant.reshape(constant.shape[lead:])

    def _product(self, node: Node, rows: Dims) -> Channels:
        x, matrix = right_matrix(node, self.constants)
        if len(shape(x)) - len(rows) < 1:
            raise self._refused(node, rows)
        return turned(mixture_of(self.read(x, rows), self.basis), matrix)

    def _lookup(self, node: Node, rows: Dims, table: Node, dim: int, ids: Node) -> Channels:
        entries = self.constants.value(table)
        if entries is None:
            chosen = self.constants.value(ids)
            if chosen is None or dim < len(rows):
                raise Refused(f"the table {table.name} is no constant of the graph ({place(node)})")
            return self._chosen(node, rows, table, dim, chosen)
        if dim != 0:
            raise self._refused(node, rows)
        return looked_up(entries, self._ids(self.read(ids, rows), node, rows))

    def _chosen(self, node: Node, rows: Dims, source: Node, dim: int, ids: Tensor) -> Channels:
        """Channels in an order that is a constant."""
        x = self.read(source, rows)
        own, dim = numbers(x), dim - len(rows)
        if ids.is_floating_point() or ids.min() < 0 or ids.max() >= own.shape[dim]:
            raise self._refused(node, rows)
        return picked([x], own.index_select(dim, ids.flatten().long()).reshape(shape(node)[len(rows) :]))

    def _ids(self, x: Channels, node: Node, rows: Dims) -> Bytes:
        if not isinstance(x, Bytes) or x.table.dtype not in (torch.int32, torch.int64):
            raise self._refused(node, rows)
        return x

    # Moves

    def _view(self, node: Node, rows: Dims) -> Channels:
        source = arg(node, 0, "input")
        if value(source).dtype != value(node).dtype:
            raise self._refused(node, rows)
        own = self._rows_before(source, node, rows)
        if own is None:
            return self._flat(source, node, rows)
        x = self.read(source, own)
        return picked([x], numbers(x).reshape([int(n) for n in shape(node)[len(rows) :]]))

    def _rows_before(self, source: Node, node: Node, rows: Dims) -> Dims | None:
        """The rows of what is viewed; None where a view cuts across rows and channels."""
        before, after = shape(source), shape(node)[: len(rows)]
        for count in sorted(range(len(before) + 1), key=lambda n: abs(n - len(rows))):
            if _same(_product(before[:count]), _product(after)) and _are_numbers(before[count:]):
                return rows if _all_same(before[:count], after) else self.axes.regroup(rows, after, before[:count])
        return None

    def _flat(self, node: Node, like: Node, rows: Dims) -> Channels:
        """A tensor of one dimension, ``table.index_select(0, ids.flatten())``, that is viewed as ``like``."""
        source = arg(node, 0, "input")
        if len(shape(node)) != 1 or not is_tensor(source):
            raise self._refused(like, rows)
        if op(node) == "index_select" and (entries := self.constants.value(source)) is not None:
            return looked_up(entries, self._ids(self._flat(arg(node, 2, "index"), like, rows), node, rows))
        if regroups(node) and len(shape(source)) == len(shape(like)) and _all_same(shape(source), shape(like)):
            return self.read(source, rows)
        if op(node) in CASTS:
            x = self._flat(source, like, rows)
            if isinstance(x, Bytes):
                return Bytes(x.place, x.table.to(value(node).dtype))
        raise self._refused(like, rows)

    def _expand(self, node: Node, rows: Dims) -> Channels:
        source = arg(node, 0, "input")
        if len(shape(source)) != len(shape(node)):
            raise self._refused(node, rows)
        x = self.read(source, _broadcast(rows, shape(source), shape(node)))
        return picked([x], numbers(x).expand(shape(node)[len(rows) :]))

    def _move(self, node: Node, rows: Dims) -> Channels:
        """Run the operation on the numbers of the channels, for one row."""
        if op(node) == "getitem" and not is_tensor(arg(node, 0, "input")):
            split = arg(node, 0, "input")
            return self._run_move(node, rows, list(split.all_input_nodes), lambda x: run(split, x)[node.args[1]])
        return self._run_move(node, rows, node.all_input_nodes, lambda x: run(node, x))

    def _run_move(self, node: Node, rows: Dims, inputs: list[Node], move: Callable[[dict[Node, Any]], Any]) -> Channels:
        count = len(rows)
        order = permutation(node)
        kept = all(is_tensor(x) and _all_same(shape(x)[:count], shape(node)[:count]) for x in inputs)
        if not kept or (order is not None and order[:count] != list(range(count))):
            raise self._refused(node, rows)
        parts = [self.read(x, rows) for x in inputs]
        if not all(isinstance(x, Bytes) for x in parts):
            parts = [mixture_of(x, self.basis) for x in parts]
        given, first = dict[Node, Tensor](), 0
        for x, part in zip(inputs, parts, strict=True):
            own = first + numbers(part)
            given[x], first = own.reshape(*[1] * count, *own.shape), first + own.numel()
        moved = move(given)
        if moved is None or tuple(moved.shape) != (*[1] * count, *shape(node)[count:]):
            raise self._refused(node, rows)
        return picked(parts, moved.reshape(moved.shape[count:]))

    # What is read, and when

    def reader_of(self, leaf: Leaf) -> Node:
        """The first node that reads the memory of a leaf."""
        own, position = memory(leaf.node), self.reading.writes.position
        readers = (n for n in self.steps if memory(n) != own and any(memory(x) == own for x in _tensors(n)))
        return min(readers, key=position.__getitem__)

    def check_writes(self) -> None:
        """Refuse what was written into on the way from codes to values."""
        leaves = {memory(leaf.node) for leaf in (self.codes, *self.norms) if leaf is not None}
        for node in self.steps:
            writer = self.reading.writes.between(node, node, self.reading.anchor)
            if memory(node) not in leaves and writer is not None:
                raise Refused(f"{node.name} is written in place ({place(writer)}) after it is unpacked")


def _only(name: str, known: Leaf | None, found: Leaf) -> Leaf:
    if known is not None and known != found:
        raise Refused(f"{name} are read from both {known.node.name} and {found.node.name}")
    return found


def _broadcast(rows: Dims, before: Any, after: Any) -> Dims:
    """The rows of what is broadcast from sizes ``before`` to ``after``."""
    sizes = zip(rows, before, after, strict=False)
    return tuple(() if is_one(mine) and not is_one(whole) else dim for dim, mine, whole in sizes)


def _is_of_one_byte(packed: list[Bytes]) -> bool:
    if len(packed) == 1:
        return True
    a, b = (x.place for x in packed)
    return a.shape == b.shape and bool((a == b).all())


def _tensor(x: Any) -> Channels | Tensor:
    return torch.tensor(float(x), dtype=torch.float64) if isinstance(x, (int, float)) else x


def _inverse(weights: Tensor) -> Tensor:
    """Of constants, whose other weights are zero."""
    inverse = torch.zeros_like(weights)
    inverse[..., 0, 0] = 1 / weights[..., 0, 0]
    return inverse


def _tensors(node: Node) -> list[Node]:
    return [x for x in node.all_input_nodes if is_tensor(x)]


def _are_numbers(sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _same(a: Any, b: Any) -> bool:
    return bool(statically_known_true(a == b))


def _all_same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _product(sizes: Any) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total
