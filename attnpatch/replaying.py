"""Decode steps replayed from CUDA graphs: the host then starts one graph instead of some hundred kernels.

A call that is like the one before it (the same lengths, and weights and caches at the same addresses) is captured, and
replayed for as long as calls stay like it. All other inputs are copied into the graph's own before each replay.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from attnpatch import dispatch
from attnpatch.graph import Writes, op, value

log = logging.getLogger("attnpatch")

MAX_COPIED = 1 << 20
"""Bytes of an input that is copied before each replay; a larger one must stay where it is."""

PHASES = frozenset({"decode", "append"})
"""Steps short enough for the host to be what they wait for. A captured prefill would hold on to its activations."""

Record = Callable[[Callable[..., Any], Sequence[Any], Any], tuple[Callable[[], None], Sequence[Any]]]


def record_cuda_graph(
    function: Callable[..., Any], args: Sequence[Any], pool: Any
) -> tuple[Callable[[], None], Sequence[Any]]:
    """Capture ``function(*args)`` without running it: what replays it, and the outputs that a replay fills."""
    graph = torch.cuda.CUDAGraph()
    device = next(x.device for x in args if isinstance(x, Tensor))
    # thread_local: other threads may go on using the device, as streamers and data loaders do
    capture = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    here = torch.cuda.stream(torch.cuda.current_stream(device))  # back to it, even from a capture that fails at its end
    with torch.cuda.device(device), here, capture:
        outputs = function(*args)
    return graph.replay, outputs


class Inputs(NamedTuple):
    """Places of a graph's inputs.

    Args:
        kept: of tensors that are read and written where they lie: parameters, what the graph writes, large ones.
        copied: of all other tensors.
        numbers: of lengths and other numbers, which are what they were at the capture.
        devices: types of devices of what the graph computes, see :func:`_devices`.
    """

    kept: tuple[int, ...]
    copied: tuple[int, ...]
    numbers: tuple[int, ...]
    devices: frozenset[str] = frozenset()

    @classmethod
    def of(cls, graph: Graph, example_inputs: Sequence[Any]) -> Inputs:
        """Sort the inputs of a graph of Dynamo's."""
        writes, found = Writes(graph), cls((), (), (), _devices(graph))
        placeholders = graph.find_nodes(op="placeholder")
        for i, (node, x) in enumerate(zip(placeholders, example_inputs, strict=True)):
            if not isinstance(x, Tensor):
                found = found._replace(numbers=(*found.numbers, i))
            elif isinstance(x, nn.Parameter) or writes.touches(node) or x.numel() * x.element_size() > MAX_COPIED:
                found = found._replace(kept=(*found.kept, i))
            else:
                found = found._replace(copied=(*found.copied, i))
        return found

    def key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """What a call must have in common with the captured one."""
        shapes = [args[i].shape for i in self.copied]
        return *[args[i] for i in self.numbers], *[args[i].data_ptr() for i in self.kept], *shapes


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
        copies: the graph's own tensors in place of the copied inputs.
        replay: fills ``outputs``.
        outputs: the graph's own.
        kept: inputs that outputs may be views of.
        recorded: what the call dispatched.

    Raises:
        ValueError: outputs record gradients, which clones do not, or share memory with each other or with a copy, so
            that handing out clones would part them.
    """

    def __init__(
        self,
        key: tuple[Any, ...],
        copies: list[Tensor],
        replay: Callable[[], None],
        outputs: Sequence[Any],
        kept: Sequence[Tensor],
        recorded: dispatch.Recording,
    ) -> None:
        self.key, self.copies, self._replay, self._outputs = key, copies, replay, outputs
        self._recorded = recorded
        self._owned = _owned(outputs, copies, kept)

    def __call__(self, inputs: list[Tensor]) -> tuple[Any, ...]:
        """Replay with these values for the copied inputs. The next replay overwrites outputs: callers get clones."""
        if inputs:
            torch._foreach_copy_(self.copies, inputs)
        self._replay()
        dispatch.note_replay(self._recorded)
        return tuple(x.clone() if owned else x for x, owned in zip(self._outputs, self._owned, strict=True))


def _owned(outputs: Sequence[Any], copies: Sequence[Tensor], kept: Sequence[Tensor]) -> list[bool]:
    """Which outputs lie in the graph's memory, not in that of an input kept where it is."""
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


class Replays:
    """The captured steps of one model, in one memory pool."""

    def __init__(self, record: Record = record_cuda_graph, device_type: str = "cuda") -> None:
        self._record, self.device_type = record, device_type
        self._pools: dict[torch.device, Any] = {}
        self._steps: weakref.WeakSet[ReplayedStep] = weakref.WeakSet()
        self._streams: dict[torch.device, Any] = {}
        self._was_said = False
        self.lock = threading.Lock()
        """Held from the first copy in to the last clone out: a replay may overwrite the outputs of another."""

    def step(self, function: Callable[..., Any], inputs: Inputs, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """``function``, replayed where calls repeat; ``function`` itself unless it is all on one such device.

        Args:
            function: runs a graph; takes its inputs and returns a tuple.
            inputs: where the graph's inputs lie.
            example_inputs: such inputs.
        """
        tensors = [x for x in example_inputs if isinstance(x, Tensor)]
        devices = {x.device for x in tensors}
        is_here = [device.type for device in devices] == [self.device_type] and inputs.devices <= {self.device_type}
        if not is_here or any(map(is_traceable_wrapper_subclass, tensors)):  # a wrapper has no address
            self._say_where(devices, inputs)
            return function
        step = ReplayedStep(function, inputs, self, devices.pop())
        self._steps.add(step)
        return step

    def _say_where(self, devices: Collection[torch.device], inputs: Inputs) -> None:
        """Once, since someone asked for replays."""
        if not self._was_said:
            self._was_said = True
            where = sorted({str(device) for device in devices} | inputs.devices) or ["no device"]
            log.warning(
                "cuda_graphs=True: a graph on %s is not replayed; one of plain tensors on one GPU is", ", ".join(where)
            )

    def are_off(self) -> bool:
        """Whether a call must run its graph: it records gradients, or someone else captures it."""
        return torch.is_grad_enabled() or (self.device_type == "cuda" and torch.cuda.is_current_stream_capturing())

    def wait(self, device: torch.device) -> None:
        """Stay behind the last replay on a device, which may have been on another stream: all share their memory."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        last, self._streams[device] = self._streams.get(device, stream), stream
        if stream != last:
            stream.wait_stream(last)

    def record(
        self, function: Callable[..., Any], args: Sequence[Any], device: torch.device
    ) -> tuple[Callable[[], None], Sequence[Any], dispatch.Recording]:
        """Capture a call in the pool of all steps: what is cloned out of one may be overwritten by the next."""
        try:
            with dispatch.recording() as recorded, _casts_of_its_own():  # a capture is no call
                return *self._record(function, args, self._pool(device)), recorded
        except Exception:
            self._recover(device)
            raise

    def _pool(self, device: torch.device) -> Any:
        """Memory that outlives its graphs: a pool of a mere handle ends with the last, and then takes no other."""
        if device.type != "cuda":
            return None
        if device not in self._pools:
            with torch.cuda.device(device):
                self._pools[device] = torch.cuda.MemPool()
        return self._pools[device].id

    def _recover(self, device: torch.device) -> None:
        """End what a capture that fails at its end leaves begun: allocating to its pool, and drawing no numbers."""
        pool = self._pools.pop(device, None)
        if pool is None:
            return
        torch._C._cuda_endAllocateToPool(device.index, pool.id)
        with torch.cuda.device(device), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device)

    def release(self) -> None:
        """Let go of all captured steps and their memory."""
        for step in self._steps:
            step.release()
        self._steps.clear()
        self._pools.clear()


@contextmanager
def _casts_of_its_own() -> Iterator[None]:
    """Let a graph cast weights itself: the casts that autocast keeps are gone when its context ends."""
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(keeps)


class ReplayedStep:
    """A graph's callable that replays itself.

    Args:
        function: runs the graph.
        inputs: how the graph takes its inputs.
        replays: captures calls.
        device: where it runs.
    """

    def __init__(self, function: Callable[..., Any], inputs: Inputs, replays: Replays, device: torch.device) -> None:
        self._function, self._inputs, self._replays, self._device = function, inputs, replays, device
        self._captured: Captured | None = None
        self._last: tuple[Any, ...] = ()
        self._is_refused = False

    def __call__(self, *args: Any) -> Any:
        """Run or replay the graph. A second thread, and a call that must not be replayed, runs it."""
        if self._is_refused or self._replays.are_off() or not self._replays.lock.acquire(blocking=False):
            return self._function(*args)
        try:
            return self._step(args)
        finally:
            self._replays.lock.release()

    def _step(self, args: Sequence[Any]) -> Any:
        key = self._inputs.key(args)
        is_repeated, self._last = key == self._last, key
        if self._captured is not None and key == self._captured.key:
            self._replays.wait(self._device)
            return self._captured([args[i] for i in self._inputs.copied])
        result = self._function(*args)
        if is_repeated and dispatch.recorded_phases() and dispatch.recorded_phases() <= PHASES:
            self._capture(args, key)
        return result

    def _capture(self, args: Sequence[Any], key: tuple[Any, ...]) -> None:
        """Capture the call that just ran, for those that follow. What fails is not tried again."""
        self._captured, own = None, list(args)
        try:
            with torch.inference_mode(False):  # copies outlive the mode of this call
                for i in self._inputs.copied:
                    own[i] = args[i].detach().clone()
            replay, outputs, recorded = self._replays.record(self._function, own, self._device)
            copies, kept = ([own[i] for i in places] for places in (self._inputs.copied, self._inputs.kept))
            if any(x._version for x in copies):  # by a graph inside of this one, or one that Inputs.of did not see
                raise ValueError("a copied input is written")
            self._captured = Captured(key, copies, replay, outputs, kept, recorded)
        except Exception as error:  # of any operator that cannot be captured; the call itself has run
            self._is_refused = True
            reason = str(error) or type(error).__name__
            log.warning("a step is not replayed from a CUDA graph: %s", reason.splitlines()[0])

    def release(self) -> None:
        """Forget what was captured; calls run the graph from now on."""
        self._captured, self._is_refused = None, True
