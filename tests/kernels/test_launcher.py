"""Launches past Triton's argument handling: the kernel that Triton would pick, with the very arguments it would pass.

Without a GPU: Triton's own binder and cache, a driver that only knows the target, and kernels that are not compiled
but remember what they are launched with.
"""

import gc
import random
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from attnpatch.kernels.common import support
from attnpatch.kernels.common.launcher import Launch
from attnpatch.kernels.common.support import planned


def _kernel(x, offset, y, out, strides, length, scale, window, BLOCK: tl.constexpr):
    pass


class Compiled:
    """What Triton compiles a specialisation to: here, what it was launched with."""

    def __init__(self, specialisation):
        self.specialisation = specialisation
        self.function, self.packed_metadata = object(), object()
        self.launches = []

    def launch_metadata(self, grid, stream, *args):
        return "metadata"

    def run(self, x, y, z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook, *args):
        assert (function, packed_metadata) == (self.function, self.packed_metadata)
        addresses = (a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args)
        self.launches.append(((x, y, z), stream, *addresses))


@pytest.fixture
def triton_calls(monkeypatch):
    """Makes ``_kernel`` launchable; the list of specialisations that Triton itself worked out, in order."""
    calls = []

    def compiled(self, key, signature, device, *rest):
        return self.device_caches[device][0].setdefault(key, Compiled(key))

    def run(self, *args, **kwargs):
        found = run_of_triton(self, *args, **kwargs)
        calls.append(found.specialisation)
        return found

    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: torch.cuda.current_device(),
        get_current_stream=lambda device: ("stream", max(device, 0)),  # -1 is the CPU, where these tensors are
    )
    run_of_triton = JITFunction.run
    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(driver, "_active", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return calls


@pytest.fixture
def kernel():
    return JITFunction(_kernel, do_not_specialize=["offset", "length"])


VALUES = {"strides": (64, 1), "length": 7, "scale": 0.5, "window": None, "BLOCK": 64, "num_warps": 4}


def tensor(dtype=torch.float32, shift=0, n=8):
    """A tensor whose address is ``shift`` elements past a multiple of 64 bytes."""
    memory = torch.empty(n + 64, dtype=dtype)
    aligned = -memory.data_ptr() % 64 // memory.element_size()
    return memory[aligned + shift :][:n]


def launches_of(kernel):
    caches = [cache[0] for cache in kernel.device_caches.values()]
    return [launch for cache in caches for compiled in cache.values() for launch in compiled.launches]


def specialisation_of(kernel):
    """That of the one kernel that was launched since the last look."""
    caches = [cache[0] for cache in kernel.device_caches.values()]
    (compiled,) = (c for cache in caches for c in cache.values() if c.launches)
    return compiled.specialisation, compiled.launches.pop()


def test_first_launch_is_tritons_the_next_is_not(kernel, triton_calls):
    launch = Launch(kernel, 12, **VALUES)
    x, y, out = tensor(), tensor(torch.int8), tensor(torch.float16)
    launch(x, 3, y, out)
    first = specialisation_of(kernel)
    launch(x, 3, y, out)
    assert specialisation_of(kernel) == first
    assert len(triton_calls) == 1
    addresses = (x.data_ptr(), 3, y.data_ptr(), out.data_ptr())
    assert first[1] == ((12, 1, 1), ("stream", 0), *addresses, (64, 1), 7, 0.5, None, 64)


def test_other_tensors_of_the_same_kind_are_what_is_launched(kernel, triton_calls):
    launch = Launch(kernel, 12, **VALUES)
    pairs = [(tensor(), tensor()) for _ in range(3)]
    for x, out in pairs:
        launch(x, None, None, out)
    found = [(launched[2], launched[5]) for launched in launches_of(kernel)]
    assert found == [(x.data_ptr(), out.data_ptr()) for x, out in pairs]
    assert len(triton_calls) == 1


OFFSETS = [None, 0, 1, 2, 16, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, torch.int64, torch.int32]


def random_leading(draw):
    def any_tensor(dtypes):
        return tensor(draw.choice(dtypes), draw.choice([0, 0, 1, 2, 4, 8, 16]))

    floats = [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
    offset = draw.choice(OFFSETS)
    return (
        any_tensor(floats),
        any_tensor([offset]) if isinstance(offset, torch.dtype) else offset,
        draw.choice([None, any_tensor([torch.bool, torch.float32, torch.int32])]),
        any_tensor(floats),
    )


@pytest.mark.parametrize("strides", [(64, 1), (64, 2), (63, 1), (0, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 16, 17], ids=str)
def test_always_the_kernel_that_triton_would_pick(strides, window, kernel, triton_calls):
    """Hundreds of argument sets, in any order: whatever Launch remembers is what Triton works out for this very set."""
    draw = random.Random(0)
    values = {**VALUES, "strides": strides, "window": window}
    ours, theirs = JITFunction(_kernel, do_not_specialize=["offset", "length"]), kernel
    launch = Launch(ours, 5, **values)
    kinds = set()
    for _ in range(400):
        leading = random_leading(draw)
        launch(*leading)
        theirs[(5,)](*leading, **values)
        found, expected = specialisation_of(ours), specialisation_of(theirs)
        assert found == expected
        kinds.add(found[0])
    through_triton = len(triton_calls) - 400
    assert len(kinds) <= through_triton < 400  # some kinds came again, and were not asked for again
    assert len(kinds) > 100


DIFFERENT = {
    "alignment": ((tensor(), 0, None, tensor()), (tensor(shift=1), 0, None, tensor())),
    "alignment of the last": ((tensor(), 0, None, tensor()), (tensor(), 0, None, tensor(shift=2))),
    "dtype": ((tensor(), 0, None, tensor()), (tensor(torch.int32), 0, None, tensor())),
    "a tensor for None": ((tensor(), 0, None, tensor()), (tensor(), 0, tensor(), tensor())),
    "a tensor for a number": ((tensor(), 0, None, tensor()), (tensor(), tensor(torch.int64), None, tensor())),
    "64 bits": ((tensor(), 2**31 - 1, None, tensor()), (tensor(), 2**31, None, tensor())),
}


@pytest.mark.parametrize(("first", "second"), DIFFERENT.values(), ids=DIFFERENT)
def test_kernels_that_must_differ(first, second, kernel, triton_calls):
    launch = Launch(kernel, 5, **VALUES)
    found = []
    for leading in (first, second, first, second):
        launch(*leading)
        found.append(specialisation_of(kernel)[0])
    assert found[0] == found[2] != found[1] == found[3]
    assert len(triton_calls) == 2


class OnSecondDevice(torch.Tensor):
    def get_device(self):
        return 1


def test_another_device(kernel, triton_calls, monkeypatch):
    """Is made the current one for the launch, and has kernels of its own."""
    entered = []

    @contextmanager
    def device(index):
        entered.append(index)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "current_device", lambda: index)
            patch.setattr(driver._active, "get_current_device", lambda: index)
            yield

    monkeypatch.setattr(torch.cuda, "device", device)
    launch = Launch(kernel, 5, **VALUES)
    x = tensor()
    for y in (x, x.as_subclass(OnSecondDevice)) * 2:
        launch(y, 0, None, x)
    assert entered == [1, 1]
    assert [launched[1] for launched in launches_of(kernel)] == [("stream", 0)] * 2 + [("stream", 1)] * 2
    assert len(triton_calls) == 2


@pytest.mark.parametrize(
    "chain", [knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook], ids=["enter", "exit"]
)
def test_a_profiler_sees_every_launch(chain, kernel, triton_calls):
    launch = Launch(kernel, 5, **VALUES)
    leading = (tensor(), 0, None, tensor())
    launch(*leading)
    chain.add(print)
    try:
        launch(*leading)
        launch(*leading)
    finally:
        chain.remove(print)
    launch(*leading)
    assert len(triton_calls) == 3
    assert len(launches_of(kernel)) == 4


def test_other_targets_are_left_to_triton(kernel, triton_calls, monkeypatch):
    """What a kernel for AMD is specialised on is more than the key holds: sizes, too."""
    launch = Launch(kernel, 5, **VALUES)
    leading = (tensor(), 0, None, tensor())
    launch(*leading)
    monkeypatch.setattr(launch, "_remembered", {})
    monkeypatch.setattr(driver._active, "get_current_target", lambda: GPUTarget("hip", "gfx942", 64))
    for _ in range(3):
        launch(*leading)
    assert len(triton_calls) == 4


def test_interpreter_and_stand_ins_get_every_launch():
    """Anything but a JITFunction: what tests and the compiler of tests/kernels/compile_for_hopper.py put there."""
    calls = []

    class StandIn:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: calls.append((grid, args, kwargs))

    launch = Launch(StandIn(), 5, **VALUES)
    x = tensor()
    for _ in range(2):
        launch(x, 0, None, x)
    assert calls == [((5,), (x, 0, None, x), VALUES)] * 2


def test_wrong_arguments_are_tritons_to_refuse(kernel, triton_calls):
    launch = Launch(kernel, 5, **VALUES)
    for _ in range(2):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'out'"):
            launch(tensor(), 0, None)


class Made:
    """A plan."""


def make(call, *options):
    return Made()


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch):
    monkeypatch.setattr(support, "_plans", {})


CALL = (torch.zeros(2, 3), None, 1.5, None, 4)


def test_a_plan_serves_other_tensors_of_the_same_kind():
    plan = planned(make, CALL, 7)
    assert planned(make, (torch.ones(5, 3)[3:], *CALL[1:]), 7) is plan


def other_make(call, *options):
    return Made()


OTHERS = {
    "shape": (make, (torch.zeros(3, 3), *CALL[1:]), 7),
    "strides": (make, (torch.zeros(3, 2).T, *CALL[1:]), 7),
    "dtype": (make, (torch.zeros(2, 3, dtype=torch.int32), *CALL[1:]), 7),
    "device": (make, (torch.zeros(2, 3, device="meta"), *CALL[1:]), 7),
    "a tensor more": (make, (CALL[0], CALL[0], *CALL[2:]), 7),
    "a number": (make, (*CALL[:2], 1.25, *CALL[3:]), 7),
    "a number in another place": (make, (CALL[0], None, 1.5, 4, None), 7),
    "an option": (make, CALL, 8),
    "no option": (make, CALL),
    "another maker": (other_make, CALL, 7),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_plan_of_its_own(other):
    plan = planned(make, CALL, 7)
    assert planned(*other) is not plan
    assert planned(make, CALL, 7) is plan


def test_a_failure_is_not_remembered():
    def fail(call):
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            planned(fail, CALL)


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(support, "MAX_PLANS", 3)
    for n in range(8):
        planned(make, CALL, n)
        assert len(support._plans) <= 3
    assert planned(make, CALL, 7) is planned(make, CALL, 7)


def test_plans_keep_no_tensor():
    x = torch.zeros(2, 3)
    reference = weakref.ref(x)
    planned(make, (x,))
    del x
    gc.collect()
    assert reference() is None
