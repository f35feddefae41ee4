"""Choose, at run time, the kernel that runs an attention call, and record the choice.

The choice depends only on what the host sees (device, dtype, head dims, lengths, which terms are present), so it
never waits for the device, and is made once for calls that are alike in all that. Backends are asked in order; each
either refuses with a sentence or runs the call.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.errors import NoBackend
from attnpatch.kernels.common.support import planned
from attnpatch.timing import Watch

log = logging.getLogger("attnpatch")

BACKEND_MODULES = {
    "cpu.sdpa": "attnpatch.kernels.sdpa.backend",
    "cpu.tiled": "attnpatch.kernels.tiled.backend",
    "triton.tbq4": "attnpatch.kernels.decode.backend",
    "triton.decode": "attnpatch.kernels.decode.backend",
    "triton.append": "attnpatch.kernels.decode.backend",
    "triton.paged": "attnpatch.kernels.decode.backend",
    "triton.prefill_fp8": "attnpatch.kernels.prefill_hopper.backend",
    "triton.prefill_hopper": "attnpatch.kernels.prefill_hopper.backend",
    "triton.prefill": "attnpatch.kernels.prefill.backend",
    "sdpa.blocked": "attnpatch.kernels.sdpa.backend",
    "sdpa.tiled": "attnpatch.kernels.tiled.backend",
}
"""Every backend in order of preference, and the module whose BACKENDS holds it. A new kernel is one line here."""

FP8 = "triton.prefill_fp8"
"""What runs only where ``prefill_dtype="fp8"`` asks for it."""

_OF_PACKED_PREFILLS = sorted(BACKEND_MODULES, key=lambda name: name != "triton.prefill_hopper")
"""The order of packed sequences of many rows: triton.append, which takes them too, is made for few."""


class Backend(NamedTuple):
    """One way to run an attention call.

    Args:
        name: dotted name, as reports and ``backends=`` spell it.
        devices: device types it runs on. A call on another device passes it over without a word.
        refuses: a sentence that says why it cannot run the call, or None when it can. Looks at no address and no value.
        run: runs the call and returns the output in the layout of ``AttentionCall.empty_output``.
    """

    name: str
    devices: tuple[str, ...]
    refuses: Callable[[AttentionCall], str | None]
    run: Callable[[AttentionCall], Tensor]


class Dispatch(NamedTuple):
    """Which backend ran a call, in which phase, and why it and no earlier one."""

    phase: str
    backend: str
    reason: str


@cache
def load_backend(name: str) -> Backend:
    """Import the module of backend ``name`` (Triton is imported only here) and return the backend."""
    return importlib.import_module(BACKEND_MODULES[name]).BACKENDS[name]


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return ``names`` as a tuple.

    Raises:
        ValueError: a name is not a backend.
    """
    unknown = [name for name in names if name not in BACKEND_MODULES]
    if unknown:
        raise ValueError(f"unknown backend {unknown[0]!r}; the backends are {', '.join(BACKEND_MODULES)}")
    return tuple(names)


def choose(call: AttentionCall, names: Sequence[str] = ()) -> tuple[Backend, Dispatch]:
    """Return the first backend that does not refuse ``call``.

    Args:
        call: the attention call.
        names: the backends that may run it, in order; empty means all of them, in the order of preference.

    Raises:
        NoBackend: every one refuses; the message lists each refusal.
    """
    refusals: list[str] = []
    for name in names or _preferred(call):
        backend = load_backend(name)
        why = _refusal(backend, call, named=bool(names) or name == FP8)
        if why is None:
            passed_over = _passed_over(name, names) if call.asks_for_fp8 and names else []
            return backend, Dispatch(call.phase, name, "; ".join([*passed_over, *refusals]) or _first_choice(name))
        if why:
            refusals.append(f"{name}: {why}")
    raise NoBackend(
        f"no backend runs attention of q {tuple(call.q.shape)}, k {tuple(call.k.shape)}, {call.q.dtype} on "
        f"{call.q.device}: " + "; ".join(refusals)
    )


def _passed_over(name: str, names: Sequence[str]) -> list[str]:
    """Why nobody asked the backend of 8 bit floats before ``name``, where ``names`` are the reason."""
    if FP8 not in names:
        return [f"{FP8}: backends= does not name it"]
    return [f"{FP8}: backends= names {name} before it"] if names.index(name) < names.index(FP8) else []


def _first_choice(name: str) -> str:
    return "asked for by prefill_dtype='fp8'" if name == FP8 else "first choice"


def _preferred(call: AttentionCall) -> Iterable[str]:
    """All backends; one for a sequence whatever its neighbours, where it must not depend on them.

    That of 8 bit floats comes first where it is asked for, and else not at all.
    """
    order = _OF_PACKED_PREFILLS if call.is_packed_prefill and not call.batch_invariant else BACKEND_MODULES
    return [*([FP8] if call.asks_for_fp8 else []), *(name for name in order if name != FP8)]


def _refusal(backend: Backend, call: AttentionCall, named: bool) -> str | None:
    """Why ``backend`` does not run ``call``; empty when it is merely for another device and nobody named it."""
    if call.q.device.type not in backend.devices:
        return f"runs on {' or '.join(backend.devices)}, not {call.q.device.type}" if named else ""
    return backend.refuses(call)


class Traffic(NamedTuple):
    """Bytes that a fused kernel does not move.

    Args:
        scores: scores and probabilities, written and read once each.
        repeats: K and V repeated for their group, written and read.
    """

    scores: int
    repeats: int


class Recording:
    """What the attentions of one graph run did, in order of execution.

    Attributes:
        watch: how long they took; None unless :func:`timed` asks for it and the run was timed from end to end.
        replayed: what was recorded when the CUDA graph that replayed this run was captured; None where none did.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        self.dispatches: list[Dispatch] = []
        self.traffic: list[Traffic] = []
        self.watch = watch
        self.replayed: Recording | None = None


class _Current(threading.local):
    """The recording in progress on this thread."""

    recording: Recording | None = None


_current = _Current()
_timers: list[object] = []
"""One for each :func:`timed` in progress, on any thread."""


@contextmanager
def timed() -> Iterator[None]:
    """Time what runs inside, on every thread, for ``attnpatch.report``: each attention and the graph run it is in.

    A timed run waits for its device at its beginning and end. Nothing else about it differs; one that a CUDA graph
    captures or replays is not timed.
    """
    _timers.append(object())
    try:
        yield
    finally:
        _timers.pop()


@contextmanager
def recording() -> Iterator[Recording]:
    """Record every attention that runs inside."""
    outer = _current.recording
    if outer is not None:
        outer.watch = None  # what runs inside is none of its own
    _current.recording = recorded = Recording(Watch() if _timers else None)
    try:
        yield recorded
        if recorded.watch is not None and not recorded.watch.stop():
            recorded.watch = None
    finally:
        _current.recording = outer


def note_replay(captured: Recording) -> None:
    """Say in the recording in progress that a CUDA graph replays what ``captured`` recorded."""
    if _current.recording is not None:
        _current.recording.replayed = captured


def recorded_phases() -> set[str]:
    """Phases of the attentions that the recording in progress has seen."""
    return {d.phase for d in _current.recording.dispatches} if _current.recording else set()


def run(call: AttentionCall, names: Sequence[str] = ()) -> Tensor:
    """Run ``call`` on the first of ``names`` that takes it, and record which."""
    backend, dispatch, traffic = planned(_choice, call, tuple(names))
    recorded = _current.recording
    if recorded is None:
        return backend.run(call)
    recorded.dispatches.append(dispatch)
    recorded.traffic.append(traffic)
    return recorded.watch.attention(backend.run, call) if recorded.watch is not None else backend.run(call)


def _choice(call: AttentionCall, names: tuple[str, ...]) -> tuple[Backend, Dispatch, Traffic]:
    backend, dispatch = choose(call, names)
    if call.asks_for_fp8 and backend.name != FP8:
        dtype = str(call.q.dtype).removeprefix("torch.")
        _warn(f"prefill_dtype='fp8', but prefills run in {dtype}: {dispatch.reason.split('; ')[0]}")
    return backend, dispatch, traffic_of(call)


@cache
def _warn(sentence: str) -> None:
    """Once, however many shapes it is true of."""
    log.warning("%s", sentence)


def traffic_of(call: AttentionCall) -> Traffic:
    """What attention written out moves besides its inputs and output, in bytes.

    Packed sequences count as equally long: their lengths are on the device.
    """
    sequences, num_heads, seqlen_q, head_dim = call.q.shape
    itemsize, rows = call.q.element_size(), sequences * seqlen_q
    keys = call.seqlen_k * (1 if call.cu_seqlens_k is not None else call.batch)
    repeated = num_heads != call.num_kv_heads
    return Traffic(
        scores=4 * itemsize * num_heads * rows * keys // max(call.batch, 1),
        repeats=2 * itemsize * num_heads * keys * (head_dim + call.head_dim_v) if repeated else 0,
    )
