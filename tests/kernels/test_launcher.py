"""Launches past Triton's argument handling: the kernel that Triton would pick, and to the byte what it would pass.

Without a GPU: Triton's own binder and cache, a driver that only knows the target, and kernels that are not compiled
but remember what they are launched with. What Triton passes, in which order and how wide, is read off the launcher in
C that it generates for a signature.
"""

import ctypes
import gc
import multiprocessing
import random
import re
import shutil
import struct
import subprocess
import threading
import weakref
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import include_dirs, make_launcher
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common import driver as cuda
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


class Launched(NamedTuple):
    """One launch, as cuLaunchKernelEx sees it: sizes, attributes as pairs of id and value, parameters as bytes."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: list[tuple[int, int]]
    parameters: list[bytes]


FORMATS = {"CUdeviceptr": "Q", "int8_t": "b", "uint8_t": "B", "int32_t": "i", "int64_t": "q", "uint64_t": "Q"}


PLAIN = {
    "num_ctas": 1,
    "shared": 4096,
    "launch_cooperative_grid": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}


class Compiled:
    """What Triton compiles a specialisation to: here, what it was launched with."""

    loaded: ClassVar[dict[int, Any]] = {}
    special: ClassVar[dict[str, Any]] = {}

    def __init__(self, specialisation, signature, options):
        self.specialisation = specialisation
        self.src = SimpleNamespace(signature=signature)
        facts = {"num_warps": options.num_warps, "launch_pdl": getattr(options, "launch_pdl", False)}
        self.metadata = SimpleNamespace(**{**PLAIN, **facts, **self.special})
        self.packed_metadata = None
        self.function = 1000 + len(self.loaded)
        self.loaded[self.function] = self
        self.launches = []
        self.kinds = kinds_of(signature)

    def launch_metadata(self, grid, stream, *args):
        return "metadata"

    def run(self, x, y, z, stream, function, packed, metadata, enter_hook, exit_hook, *args):
        """Triton's launcher."""
        assert function == self.function
        parameters = [packed_as(kind, flat(args)[place]) for place, kind in self.kinds] + [bytes(8)] * 2
        attributes = [(PROGRAMMATIC_STREAM_SERIALIZATION, 1)] if self.metadata.launch_pdl else []
        block = (32 * self.metadata.num_warps, 1, 1)
        self.launches.append(Launched((x, y, z), block, self.metadata.shared, stream, attributes, parameters))


def kinds_of(signature):
    """What the launcher in C that Triton generates passes: places among the flat arguments and types, in order."""
    source = make_launcher({}, signature, None)
    declaration = re.search(r"static void _launch\(.*\) {", source)[0]
    declared = {place: kind for kind, place in re.findall(r"(\w+) arg(\d+)\b", declaration)}
    passed = re.search(r"void \*params\[\] = { (.*) };", source)[1].split(", ")
    assert passed[-2:] == ["&global_scratch", "&profile_scratch"]
    return [(int(name[4:]), declared[name[4:]]) for name in passed[:-2]]


def flat(args):
    return [inner for x in args for inner in (flat(x) if isinstance(x, tuple) else [x])]


def packed_as(kind, value):
    if isinstance(value, torch.Tensor):
        value = value.data_ptr()
    floats = {"uint32_t": "f", "uint64_t": "d"}  # Triton stores them so
    return struct.pack(floats[kind] if isinstance(value, float) else FORMATS[kind], value)


PROGRAMMATIC_STREAM_SERIALIZATION = int(
    re.search(
        r"CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION += (\d+)", Path(include_dirs[0], "cuda.h").read_text()
    )[1]
)


class CudaDriver:
    """cuLaunchKernelEx: reads what it is given as C lays it out."""

    def __init__(self):
        self.answers = []  # of the next calls; 0 when there is none
        self.before = lambda: None  # what happens before it reads
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        self.launch = prototype(self._launch)

    def _launch(self, config, function, parameters, extra):
        self.before()
        answer = self.answers.pop(0) if self.answers else 0
        if answer == 0:
            *sizes, stream, attributes, count = struct.unpack("7I4xQQI", ctypes.string_at(config, 52))
            pairs = [struct.unpack("I4xQ", ctypes.string_at(attributes + 72 * i, 16)) for i in range(count)]
            compiled = Compiled.loaded[function]
            formats = [FORMATS.get(kind, "f") for _, kind in compiled.kinds] + ["Q", "Q"]
            where = struct.unpack(f"{len(formats)}Q", ctypes.string_at(parameters, 8 * len(formats)))
            read = [ctypes.string_at(at, struct.calcsize(form)) for at, form in zip(where, formats, strict=True)]
            launched = Launched(tuple(sizes[:3]), tuple(sizes[3:6]), sizes[6], stream, pairs, read)
            compiled.launches.append(launched)
        return answer


@pytest.fixture
def cuda_driver(monkeypatch):
    found = CudaDriver()
    monkeypatch.setattr(cuda, "_cu_launch", lambda: found.launch)
    monkeypatch.setattr(Compiled, "loaded", {})
    return found


@pytest.fixture
def triton_calls(monkeypatch, cuda_driver):
    """Makes ``_kernel`` launchable; the list of specialisations that Triton itself worked out, in order."""
    calls = []

    def compiled(self, key, signature, device, constants, options, *rest):
        return self.device_caches[device][0].setdefault(key, Compiled(key, signature, options))

    def run(self, *args, **kwargs):
        found = run_of_triton(self, *args, **kwargs)
        calls.append(found.specialisation)
        return found

    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: torch._C._cuda_getDevice(),
        get_current_stream=lambda device: 70 + max(device, 0),  # -1 is the CPU, where these tensors are
    )
    run_of_triton = JITFunction.run
    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(driver, "_active", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
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
    addresses = [struct.pack("Q", t.data_ptr()) for t in (x, y, out)]
    offset, stride, length, scale = (
        struct.pack("i", 3),
        struct.pack("i", 64),
        struct.pack("i", 7),
        struct.pack("f", 0.5),
    )
    parameters = [addresses[0], offset, *addresses[1:], stride, length, scale, bytes(8), bytes(8)]  # 1, None: constants
    assert first[1] == Launched((5, 1, 1), (128, 1, 1), 4096, 70, [], parameters)


def test_other_tensors_of_the_same_kind_are_what_is_launched(kernel, triton_calls):
    pairs = [(tensor(), tensor()) for _ in range(3)]
    for x, out in pairs:
        launch(kernel, x, None, None, out)
    found = [launched.parameters[:2] for launched in launches_of(kernel)]
    assert found == [[struct.pack("Q", t.data_ptr()) for t in pair] for pair in pairs]
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


@pytest.mark.parametrize("strides", [(64, 1), (64, 2), (63, 1), (0, 1), (2**40, (None, 2))], ids=str)
@pytest.mark.parametrize("window", [None, 1, 16, 17, True, False, 2.5, -(2**40), 2**63], ids=str)
def test_always_the_kernel_that_triton_would_pick(strides, window, kernel, triton_calls):
    """Hundreds of argument sets, in any order: what Triton works out for this very set, and passes to the byte."""
    draw = random.Random(0)
    values = {"strides": strides, "window": window}
    ours, theirs = JITFunction(_kernel, do_not_specialize=["offset", "length"]), kernel
    kinds = set()
    for _ in range(200):
        arguments = random_arguments(draw)
        launch(ours, *arguments, **values)
        theirs[(5,)](*arguments, **{**VALUES, **values})
        found, expected = specialisation_of(ours), specialisation_of(theirs)
        assert found == expected
        kinds.add(found[0])
    through_triton = len(triton_calls) - 200
    assert len(kinds) <= through_triton < 200  # some kinds came again, and were not asked for again
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
            patch.setattr(torch._C, "_cuda_getDevice", lambda: index)
            yield

    monkeypatch.setattr(torch.cuda, "device", device)
    x = tensor()
    for y in (x, x.as_subclass(OnSecondDevice)) * 2:
        launch(kernel, y, 0, None, x)
    assert entered == [1, 1]
    assert [launched.stream for launched in launches_of(kernel)] == [70] * 2 + [71] * 2
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


SPECIAL = {
    "global scratch": {"global_scratch_size": 64},
    "profile scratch": {"profile_scratch_size": 64},
    "a cluster": {"num_ctas": 2},
    "a cooperative grid": {"launch_cooperative_grid": True},
    "oversized shared memory": {"shared": 229 << 10},
}


@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
def test_kernels_that_need_more_get_it_from_triton(special, kernel, triton_calls, monkeypatch):
    monkeypatch.setattr(Compiled, "special", special)
    for _ in range(2):
        launch(kernel, tensor(), 0, None, tensor())
    assert len(triton_calls) == len(launches_of(kernel)) == 2


def test_a_type_that_is_not_known_is_left_to_triton(kernel, triton_calls, monkeypatch):
    monkeypatch.delitem(cuda._TYPES, "fp32")
    for _ in range(2):
        launch(kernel, tensor(), 0, None, tensor())
    assert len(triton_calls) == 2


@pytest.mark.parametrize("overlaps", [False, True])
def test_programmatic_dependent_launch(overlaps, kernel, triton_calls):
    for _ in range(2):
        launch(kernel, tensor(), 0, None, tensor(), launch_pdl=overlaps, num_warps=8)
    tritons, ours = launches_of(kernel)
    assert len(triton_calls) == 1
    assert ours.attributes == tritons.attributes == [(PROGRAMMATIC_STREAM_SERIALIZATION, 1)] * overlaps
    assert ours.block == tritons.block == (256, 1, 1)


def test_what_the_driver_refuses_is_asked_of_triton(kernel, triton_calls, cuda_driver):
    """A thread that is new to CUDA has no context yet; Triton gives it one, and words the errors."""
    arguments = (tensor(), 0, None, tensor())
    launch(kernel, *arguments)
    cuda_driver.answers = [201]
    launch(kernel, *arguments)
    assert len(triton_calls) == len(launches_of(kernel)) == 2
    launch(kernel, *arguments)
    assert len(triton_calls) == 2
    assert len(launches_of(kernel)) == 3


def test_two_threads_launch_what_they_were_given(kernel, triton_calls, cuda_driver):
    """The second comes while the driver is about to read what the first gave it."""
    mine, other, out = tensor(), tensor(), tensor()
    launch(kernel, mine, 0, None, out)
    second = threading.Thread(target=lambda: launch(kernel, other, 0, None, out))

    def interrupt():
        cuda_driver.before = lambda: None
        second.start()
        second.join(0.05)

    cuda_driver.before = interrupt
    launch(kernel, mine, 0, None, out)
    second.join()
    found = [launched.parameters[0] for launched in launches_of(kernel)]
    assert found == [struct.pack("Q", x.data_ptr()) for x in (mine, mine, other)]
    assert len(triton_calls) == 1


def test_one_launch_then_another(kernel, triton_calls):
    """Both get what the call holds; the second takes more of what is made."""
    x, made = tensor(), (tensor(), tensor(torch.float16))
    call, later = Call(x=x), JITFunction(_later)
    then = Launch(later, 3, call, (), ("partial", "out"), num_warps=2)
    first = Launch(kernel, 5, call, ("x", "offset", "y"), ("out",), then, **VALUES)
    for _ in range(2):
        first(call, *made)
    assert len(triton_calls) == 2
    for launched in launches_of(kernel):
        assert launched.parameters[:2] == [struct.pack("Q", t.data_ptr()) for t in (x, made[0])]
    for launched in launches_of(later):
        assert launched.grid == (3, 1, 1)
        assert launched.parameters == [*[struct.pack("Q", t.data_ptr()) for t in made], bytes(8), bytes(8)]


def _later(partial, out):
    pass


def test_the_second_of_two_is_refused(kernel, triton_calls, cuda_driver):
    call, later = Call(x=tensor()), JITFunction(_later)
    then = Launch(later, 3, call, (), ("partial", "out"))
    first = Launch(kernel, 5, call, ("x", "offset", "y"), ("out",), then, **VALUES)
    made = tensor(), tensor()
    first(call, *made)
    cuda_driver.answers = [0, 700]
    first(call, *made)
    assert len(triton_calls) == 4
    assert [len(launches_of(each)) for each in (kernel, later)] == [3, 2]


@pytest.mark.parametrize("unknown", [0, 1])
def test_one_of_two_needs_more(unknown, triton_calls, monkeypatch):
    kernels = JITFunction(_kernel), JITFunction(_later)
    plain = cuda._is_plain
    monkeypatch.setattr(cuda, "_is_plain", lambda kernel: plain(kernel) and (kernel.programs == 3) != bool(unknown))
    call = Call(x=tensor())
    first = Launch(
        kernels[0],
        5,
        call,
        ("x", "offset", "y"),
        ("out",),
        Launch(kernels[1], 3, call, (), ("partial", "out")),
        **VALUES,
    )
    for _ in range(2):
        first(call, tensor(), tensor())
    assert len(triton_calls) == 4


def test_a_profiler_sees_both_launches(kernel, triton_calls):
    call, later = Call(x=tensor()), JITFunction(_later)
    then = Launch(later, 3, call, (), ("partial", "out"))
    first = Launch(kernel, 5, call, ("x", "offset", "y"), ("out",), then, **VALUES)
    knobs.runtime.launch_enter_hook.add(print)
    try:
        for _ in range(2):
            first(call, tensor(), tensor())
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert len(triton_calls) == 4


def _all_of_it(x, offset, y, out, strides, length, scale, window, flag, BLOCK: tl.constexpr):
    value = length + strides[0] + offset + tl.load(x)
    tl.store(out, value * scale + window, mask=flag)


def test_a_compiled_kernel_takes_what_is_passed():
    """In a process of its own: the interpreter leaves changes in the language that the compiler cannot use."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        fresh.submit(_check_what_a_compiled_kernel_takes).result()


def _check_what_a_compiled_kernel_takes():
    """By its PTX: as many parameters, as wide, in this order."""
    signature = {"x": "*fp32", "offset": "i64", "y": "constexpr", "out": "*fp32", "strides": ("i32", "constexpr")}
    signature |= {"length": "i32", "scale": "fp32", "window": "fp64", "flag": "u1", "BLOCK": "constexpr"}
    constants = {(2,): None, (4, 1): 1, (9,): 64}
    source = ASTSource(JITFunction(_all_of_it), signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    wide = [int(bits) // 8 for bits in re.findall(r"\.param \.\w(\d+)", compiled.asm["ptx"])]
    assert wide == [8, 8, 8, 4, 4, 4, 8, 1, 8, 8]
    assert compiled.src.signature == signature
    assert [getattr(compiled.metadata, name) for name in PLAIN if name != "shared"] == [1, False, 0, 0]
    values = {"offset": 2**40, "strides": (64, 1), "length": 7, "scale": 0.5, "window": 2.5, "flag": True}
    arguments = cuda._arguments(cuda.Loaded(compiled, 1, {"x": 0, "out": 1}, values))
    sizes = [8 if kind[0] == "*" else ctypes.sizeof(cuda._TYPES[kind]) for kind, _ in arguments]
    assert [*sizes, 8, 8] == wide


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_structures_are_those_of_cuda(tmp_path):
    """Against the header, by a compiler of C."""
    asked = {
        "sizeof(CUlaunchAttribute)": ctypes.sizeof(cuda._Attribute),
        "sizeof(CUlaunchConfig)": ctypes.sizeof(cuda._Config),
        "offsetof(CUlaunchAttribute, value)": cuda._Attribute.value.offset,
        "offsetof(CUlaunchConfig, blockDimX)": cuda._Config.block.offset,
        "offsetof(CUlaunchConfig, sharedMemBytes)": cuda._Config.shared.offset,
        "offsetof(CUlaunchConfig, hStream)": cuda._Config.stream.offset,
        "offsetof(CUlaunchConfig, attrs)": cuda._Config.attributes.offset,
        "offsetof(CUlaunchConfig, numAttrs)": cuda._Config.num_attributes.offset,
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": cuda._OVERLAPS.id,
    }
    asserts = "".join(f'_Static_assert({name} == {ours}, "{name}");\n' for name, ours in asked.items())
    source = tmp_path / "layout.c"
    source.write_text(f"#include <stddef.h>\n#include <cuda.h>\n{asserts}")
    command = ["gcc", "-fsyntax-only", f"-I{include_dirs[0]}", source]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""


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
