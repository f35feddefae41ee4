"""triton.prefill_hopper on a CPU: its functions as plain Python, a thread for each group of warps, torch for tiles.

What Gluon's language means is written out below as far as the kernel uses it: layouts mean nothing, loads and products
are done at once, barriers block. One at which nobody arrives is an error after a while, and not a hang.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnpatch.kernels.prefill_hopper import eight_bits, kernel, masks, places, softmax

PATIENCE_S = 20


class Tile(torch.Tensor):
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)


def tile(x, dtype=None):
    return torch.as_tensor(x, dtype=dtype).as_subclass(Tile)


class Pointer:
    """Elements of a tensor's memory."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, x):
        size = x.untyped_storage().nbytes() // x.itemsize
        return cls(x.as_strided((size,), (1,), 0), x.storage_offset())

    def __add__(self, steps):
        return Pointer(self.memory, self.offset + steps)

    __radd__ = __add__

    def load(self, mask=None, other=None):
        places = tile(self.offset, torch.int64)
        if mask is None:
            return tile(self.memory[places].clone())
        mask = torch.as_tensor(mask).expand(places.shape)
        return tile(torch.where(mask, self.memory[torch.where(mask, places, 0)], other))

    def store(self, value, mask):
        places, mask = torch.broadcast_tensors(tile(self.offset, torch.int64), mask)
        self.memory[places[mask]] = value.expand(places.shape)[mask].to(self.memory.dtype)


class Shared:
    """Shared memory."""

    def __init__(self, memory):
        self.memory, self.dtype, self.shape = memory, memory.dtype, tuple(memory.shape)

    def index(self, i):
        return Shared(self.memory[i])

    def reshape(self, shape):
        return Shared(self.memory.view(shape))

    def permute(self, order):
        return Shared(self.memory.permute(order))

    def slice(self, start, size, dim):
        return Shared(self.memory.narrow(dim, start, size))

    def load(self, layout):
        return tile(self.memory.clone())

    def store(self, value):
        self.memory.copy_(value)


class Descriptor:
    """A tensor that TMA reads and writes by boxes."""

    layout = None

    def __init__(self, x):
        self.x, self.dtype = x, x.dtype

    def box(self, at, buffer):
        """What lies inside of the tensor, of its memory and of the box's."""
        starts = [int(n) for n in at]
        sizes = zip(starts, buffer.shape, self.x.shape, strict=True)
        inside = [slice(n, max(n, min(n + m, size))) for n, m, size in sizes]
        assert min(starts) >= 0
        return self.x[tuple(inside)], buffer.memory[tuple(slice(0, part.stop - part.start) for part in inside)]


class Barrier:
    """One in shared memory: a phase ends when all have arrived and all bytes are there."""

    def __init__(self):
        self.bytes = self.phases = 0
        self.changed = threading.Condition()

    def init(self, count):
        self.count = self.missing = count

    def change(self, arrivals=0, more_bytes=0):
        with self.changed:
            self.missing -= arrivals
            self.bytes += more_bytes
            assert self.missing >= 0
            if self.missing == self.bytes == 0:
                self.missing, self.phases = self.count, self.phases + 1
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            if not self.changed.wait_for(lambda: self.phases & 1 != parity, PATIENCE_S):
                raise TimeoutError("nobody arrives")


class Barriers(list):
    def index(self, i):
        return self[int(i)]


def load_tile(descriptor, at, barrier, buffer):
    buffer.memory.zero_()
    source, target = descriptor.box(at, buffer)
    target.copy_(source)
    barrier.change(more_bytes=-buffer.memory.nbytes)


def store_tile(descriptor, at, buffer):
    target, source = descriptor.box(at, buffer)
    target.copy_(source)


def product(a, b, acc, use_acc=True, is_async=False):
    a, b = (x.memory if isinstance(x, Shared) else x for x in (a, b))
    return tile(a.float() @ b.float() + (acc if use_acc else 0.0))


def allocate(dtype, shape, layout):
    """Barriers are the ones in 64 bit integers; everything else holds NaN."""
    if dtype != torch.int64:
        return Shared(torch.full(shape, torch.nan).to(dtype))
    return Barrier() if len(shape) == 1 else Barriers(Barrier() for _ in range(shape[0]))


def warp_specialize(parts, num_warps, registers):
    """Run a function with its arguments in a thread each; the first error of any."""
    with ThreadPoolExecutor(len(parts)) as threads:
        for part in [threads.submit(function, *args) for function, args in parts]:
            part.result()


def assembly(asm, constraints, args, dtype, is_pure, pack):
    """What the kernel's few lines of assembly compute; four 8 bit floats lie in an int32, the first of four such."""
    if "e4m3x2" in asm:
        return torch.stack([x.to(torch.float8_e4m3fn) for x in args], -1).view(dtype)[..., 0]
    if dtype == torch.float8_e4m3fn:
        return args[0][:, ::pack].contiguous().view(dtype)
    return 1 / args[0] if "rcp" in asm else args[0]


def _binary(function):
    return lambda a, b: function(tile(a), tile(b))


_AS_IN_TORCH = ("int32", "int64", "float32", "abs", "exp2", "log2", "zeros_like", "permute")

LANGUAGE = SimpleNamespace(
    **{name: getattr(torch, name) for name in _AS_IN_TORCH},
    constexpr=lambda x: x,
    static_range=range,
    arange=lambda start, stop, layout=None: tile(torch.arange(start, stop, dtype=torch.int32)),
    zeros=lambda shape, dtype, layout: tile(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, value, dtype, layout: tile(torch.full(shape, value, dtype=dtype)),
    where=lambda condition, a, b: tile(torch.where(tile(condition), tile(a), tile(b))),
    load=lambda pointer, **options: pointer.load(**options),
    store=lambda pointer, value, mask: pointer.store(value, mask),
    convert_layout=lambda x, layout: x,
    reshape=lambda x, shape: x.reshape(shape),
    join=lambda a, b: torch.stack((a, b), -1),
    max=lambda x, axis: x.amax(axis),
    sum=lambda x, axis: x.sum(axis),
    maximum=_binary(torch.maximum),
    minimum=_binary(torch.minimum),
    allocate_shared_memory=allocate,
    warp_specialize=warp_specialize,
    program_id=None,
    float8e4nv=torch.float8_e4m3fn,
    split=lambda x: x.unbind(-1),
    inline_asm_elementwise=assembly,
    **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout"), lambda *_: None),
)

MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=lambda barrier, count: barrier.init(count),
    wait=lambda barrier, phase: barrier.wait(int(phase)),
    expect=lambda barrier, size: barrier.change(1, size),
    arrive=lambda barrier, count: barrier.change(count),
)

NAMES = {
    "gl": LANGUAGE,
    "mbarrier": MBARRIER,
    "warpgroup_mma": product,
    "warpgroup_mma_wait": lambda pending, deps: deps[0],
    "fence_async_shared": lambda: None,
    "load_tile": load_tile,
    "store_tile": store_tile,
    "store_wait": lambda pending: None,
}


def _plain(module):
    """Names of a module with device code as Python, and what they stand for."""
    functions = {name: x.fn for name, x in vars(module).items() if hasattr(x, "fn")}
    constants = {name: x.value for name, x in vars(module).items() if type(x).__name__ == "constexpr"}
    return {**functions, **constants, **{name: x for name, x in NAMES.items() if name in vars(module)}}


def run(grid, given):
    """Run the kernel on what its launcher gives it."""
    given = {name: _argument(x) for name, x in given.items() if name != "num_warps"}
    with ExitStack() as patches:
        for module in (eight_bits, kernel, masks, places, softmax):
            patches.enter_context(mock.patch.dict(vars(module), _plain(module)))
        for program in range(grid[0]):
            with mock.patch.object(LANGUAGE, "program_id", lambda axis, program=program: program):
                kernel._prefill_hopper_kernel(**given)


def _argument(x):
    if isinstance(x, TensorDescriptor):
        return Descriptor(x.base)
    return Pointer.to(x) if isinstance(x, torch.Tensor) else x
