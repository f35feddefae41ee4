"""Launches past Triton's argument handling: the kernel that Triton would pick, with the very arguments it would pass.

Without a GPU: Triton's own binder and cache, a driver that only knows the target, and kernels that are not compiled
but remember what they are launched with.
"""

import gc
import random
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common import launcher, support
from attnpatch.kernels.common.launcher import Launch
from attnpatch.kernels.common.support import KnownCall, kind_of, planned


def _kernel(x, offset, y, out, strides, length, scale, window, BLOCK: tl.constexpr):
    pass


class Call(NamedTuple):
    """What the kernel takes, in another order, beside something it does not."""

    spare: Any = None
    y: Any = None
    offset: Any = None
    x: Any = None


class Launcher:
    """Triton 3.6's: the part in Python, around the one in C."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = "cooperative", "pdl"

    def __init__(self, compiled):
        self.compiled = compiled

    def __call__(self, x, y, z, stream, function, *args):
        scratch = [size or None for size in (self.global_scratch_size, self.profile_scratch_size)]
        constants = self.launch_cooperative_grid, self.launch_pdl
        self.launch(x, y, z, stream, function, *constants, *scratch, *args)

    def launch(self, x, y, z, stream, function, cooperative, pdl, scratch, profile_scratch, packed, *args):
        assert (function, packed) == (self.compiled.function, self.compiled.packed_metadata)
        assert (cooperative, pdl) == ("cooperative", "pdl")
        assert (scratch, profile_scratch) == (self.global_scratch_size or None, self.profile_scratch_size or None)
        addresses = (a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args[3:])
        self.compiled.launches.append(((x, y, z), stream, *addresses))


class Compiled:
    """What Triton compiles a specialisation to: here, what it was launched with."""

    def __init__(self, specialisation):
        self.specialisation = specialisation
        self.function, self.packed_metadata = object(), object()
        self.launches = []
        self.run = Launcher(self)

    def launch_metadata(self, grid, stream, *args):
        return "metadata"


@pytest.fixture(params=["3.6", "3.8"])
def triton_calls(monkeypatch, request):
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
    monkeypatch.setattr(launcher, "_VERSION", request.param)
    return calls


@pytest.fixture
def kernel():
    return JITFunction(_kernel, do_not_specialize=["offset", "length"])


VALUES = {"strides": (64, 1), "length": 7, "scale": 0.5, "window": None, "BLOCK": 64, "num_warps": 4}


def launch_of(call, kernel, *values):
    """The launch of a plan."""
    return Launch(kernel, 5, call, ("x", "offset", "y"), ("out",), **dict(values))


def launch(kernel, x, offset, y, out, **values):
    """As launchers of kernels do it."""
    call = Call(None, y, offset, x)
    planned(launch_of, call, kernel, *{**VALUES, **values}.items())(call, out)


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
    x, y, out = tensor(), tensor(torch.int8), tensor(torch.float16)
    launch(kernel, x, 3, y, out)
    first = specialisation_of(kernel)
    launch(kernel, x, 3, y, out)
    assert specialisation_of(kernel) == first
    assert len(triton_calls) == 1
    addresses = (x.data_ptr(), 3, y.data_ptr(), out.data_ptr())
    assert first[1] == ((5, 1, 1), ("stream", 0), *addresses, (64, 1), 7, 0.5, None, 64)


def test_other_tensors_of_the_same_kind_are_what_is_launched(kernel, triton_calls):
    pairs = [(tensor(), tensor()) for _ in range(3)]
    for x, out in pairs:
        launch(kernel, x, None, None, out)
    found = [(launched[2], launched[5]) for launched in launches_of(kernel)]
    assert found == [(x.data_ptr(), out.data_ptr()) for x, out in pairs]
    assert len(triton_calls) == 1


OFFSETS = [None, 0, 1, 2, 16, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, torch.int64, torch.int32]


def random_arguments(draw):
    def any_tensor(dtypes):
        return tensor(draw.choice(dtypes), draw.choice([0, 0, 1, 2, 4, 8, 16]))

    floats = [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
    offset = draw.choice(OFFSETS)
    return (
        any_tensor(floats),
        any_tensor([offset]) if isinstance(offset, torch.dtype) else offset,
        draw.choice([None, any_tensor([torch.bool, torch.float32, torch.int32])]),
        any_tensor([torch.float16]),
    )


@pytest.mark.parametrize("strides", [(64, 1), (64, 2), (63, 1), (0, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 16, 17], ids=str)
def test_always_the_kernel_that_triton_would_pick(strides, window, kernel, triton_calls):
    """Hundreds of argument sets, in any order: whatever is remembered is what Triton works out for this very set."""
    draw = random.Random(0)
    values = {"strides": strides, "window": window}
    ours, theirs = JITFunction(_kernel, do_not_specialize=["offset", "length"]), kernel
    kinds = set()
    for _ in range(400):
        arguments = random_arguments(draw)
        launch(ours, *arguments, **values)
        theirs[(5,)](*arguments, **{**VALUES, **values})
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
    found = []
    for arguments in (first, second, first, second):
        launch(kernel, *arguments)
        found.append(specialisation_of(kernel)[0])
    assert found[0] == found[2] != found[1] == found[3]
    assert len(triton_calls) == 2


def test_misaligned_in_another_place(kernel, triton_calls):
    """As many aligned addresses are not the same ones."""
    for shifts in ((1, 0), (0, 1)) * 2:
        launch(kernel, tensor(shift=shifts[0]), 0, None, tensor(shift=shifts[1]))
    kinds = [compiled for cache in kernel.device_caches.values() for compiled in cache[0].values()]
    assert [len(kind.launches) for kind in kinds] == [2, 2]


class OnSecondDevice(torch.Tensor):
    device = torch.device("cuda", 1)

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
    x = tensor()
    for y in (x, x.as_subclass(OnSecondDevice)) * 2:
        launch(kernel, y, 0, None, x)
    assert entered == [1, 1]
    assert [launched[1] for launched in launches_of(kernel)] == [("stream", 0)] * 2 + [("stream", 1)] * 2
    assert len(triton_calls) == 2


@pytest.mark.parametrize(
    "chain", [knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook], ids=["enter", "exit"]
)
def test_a_profiler_sees_every_launch(chain, kernel, triton_calls):
    arguments = (tensor(), 0, None, tensor())
    launch(kernel, *arguments)
    chain.add(print)
    try:
        launch(kernel, *arguments)
        launch(kernel, *arguments)
    finally:
        chain.remove(print)
    launch(kernel, *arguments)
    assert len(triton_calls) == 3
    assert len(launches_of(kernel)) == 4


@pytest.mark.parametrize("kind", ["global", "profile"])
def test_scratch_is_allocated_at_every_launch(kind, kernel, triton_calls, monkeypatch):
    monkeypatch.setattr(Launcher, f"{kind}_scratch_size", 64)
    for _ in range(2):
        launch(kernel, tensor(), 0, None, tensor())  # Launcher.launch looks at what it gets
    assert len(launches_of(kernel)) == 2
    assert len(triton_calls) == 1


def test_other_targets_are_left_to_triton(kernel, triton_calls, monkeypatch):
    """What a kernel for AMD is specialised on is more than addresses tell: sizes, too."""
    monkeypatch.setattr(driver._active, "get_current_target", lambda: GPUTarget("hip", "gfx942", 64))
    for _ in range(3):
        launch(kernel, tensor(), 0, None, tensor())
    assert len(triton_calls) == 3


def test_unknown_versions_of_triton_get_every_launch(kernel, triton_calls, monkeypatch):
    monkeypatch.setattr(launcher, "_VERSION", "4.0")
    for _ in range(3):
        launch(kernel, tensor(), 0, None, tensor())
    assert len(triton_calls) == 3


def test_interpreter_and_stand_ins_get_every_launch():
    """Anything but a JITFunction: what tests and the compiler of tests/kernels/compile_for_hopper.py put there."""
    calls = []

    class StandIn:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: calls.append((grid, args, kwargs))

    x, kernel = tensor(), StandIn()
    for _ in range(2):
        launch(kernel, x, 0, None, x)
    assert calls == [((5,), (), {"x": x, "offset": 0, "y": None, "out": x, **VALUES})] * 2


def test_too_few_made_tensors(kernel, triton_calls):
    call = Call(x=tensor(), offset=0)
    incomplete = launch_of(call, kernel, *VALUES.items())
    incomplete(call, tensor())
    with pytest.raises(IndexError):
        incomplete(call)


def test_missing_arguments_are_tritons_to_refuse(kernel, triton_calls):
    call = Call(x=tensor())
    incomplete = Launch(kernel, 5, call, ("x", "offset", "y"), (), **VALUES)
    for _ in range(2):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'out'"):
            incomplete(call)


def test_launches_keep_no_tensor(kernel, triton_calls):
    x, out = tensor(), tensor()
    references = [weakref.ref(x), weakref.ref(out)]
    launch(kernel, x, 0, None, out)
    del x, out
    gc.collect()
    assert [reference() for reference in references] == [None, None]


class Made:
    """A plan."""


def make(call, *options):
    return Made()


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch):
    monkeypatch.setattr(support, "_plans", {})
    monkeypatch.setattr(support, "_kinds", {})


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


class Fields(NamedTuple):
    a: Any
    b: Any


class OtherFields(NamedTuple):
    a: Any
    b: Any


def test_the_same_values_mean_another_thing_in_another_call():
    x = torch.zeros(2)
    kinds = [kind_of(call) for call in ((x, 1), Fields(x, 1), OtherFields(x, 1))]
    assert len(set(kinds)) == 3
    assert kind_of(Fields(torch.ones(2), 1)) is kinds[1]


def test_a_known_call_brings_its_kind():
    call = AttentionCall(*[torch.zeros(1, 1, 2, 8)] * 3, 0.5)
    known = KnownCall(*call)
    known.kind = kind_of(call)
    plan = planned(make, call)
    assert planned(make, known) is plan
    known.kind = object()
    assert planned(make, known) is not plan


@pytest.mark.parametrize("change", [{"sm_scale": 0.25}, {"q": torch.zeros(1, 1, 3, 8)}, {"sinks": torch.zeros(1)}])
def test_a_changed_call_is_of_its_own_kind(change):
    """What backends make of a call by ``_replace`` must not be run as that call is."""
    known = KnownCall(*[torch.zeros(1, 1, 2, 8)] * 3, 0.5)
    known.kind = kind_of(AttentionCall(*known))
    changed = known._replace(**change)
    assert planned(make, changed) is not planned(make, known)
    assert planned(make, changed) is not planned(make, known._replace())


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


def test_kinds_are_bounded(monkeypatch):
    monkeypatch.setattr(support, "MAX_PLANS", 3)
    for n in range(8):
        planned(make, (n,))
        assert len(support._kinds) <= 3
    assert planned(make, (7,)) is planned(make, (7,))


def test_plans_keep_no_tensor():
    x = torch.zeros(2, 3)
    reference = weakref.ref(x)
    planned(make, (x,))
    del x
    gc.collect()
    assert reference() is None
