"""Says that a call compiles, when that takes long enough for someone to wonder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from torch._dynamo.callback import callback_handler

log = logging.getLogger("attnpatch")

PATIENCE = 2.0
"""Seconds that a call may take before it says that it compiles."""


class _Current(threading.local):
    """The call in progress on this thread."""

    call: _Call | None = None


_current = _Current()


class _Call:
    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._timer: threading.Timer | None = None
        self._status: Any = None
        self._is_over = False

    def compiles(self) -> None:
        """Begin to count the time."""
        if self._timer is None:
            self._timer = threading.Timer(PATIENCE, self._show)
            self._timer.daemon = True
            self._timer.start()

    def _show(self) -> None:
        with self._lock:
            if self._is_over:
                return
            log.info("%s compiles for new shapes", self._name)
            console = Console(stderr=True)
            if console.is_terminal:
                self._status = console.status(f"attnpatch: {self._name} compiles for new shapes ...")
                self._status.start()

    def end(self) -> None:
        """Take away what is shown."""
        if self._timer is None:
            return
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._status is not None:
                self._status.stop()


@contextmanager
def shown(name: str) -> Iterator[None]:
    """Show, from PATIENCE on, that ``name`` compiles: on a terminal's stderr while it does, and in the log.

    Nothing is shown, and no thread started, for a call in which nothing is compiled.
    """
    if _began not in callback_handler.start_callbacks:  # torch._dynamo.reset() forgets it
        callback_handler.register_start_callback(_began)
    outer, _current.call = _current.call, _Call(name)
    try:
        yield
    finally:
        _current.call.end()
        _current.call = outer


def _began(_: Any) -> None:
    if _current.call is not None:
        _current.call.compiles()
