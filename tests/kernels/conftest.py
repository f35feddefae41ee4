"""What the tests of the flash-decode kernels share."""

import pytest

from attnpatch.kernels.common import support
from attnpatch.kernels.decode import configs


@pytest.fixture
def chip(monkeypatch):
    """``chip(n)``: plans are made as for a GPU of n multiprocessors; the interpreter's has one."""

    def of(multiprocessors):
        monkeypatch.setattr(configs, "multiprocessors", lambda device: multiprocessors)
        monkeypatch.setattr(support, "_plans", {})

    return of
