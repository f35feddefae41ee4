"""A captured call of a graph: which inputs stay where they are, which are copied in, and what a replay gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.utils import get_static_address_type
from torch.fx import Graph, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from attnpatch import dispatch
from attnpatch.graph import Writes, arg, memory, op, root, value, written_by

MAX_COPIED = 1 << 20
"""Bytes of an input that is copied before each replay; a larger one must stay where it is."""

MADE_ANEW = (torch.bool, torch.int32, torch.int64)
"""Dtypes of masks, ids and positions, which no call has where the last one had them: copied whatever their size. A mask
of 32 sequences of 4,352 tokens has 1.1 MB."""


class Inputs(NamedTuple):
    """Places of a graph's inputs.

    Args:
        kept: of tensors that are read and written where they lie: parameters and buffers of modules, what the graph
            writes, large ones.
        copied: of all other tensors.
        numbers: of lengths and other numbers, which are what they were at the capture.
        caches: of what new tokens are written to, and of where they begin in it, if the graph writes nothing else that
            outlives it; else empty.
        devices: types of devices of what the graph computes, see :func:`_devices`.
        wrapped: of wrappers of tensors that stay where they are, and what gets the tensors in each: DTensors of tensor
            parallel, quantised weights.
    """

    kept: tuple[int, ...]
    copied: tuple[int, ...]
    numbers: tuple[int, ...]
    caches: tuple[int, ...] = ()
    devices: frozenset[str] = frozenset()
    wrapped: tuple[tuple[int, Callable[[Any], Any]], ...] = ()

    @classmethod
    def of(cls, graph: Graph, example_inputs: Sequence[Any]) -> Inputs:
        """Sort the inputs of a graph of Dynamo's."""
        writes, found = Writes(graph), cls((), (), (), devices=_devices(graph))
        placeholders = graph.find_nodes(op="placeholder")
        for i, (node, x) in enumerate(zip(placeholders, example_inputs, strict=True)):
            if not isinstance(x, Tensor):
                found = found._replace(numbers=(*found.numbers, i))
            elif not _stays(x) and not writes.touches(node):
                found = found._replace(copied=(*found.copied, i))
            elif parts := _parts(x):
                found = found._replace(wrapped=(*found.wrapped, (i, attrgetter(*parts))))
            else:
                found = found._replace(kept=(*found.kept, i))
        return found if _may_be_shared(graph) else found._replace(caches=_caches(graph, placeholders))

    def key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """What a call must have in common with the captured one."""
        return [args[i] for i in self.numbers], self.addresses(args), [args[i].shape for i in self.copied]

    def addresses(self, args: Sequence[Any]) -> list[int]:
        """Where the inputs lie that are kept there."""
        return list(map(Tensor.data_ptr, self.staying(args)))

    def staying(self, args: Sequence[Any]) -> list[Tensor]:
        """The inputs that are kept where they lie, and the tensors in those that wrap some."""
        found = list(map(args.__getitem__, self.kept))
        for i, parts in self.wrapped:
            inner = parts(args[i])
            found.extend((inner,) if isinstance(inner, Tensor) else inner)
        return found


def _stays(x: Tensor) -> bool:
    """Whether a tensor is a module's, as Dynamo marks those, or too large to be copied."""
    is_own = isinstance(x, nn.Parameter) or get_static_address_type(x) is not None
    return is_own or (x.dtype not in MADE_ANEW and x.numel() * x.element_size() > MAX_COPIED)


def _parts(x: Any) -> list[str]:
    """Paths of the tensors in a wrapper of some, which may wrap others in turn; none of a plain tensor."""
    names = x.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(x) else []
    inner = {name: getattr(x, name) for name in names}
    tensors = {name: part for name, part in inner.items() if isinstance(part, Tensor)}
    return [path for name, part in tensors.items() for path in [f"{name}.{x}" for x in _parts(part)] or [name]]


def _may_be_shared(graph: Graph) -> bool:
    """Whether other processes may take part: they must run a step as often as this one does."""
    return any("c10d" in str(node.target) or is_traceable_wrapper_subclass(value(node)) for node in graph.nodes)


def _caches(graph: Graph, placeholders: Sequence[Node]) -> tuple[int, ...]:
    """Places of what ``cache_write`` writes, and where to; none where the graph writes other memory than its own."""
    given = {memory(node): i for i, node in enumerate(placeholders)}
    found: set[int] = set()
    for node in graph.nodes:
        targets = written_by(node)
        written = {memory(x) for x in targets}
        if op(node) == "cache_write":
            written.add(memory(arg(node, 4, "positions")))
            if not written <= given.keys():
                return ()
            found |= {given[x] for x in written}
        elif written & given.keys() or any(root(x).op == "get_attr" for x in targets):
            return ()
    return tuple(sorted(found))


def _devices(graph: Graph) -> frozenset[str]:
    """Types of devices that a graph computes on, but for constants of one element.

    Of what is computed on the CPU, or comes from there, a replay would see what was there at the capture.
    """
    found = set()
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            is_constant = not node.all_input_nodes and "rand" not in op(node)
            tensors = [x for x in tree_leaves(value(node)) if isinstance(x, Tensor)]
            found |= {x.device.type for x in tensors if x.dim() or not is_constant}
    return frozenset(found)


class Captured:
    """A captured call.

    Args:
        key: of the call, see :meth:`Inputs.key`.
        inputs: how the graph takes its inputs.
        args: the inputs captured with, the graph's own tensors in place of the copied ones.
        replay: fills ``outputs``.
        outputs: the graph's own.
        recorded: what the call dispatched.

    Attributes:
        device: where it runs.
        addresses: of each kept input.
        sizes: bytes of each.
        is_repeatable: whether a replay before another run of the graph changes nothing but new tokens in its caches.

    Raises:
        ValueError: outputs record gradients, which clones do not, wrap tensors, or share memory with each other or with
            a copy, so that handing out clones would part them.
    """

    def __init__(
        self,
        key: tuple[Any, ...],
        inputs: Inputs,
        args: Sequence[Any],
        replay: Callable[[], None],
        outputs: Sequence[Any],
        recorded: dispatch.Recording,
    ) -> None:
        self.key, self.inputs, self._replay, self._outputs = key, inputs, replay, outputs
        self.device = next(x.device for x in args if isinstance(x, Tensor))
        self.copies: list[Tensor] = [args[i] for i in inputs.copied]
        kept = inputs.staying(args)
        self.addresses: list[int] = key[1]
        self.sizes = [x.nbytes for x in kept]
        self.is_repeatable = bool(inputs.caches)
        self._recorded = recorded
        self._owned = _owned(outputs, self.copies, kept)

    def start(self, copied: list[Tensor]) -> None:
        """Replay with these values for the copied inputs."""
        if copied:
            torch._foreach_copy_(self.copies, copied)
        self._replay()

    def results(self) -> tuple[Any, ...]:
        """What the call gives. The next replay overwrites outputs: callers get clones."""
        dispatch.note_replay(self._recorded)
        return tuple(x.clone() if owned else x for x, owned in zip(self._outputs, self._owned, strict=True))


def _owned(outputs: Sequence[Any], copies: Sequence[Tensor], kept: Sequence[Tensor]) -> list[bool]:
    """Which outputs lie in the graph's memory, not in that of an input kept where it is."""
    if any(isinstance(x, Tensor) and is_traceable_wrapper_subclass(x) for x in outputs):
        raise ValueError("an output wraps other tensors")
    theirs = {_storage(x) for x in kept}
    owned = [isinstance(x, Tensor) and _storage(x) not in theirs for x in outputs]
    storages = [_storage(x) for x, is_owned in zip(outputs, owned, strict=True) if is_owned]
    if any(x.requires_grad for x, is_owned in zip(outputs, owned, strict=True) if is_owned):
        raise ValueError("outputs record gradients")
    if len({*storages, *map(_storage, copies)}) < len(storages) + len({_storage(x) for x in copies}):
        raise ValueError("outputs share memory with each other or with an input")
    return owned


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
