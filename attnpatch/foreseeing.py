"""Replays begun before it is known what a call comes to: the GPU then works while the host finds out.

At every call torch.compile checks all that its graphs depend on, some thousand guards. A call that looks like the one
before is therefore replayed first and checked behind: where torch.compile comes to the same graph with the same inputs,
the replay is its result. Where it does not (weights, hooks, modes or the config have changed), what it comes to runs
as ever, and the replay was in vain.

One in vain changes nothing that is seen, since it only starts where all it writes are as many new tokens as the call
has, behind those that this call's own cache stores: the call writes them again before it reads them, or leaves them
behind the end. It draws no random numbers, and all it reads lies where it was.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnpatch.captured import Captured

log = logging.getLogger("attnpatch")


_nbytes = attrgetter("nbytes")


class Foreseen(NamedTuple):
    """A call of a graph that is expected: what was captured, and inputs by how they are taken."""

    captured: Captured
    kept: list[Any]
    copied: list[Any]
    numbers: list[Any]

    @classmethod
    def of(cls, captured: Captured, args: Sequence[Any]) -> Foreseen:
        """A call with the inputs ``args``."""
        return cls(captured, *([args[i] for i in places] for places in captured.inputs[:3]))

    def is_there(self) -> bool:
        """Whether a replay finds its inputs: those that are copied like its own, all others where they were."""
        captured = self.captured
        if not all(map(_is_alike, self.copied, captured.copies)):
            return False
        try:
            at_home = list(map(Tensor.data_ptr, self.kept)) == captured.addresses
        except TypeError:  # one is gone, and None in its place
            return False
        return at_home and list(map(_nbytes, self.kept)) == captured.sizes  # a weight cast twice may come home smaller

    def is_call(self, captured: Captured | None, args: Sequence[Any]) -> bool:
        """Whether a call of a graph is this one: has the very same tensors, and equal numbers."""
        if captured is not self.captured:
            return False
        kept, copied, numbers = (map(args.__getitem__, places) for places in captured.inputs[:3])
        same = all(map(is_, kept, self.kept)) and all(map(is_, copied, self.copied))
        return same and list(numbers) == self.numbers


class Plan:
    """What the next call will come to, if it is like the last. Keeps nothing alive.

    Args:
        captured: what the last call replayed.
        args: inputs of its graph.
        arguments: of the model, by name.
    """

    def __init__(self, captured: Captured, args: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        self._captured = weakref.ref(captured)
        last, names = Foreseen.of(captured, args), {id(x): name for name, x in arguments.items()}
        self._kept, self._numbers = [weakref.ref(x) for x in last.kept], last.numbers
        self._copied = [(names.get(id(x)), weakref.ref(x)) for x in last.copied]
        self._written = {id(args[i]) for i in captured.inputs.caches}  # of tensors that are there as long as all are

    def foresee(self, arguments: Mapping[str, Any], cache: Any) -> Foreseen | None:
        """What a call with these arguments will come to; None if that cannot be told before."""
        captured = self._captured()
        if captured is None:
            return None
        copied = [x() if name is None else arguments.get(name) for name, x in self._copied]
        foreseen = Foreseen(captured, [x() for x in self._kept], copied, self._numbers)
        return foreseen if foreseen.is_there() and cache.holds(self._written) else None


class Course:
    """One call of a model: the replay begun ahead of it, if any, and what it came to.

    Args:
        arguments: of the model, by name.
        cache: among them.
    """

    def __init__(self, arguments: Mapping[str, Any], cache: Any) -> None:
        self._arguments, self._cache = arguments, cache
        self._plan: Plan | None = None
        self._begun: Foreseen | None = None
        self._replayed: tuple[Captured, Sequence[Any]] | None = None

    def begin(self, plan: Plan, wait: Callable[[torch.device], None]) -> None:
        """Replay what ``plan`` foresees; ``wait`` for what ran on its device."""
        foreseen = plan.foresee(self._arguments, self._cache)
        if foreseen is not None:
            wait(foreseen.captured.device)
            foreseen.captured.start(foreseen.copied)
            self._plan, self._begun = plan, foreseen

    def has_begun(self, captured: Captured | None, args: Sequence[Any]) -> bool:
        """Whether the replay of this call of a graph is begun; asked once per call of a graph, before it runs."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.is_call(captured, args):
            return True
        self._forget(begun)
        return False

    def note(self, captured: Captured, args: Sequence[Any]) -> None:
        """A call of a graph is replayed."""
        self._replayed = captured, args

    def end(self) -> Plan | None:
        """What the next call will come to."""
        begun, self._begun = self._begun, None
        self._forget(begun)
        if self._replayed is None or not self._replayed[0].is_repeatable:
            return None
        return self._plan or Plan(*self._replayed, self._arguments)

    def _forget(self, begun: Foreseen | None) -> None:
        """A step that was replayed in vain is not begun ahead again, until it is captured anew."""
        if begun is not None:
            log.debug("a step was replayed in vain: the call came to something else")
            begun.captured.is_repeatable, self._plan = False, None


def _is_alike(x: Any, copy: Tensor) -> bool:
    return type(x) is Tensor and x.shape == copy.shape and x.dtype == copy.dtype and x.device == copy.device
