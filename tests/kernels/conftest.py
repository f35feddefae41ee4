"""What the tests of the kernels share."""

import functools

import pytest
from triton.runtime import interpreter

from attnpatch.kernels.common import support
from attnpatch.kernels.decode import configs


@pytest.fixture(autouse=True, scope="session")
def _language_is_patched_once():
    """The interpreter patches Triton's language at a launch, and again for every call of a device function, which took
    half of the time. Only Triton's own functions need that, the first time: they name the language in another way.
    """
    patch_once = functools.cache(lambda module, function: interpreter._patch_lang(function))

    def call(self, *args, **kwargs):
        if self.fn.__module__.startswith("triton."):
            patch_once(self.fn.__module__, self.fn)
        return self.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield


@pytest.fixture
def chip(monkeypatch):
    """``chip(n)``: plans are made as for a GPU of n multiprocessors; the interpreter's has one."""

    def of(multiprocessors):
        monkeypatch.setattr(configs, "multiprocessors", lambda device: multiprocessors)
        monkeypatch.setattr(support, "_plans", {})

    return of
