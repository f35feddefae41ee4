"""Launches that say whether the driver took them."""

import pytest

from attnpatch.kernels.common import launcher, support


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
