"""The CUDA driver's functions, by name."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@cache
def function(name: str) -> Any:
    """One of them; it returns 0 where it succeeds."""
    return getattr(ctypes.CDLL("libcuda.so.1"), name)


def allow_while_capturing() -> None:
    """From here on, this thread may copy and wait while another thread captures a graph of what it does itself."""
    function("cuThreadExchangeStreamCaptureMode")(ctypes.byref(ctypes.c_int(_RELAXED)))
