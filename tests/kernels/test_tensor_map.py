"""Descriptors for the TMA unit, by the driver: what Triton would have it encode, moved to each launch's addresses.

Without a GPU: a kernel that Triton compiles for 9.0, and three functions of the driver that remember what they are
given. A map holds its address in its first word here.
"""

import ctypes
import gc
import re
import struct
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

from attnpatch.kernels.common import driver as cuda
from attnpatch.kernels.common import libcuda, tensor_map
from attnpatch.kernels.common.launcher import Launch
from attnpatch.kernels.common.tensor_map import TensorMap, Tiled
from attnpatch.kernels.prefill_hopper.gluon_names import load_tile, store_tile, store_wait

BLOCK = [16, 128]  # two boxes of 64 columns
SHAPE, STRIDES = (50, 100), (136, 1)


@gluon.jit
def _copy_kernel(length, x, scale, o):
    tile = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, x.block_type.nbytes)
    load_tile(x, [length, 0], full, tile)
    mbarrier.wait(full, 0)
    store_tile(o, [0, 0], tile)
    store_wait(0)


class LibCuda:
    """The three functions: arguments are read as C lays them out."""

    def __init__(self):
        self.encoded, self.launched, self.answers = [], [], {}
        word, whole = ctypes.c_void_p, ctypes.c_int
        self.functions = {
            "cuTensorMapEncodeTiled": ctypes.CFUNCTYPE(whole, word, whole, ctypes.c_uint32, *[word] * 5, *[whole] * 4)(
                self._encode
            ),
            "cuTensorMapReplaceAddress": ctypes.CFUNCTYPE(whole, word, word)(self._replace),
            "cuLaunchKernelEx": ctypes.CFUNCTYPE(whole, *[word] * 4)(self._launch),
        }

    def _encode(self, where, kind, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, padding):
        arrays = [struct.unpack(f"{n}{f}", ctypes.string_at(a, n * s)) for a, n, f, s in (
            (sizes, rank, "Q", 8), (strides, rank - 1, "Q", 8), (box, rank, "I", 4), (steps, rank, "I", 4),
        )]  # fmt: skip
        self.encoded.append((where % 64, address, kind, *arrays, interleave, swizzle, promotion, padding))
        ctypes.memmove(where, struct.pack("16Q", address, *range(1, 16)), 128)
        return self.answers.get("encode", 0)

    def _replace(self, where, address):
        ctypes.memmove(where, struct.pack("Q", address), 8)
        return self.answers.get("replace", 0)

    def _launch(self, config, function, parameters, extra):
        self.launched.append([ctypes.string_at(at, n) for at, n in zip(self._where(parameters), WIDTHS, strict=True)])
        return 0

    def _where(self, parameters):
        return struct.unpack(f"{len(WIDTHS)}Q", ctypes.string_at(parameters, 8 * len(WIDTHS)))


MAP = [128, 4, 4, 8, 8]
WIDTHS = [4, *MAP, 4, *MAP, 8, 8]  # length, x, scale, o, scratch


@pytest.fixture
def lib(monkeypatch):
    found = LibCuda()
    monkeypatch.setattr(libcuda, "function", found.functions.__getitem__)
    monkeypatch.setattr(tensor_map, "_replace_address", lambda: found.functions["cuTensorMapReplaceAddress"])
    return found


@pytest.fixture(autouse=True, scope="module")
def asked():
    """What Triton asks a driver to encode that knows the target and no more."""
    asked = []
    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 7,
        utils=SimpleNamespace(fill_tma_descriptor=lambda *args: asked.append(args)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", device)
        yield asked


def matrix(dtype=torch.bfloat16):
    return torch.empty(51, 136, dtype=dtype)[:50, :100]


def described(x):
    layout = gl.NVMMASharedLayout.get_default_for(BLOCK, gl.float16 if x.dtype == torch.float16 else gl.bfloat16)
    return TensorDescriptor(x, list(SHAPE), list(STRIDES), BLOCK, layout)


@pytest.fixture(scope="module")
def compiled(asked):
    return _copy_kernel.warmup(3, described(matrix()), 0.5, described(matrix()), grid=(1,), num_warps=4)


def loaded(compiled, x, o):
    tiled = {name: Tiled(each.data_ptr(), SHAPE, STRIDES) for name, each in (("x", x), ("o", o))}
    function = SimpleNamespace(src=compiled.src, metadata=compiled.metadata, function=1)
    return cuda.Loaded(function, 1, {"x": 1, "o": 0}, {"length": 3, "scale": 0.5}, tiled)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_is_encoded_is_what_triton_asks_for(dtype, lib, asked, compiled):
    """``fillTMADescriptor``: dimensions from the innermost on, strides in bytes, no interleave, promotion to 128 B."""
    x, (form, _) = matrix(dtype), compiled.metadata.tensordesc_meta
    form = {**form, "elem_type": 6 if dtype == torch.float16 else 10}
    make_tensordesc_arg(described(x), form)
    address, swizzle, size, kind, box, shape, strides, padding = asked.pop()
    assert TensorMap(Tiled(x.data_ptr(), SHAPE, STRIDES), form).usable
    expected = (tuple(shape[::-1]), (size * strides[0],), tuple(box[::-1]), (1, 1))
    assert lib.encoded == [(0, address, kind, *expected, 0, swizzle, 2, padding)]
    assert (kind, box, expected[1]) == (6 if dtype == torch.float16 else 9, [16, 64], (272,))


def test_parameters_are_those_of_the_compiled_kernel(compiled):
    declared = re.findall(r"\.param .*?\.\w(\d+) .*_copy_kernel_param_\d+(?:\[(\d+)\])?,?$", compiled.asm["ptx"], re.M)
    assert [int(bytes_ or 1) * int(bits) // 8 for bits, bytes_ in declared] == WIDTHS


def test_each_launch_moves_the_maps(lib, compiled):
    (x, o), pairs = (matrix(), matrix()), [(matrix(), matrix()) for _ in range(2)]
    ready = cuda.driver_launch([loaded(compiled, x, o)], 2, lambda device: 7)
    kept = [ready(0, [b.data_ptr(), a.data_ptr()]) for a, b in (*pairs, (x, o))]
    assert kept == [True] * 3
    assert len(lib.encoded) == 2, "once for each"
    form = [struct.pack("i", 50), struct.pack("i", 100), struct.pack("q", 136), struct.pack("q", 1)]
    for (a, b), found in zip((*pairs, (x, o)), lib.launched, strict=True):
        maps = [struct.pack("16Q", each.data_ptr(), *range(1, 16)) for each in (a, b)]
        numbers = struct.pack("i", 3), struct.pack("f", 0.5)
        assert found == [numbers[0], maps[0], *form, numbers[1], maps[1], *form, bytes(8), bytes(8)]


def test_what_the_driver_does_not_encode_is_left_to_triton(lib, compiled):
    lib.answers["encode"] = 1
    assert cuda.driver_launch([loaded(compiled, matrix(), matrix())], 2, lambda device: 7) is None


def test_an_address_that_the_driver_refuses(lib, compiled):
    ready = cuda.driver_launch([loaded(compiled, matrix(), matrix())], 2, lambda device: 7)
    lib.answers["replace"] = 1
    assert ready(0, [16, 16]) is False
    assert lib.launched == []


def test_descriptors_that_nobody_described_are_left_to_triton(lib, compiled):
    kernel = loaded(compiled, matrix(), matrix())
    assert cuda.driver_launch([kernel._replace(tiled={})], 2, lambda device: 7) is None
    assert cuda.driver_launch([kernel._replace(tiled={"x": kernel.tiled["x"]})], 2, lambda device: 7) is None


def test_a_kernel_compiled_for_no_map_is_left_to_triton(lib, compiled):
    """As for chips without TMA: it takes addresses, shapes and strides instead."""
    kernel = loaded(compiled, matrix(), matrix())
    for forms in (None, compiled.metadata.tensordesc_meta[:1]):
        metadata = compiled.metadata._replace(tensordesc_meta=forms)
        plain = SimpleNamespace(src=compiled.src, metadata=metadata, function=1)
        assert cuda.driver_launch([kernel._replace(compiled=plain)], 2, lambda device: 7) is None


class OneTensor(NamedTuple):
    x: torch.Tensor


def test_a_launch_describes_its_tensors(lib, compiled, monkeypatch):
    """The first goes through Triton, with descriptors; the next through the driver, with its own addresses."""
    given, x, other, o = [], matrix(), matrix(), matrix()
    remembered = SimpleNamespace(src=compiled.src, metadata=compiled.metadata, function=1)
    monkeypatch.setattr(type(_copy_kernel), "run", lambda self, **kwargs: given.append(kwargs) or remembered)
    options = {"described": {"x": described, "o": described}, "length": 3, "scale": 0.5}
    launch = Launch(_copy_kernel, 1, OneTensor(x), ("x",), ("o",), **options)
    launch(OneTensor(x), o)
    launch(OneTensor(other), o)
    assert len(given) == 1
    assert given[0]["x"].base is x
    assert given[0]["o"].base is o
    assert [struct.unpack_from("Q", lib.launched[0][i])[0] for i in (1, 7)] == [other.data_ptr(), o.data_ptr()]


def test_a_launch_keeps_no_tensor_that_it_described(lib, compiled, monkeypatch):
    remembered = SimpleNamespace(src=compiled.src, metadata=compiled.metadata, function=1)
    monkeypatch.setattr(type(_copy_kernel), "run", lambda self, **kwargs: remembered)
    x, o = matrix(), matrix()
    options = {"described": {"x": described, "o": described}, "length": 3, "scale": 0.5}
    launch = Launch(_copy_kernel, 1, OneTensor(x), ("x",), ("o",), **options)
    launch(OneTensor(x), o)
    references = [weakref.ref(x), weakref.ref(o)]
    del x, o
    gc.collect()
    assert launch._remembered
    assert [reference() for reference in references] == [None, None]
