"""How long the attentions of a graph run take, and the run itself: by events on CUDA, by the clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

now = time.perf_counter


class Watch:
    """Times one run of a graph. It only ever waits for the device at the run's beginning and end.

    Attributes:
        attentions: seconds of each attention, in order of execution; of :meth:`stop`.
        whole: seconds of the run, likewise.
    """

    def __init__(self) -> None:
        self.attentions: list[float] = []
        self.whole = 0.0
        self._spans: list[tuple[Any, Any]] = []
        self._devices: set[torch.device] = set()
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        self._begin = now()

    def attention(self, run: Callable[[Any], Result], call: Any) -> Result:
        """``run(call)``, timed unless a CUDA graph captures it: then it does not run now."""
        begin = _mark(call.q.device)
        result = run(call)
        self._spans.append((begin, _mark(call.q.device)))
        self._devices.add(call.q.device)
        return result

    def stop(self) -> bool:
        """Wait for the run's end and work out all times; False, and none, when some of it was captured."""
        if any(begin is None for begin, _ in self._spans):
            return False
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.whole = now() - self._begin
        self.attentions = [_seconds(*span) for span in self._spans]
        return True


def _mark(device: torch.device) -> Any:
    """A point in time on ``device``; None while a CUDA graph is captured."""
    if device.type != "cuda":
        return now()
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) * 1e-3)
