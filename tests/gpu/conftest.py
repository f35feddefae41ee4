"""Launches that say whether the driver took them, and a watchdog for kernels that may hang."""

import faulthandler

import pytest
import torch

from attnpatch.kernels.common import launcher, support
from tests.gpu.calls import prefill_backend

WATCHDOG_S = 90


@pytest.fixture
def hopper():
    """A device that has triton.prefill_hopper. A barrier that nobody arrives at hangs: then the process ends."""
    if prefill_backend() != "triton.prefill_hopper":
        pytest.skip("needs compute capability 9.0")
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    yield
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def answers(monkeypatch):
    """Whether the driver took them, of the launches it was asked for; plans are made anew."""
    given, prepared = [], launcher.driver_launch

    def driver_launch(*args):
        ready = prepared(*args)
        assert ready is not None
        return lambda *launch: given.append(ready(*launch)) or given[-1]

    monkeypatch.setattr(launcher, "driver_launch", driver_launch)
    monkeypatch.setattr(support, "_plans", {})
    return given
