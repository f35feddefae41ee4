"""Decode steps replayed from CUDA graphs: the host then starts one graph instead of some hundred kernels.

A call that is like the one before it (the same lengths, and weights and caches at the same addresses) is captured, and
replayed for as long as calls stay like it. All other inputs are copied into the graph's own before each replay.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attnpatch import dispatch
from attnpatch.captured import Captured, Inputs
from attnpatch.foreseeing import Course, Plan

log = logging.getLogger("attnpatch")

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


class Replays:
    """The captured steps of one model, in one memory pool."""

    def __init__(self, record: Record = record_cuda_graph, device_type: str = "cuda") -> None:
        self._record, self.device_type = record, device_type
        self._pools: dict[torch.device, Any] = {}
        self._steps: weakref.WeakSet[ReplayedStep] = weakref.WeakSet()
        self._streams: dict[torch.device, Any] = {}
        self._was_said = False
        self.level = logging.WARNING
        """Of what is said where nothing is replayed."""
        self._plan: Plan | None = None
        self.course: Course | None = None
        """Of the call in progress, if it holds the lock."""
        self.lock = threading.RLock()
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
        if not is_here or any(is_traceable_wrapper_subclass(example_inputs[i]) for i in inputs.copied):
            self._say_where(devices, inputs)
            return function
        step = ReplayedStep(function, inputs, self, devices.pop())
        self._steps.add(step)
        return step

    def _say_where(self, devices: Collection[torch.device], inputs: Inputs) -> None:
        """Once; of interest to who asked for replays."""
        if not self._was_said:
            self._was_said = True
            where = sorted({str(device) for device in devices} | inputs.devices) or ["no device"]
            log.log(
                self.level,
                "cuda_graphs=True: a graph on %s is not replayed; one of tensors on one GPU is",
                ", ".join(where),
            )

    def are_off(self) -> bool:
        """Whether a call must run its graph: it records gradients, a mode watches it, or someone else captures it."""
        if torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
            return True
        return self.device_type == "cuda" and torch.cuda.is_current_stream_capturing()

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
        with suppress(RuntimeError):  # a capture that came to its end has ended this itself
            torch._C._cuda_endAllocateToPool(device.index, pool.id)
        with torch.cuda.device(device), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device)

    @contextmanager
    def ahead(self, arguments: Mapping[str, Any], cache: Any) -> Iterator[None]:
        """Begin what the model's call inside most likely comes to, and see what it does come to.

        Args:
            arguments: of the call, by name.
            cache: among them.
        """
        is_on = len(self._steps) > 0 and hasattr(cache, "holds") and not self.are_off()
        if not is_on or not self.lock.acquire(blocking=False):
            yield
            return
        course = Course(arguments, cache)
        outer, self.course = self.course, course
        try:
            plan, self._plan = self._plan, None
            if plan is not None:
                course.begin(plan, self.wait)
            yield
            self._plan = course.end()
        finally:
            self.course = outer
            self.lock.release()

    def release(self) -> None:
        """Let go of all captured steps and their memory."""
        self._plan = None
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


def _versions(args: Sequence[Any]) -> list[Any]:
    """Counts of writes to tensors; those of an inference mode have none, and count as written."""
    return [(object() if x.is_inference() else x._version) if isinstance(x, Tensor) else None for x in args]


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


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
        course, captured = self._replays.course, self._captured
        if course is not None and course.has_begun(captured, args):
            return self._replayed(captured, args)
        key = self._inputs.key(args)
        is_repeated, self._last = key == self._last, key
        if captured is not None and key == captured.key:
            self._replays.wait(self._device)
            captured.start([args[i] for i in self._inputs.copied])
            return self._replayed(captured, args)
        if not is_repeated:
            return self._function(*args)
        state = _random_state(self._device)
        result = self._function(*args)
        if dispatch.recorded_phases() and dispatch.recorded_phases() <= PHASES:
            self._capture(args, key, draws=not torch.equal(state, _random_state(self._device)))
        return result

    def _replayed(self, captured: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        if self._replays.course is not None:
            self._replays.course.note(captured, args)
        self._last = captured.key
        return captured.results()

    def _capture(self, args: Sequence[Any], key: tuple[Any, ...], draws: bool) -> None:
        """Capture the call that just ran, for those that follow. What fails is not tried again."""
        self._captured, own = None, list(args)
        try:
            with torch.inference_mode(False):  # copies outlive the mode of this call
                for i in self._inputs.copied:
                    own[i] = args[i].detach().clone()
            before = _versions(own)
            replay, outputs, recorded = self._replays.record(self._function, own, self._device)
            written = {i for i, (old, new) in enumerate(zip(before, _versions(own), strict=True)) if old != new}
            if written & set(self._inputs.copied):  # by a graph inside of this one, or one that Inputs.of did not see
                raise ValueError("a copied input is written")
            self._captured = Captured(key, self._inputs, own, replay, outputs, recorded)
            self._captured.is_repeatable &= not draws and written <= set(self._inputs.caches)
        except Exception as error:  # of any operator that cannot be captured; the call itself has run
            self._is_refused = True
            reason = str(error) or type(error).__name__
            log.log(self._replays.level, "a step is not replayed from a CUDA graph: %s", reason.splitlines()[0])

    def release(self) -> None:
        """Forget what was captured; calls run the graph from now on."""
        self._captured, self._is_refused = None, True
