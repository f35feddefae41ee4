"""Packed sequences on triton.prefill_hopper without a GPU: the table that is made on the device, in the interpreter
against one made with numpy, what the launcher hands over, and which calls get there.

The kernel itself needs the chip: tests/gpu/test_prefill_hopper_packed_gpu.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch import dispatch
from attnpatch.kernels.common import support
from attnpatch.kernels.prefill_hopper import backend, launch
from attnpatch.kernels.prefill_hopper import packed as packed_launch
from attnpatch.kernels.prefill_hopper.launch import BLOCK_M, prefill_hopper
from attnpatch.kernels.prefill_hopper.masks import key_blocks, seen_keys
from attnpatch.kernels.prefill_hopper.packed import dealing_launch, dealt
from attnpatch.testing.inputs import packed, paged, random_call

BLOCK_N = 128


def mixed(mix, spare=0, **case):
    """Sequences of (rows, keys), the last row on the last key unless the case has an offset of its own."""
    defaults = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float16, "window_right": 0}
    parts = [{"seqlen_q": q, "seqlen_k": k, "q_offset": k - q} for q, k in mix]
    return packed([random_call(**{**defaults, **part, **case}, seed=i) for i, part in enumerate(parts)], spare)


@pytest.fixture
def chip(monkeypatch):
    """``chip(n)``: a GPU of n multiprocessors."""

    def of(multiprocessors):
        properties = SimpleNamespace(multi_processor_count=multiprocessors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return of


def deal(call, section):
    """Tiles of each program as the kernels deal them out."""
    size = dealt(call, BLOCK_M)
    made = [x.fill_(-7) for x in size.new(call.q)]
    dealing_launch(call, size, section, BLOCK_M, BLOCK_N)(call, *made)
    tiles, num_tiles = (x.tolist() for x in made[1:])
    assert all(n < len(row) for n, row in zip(num_tiles, tiles, strict=True)), "a program reads on by one"
    rows = [row[:n] for row, n in zip(tiles, num_tiles, strict=True)]
    return [[(tile >> 48, tile >> 32 & 0xFFFF, tile & 0xFFFFFFFF) for tile in row] for row in rows]


def costs_of(call):
    """Key blocks of each query block by (sequence, block); the rows behind the last are a sequence without keys."""
    rows = [*call.cu_seqlens_q.diff().tolist(), call.seqlen_q - int(call.cu_seqlens_q[-1])]
    packed_k = call.cu_seqlens_k is not None
    keys = [*(call.cu_seqlens_k.diff().tolist() if packed_k else [call.seqlen_k] * call.batch), 0]
    offsets = [*torch.as_tensor(call.q_offset).expand(call.batch).tolist(), 0]
    found = {}
    for b, (num_rows, num_keys, offset) in enumerate(zip(rows, keys, offsets, strict=True)):
        band = (offset, num_rows, num_keys, call.window_left, call.window_right)
        for m in range(0, num_rows, BLOCK_M):
            found[b, m // BLOCK_M] = key_blocks.fn(*seen_keys.fn(m, *band, BLOCK_M), BLOCK_N)[1]
    return found


def dealt_by_hand(call, section, programs):
    """Longest first, the next section back, to and fro over the programs."""
    costs = costs_of(call)
    blocks = sorted(costs, key=lambda block: (costs[block], block), reverse=True)
    firsts, line = range(0, call.num_heads, section), []
    for first in firsts:
        back = (len(firsts) - 1 - first // section) % 2
        heads = range(first, min(first + section, call.num_heads))
        line += [(b, h, m) for b, m in (blocks[::-1] if back else blocks) for h in heads]
    found = [[] for _ in range(programs)]
    for start in range(0, len(line), programs):
        turn = line[start : start + programs]
        order = range(programs) if start // programs % 2 == 0 else reversed(range(programs))
        for program, tile in zip(order, turn, strict=False):
            found[program].append(tile)
    return found


WINDOW = st.none() | st.integers(0, 300)
LENGTHS = st.tuples(st.sampled_from([0, 1, 127, 128, 129, 300]), st.sampled_from([0, 1, 128, 200, 513]))


@given(
    mix=st.lists(LENGTHS, min_size=1, max_size=5),
    spare=st.sampled_from([0, 1, 200]),
    heads=st.integers(1, 5),
    section=st.integers(1, 5),
    multiprocessors=st.integers(1, 9),
    window=st.tuples(WINDOW, WINDOW),
    offset=st.none() | st.integers(-50, 50),
)
@settings(max_examples=25, deadline=None)
def test_the_table_is_that_of_numpy(mix, spare, heads, section, multiprocessors, window, offset):
    call = mixed(mix, spare, num_heads=heads, window_left=window[0], window_right=window[1])
    if offset is not None:
        call = call._replace(q_offset=offset)
    if call.seqlen_q == 0:
        return
    with pytest.MonkeyPatch.context() as patch:
        properties = SimpleNamespace(multi_processor_count=multiprocessors)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        section = min(section, heads)
        assert deal(call, section) == dealt_by_hand(call, section, dealt(call, BLOCK_M).programs)


def test_keys_that_are_not_packed(chip):
    chip(3)
    call = mixed([(300, 500), (1, 500), (0, 500)], q_offset=100)
    k, v = (x.unflatten(2, (3, 500))[0].transpose(0, 1) for x in (call.k, call.v))
    call = call._replace(k=k, v=v, cu_seqlens_k=None)
    assert deal(call, 3) == dealt_by_hand(call, 3, 3)


@pytest.mark.parametrize("offset", [torch.tensor(7), torch.tensor([7]), torch.tensor([7, -3])], ids=str)
def test_offsets(chip, offset):
    chip(2)
    call = mixed([(130, 500), (200, 300)])._replace(q_offset=offset)
    assert deal(call, 2) == dealt_by_hand(call, 2, 2)


def test_more_sequences_and_blocks_than_a_program_looks_at_together(chip, monkeypatch):
    chip(5)
    monkeypatch.setattr(packed_launch, "SEQUENCES_AT_ONCE", 8)
    monkeypatch.setattr(packed_launch, "BLOCKS_AT_ONCE", 16)
    call = mixed([(1 + i % 3 * 64, 9) for i in range(40)], num_heads=1)
    assert deal(call, 1) == dealt_by_hand(call, 1, 5)


def test_lengths_that_do_not_add_up_write_nothing_outside(chip):
    """Lengths are not looked at on the host; more rows than there are leave their tiles out."""
    chip(2)
    call = mixed([(128, 128)] * 2, num_heads=1)
    call.cu_seqlens_q.copy_(torch.tensor([0, 5000, 9000]))
    size = dealt(call, BLOCK_M)
    made = [torch.cat([x.flatten(), x.flatten()]).fill_(-7) for x in size.new(call.q)]
    dealing_launch(call, size, 1, BLOCK_M, BLOCK_N)(call, *made)
    assert all((x[len(x) // 2 :] == -7).all() for x in made)


def test_programs_have_as_much_to_do(chip):
    """The batch of the benchmark, of 64 sequences."""
    chip(132)
    steps = torch.rand(64, generator=torch.Generator().manual_seed(0)).tolist()
    lengths = [round(16 * 256**step) for step in steps]
    call = mixed([(1, 1)], num_heads=32, num_kv_heads=8)
    call = call._replace(
        q=torch.empty(1, 32, sum(lengths), 0),
        cu_seqlens_q=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        q_offset=0,
    )
    costs = costs_of(call)
    loads = [sum(1.5 + costs[b, m] for b, _, m in tiles) for tiles in deal(call, 4)]
    assert max(loads) * 132 / sum(loads) < 1.02


class Kernel:
    """Remembers grid and arguments of each launch."""

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda **arguments: self.launched.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch, chip):
    found = Kernel()
    monkeypatch.setattr(launch, "_prefill_hopper_kernel", found)
    monkeypatch.setattr(support, "_plans", {})
    chip(132)
    return found


def test_what_the_kernel_is_given(kernel):
    call = mixed([(300, 300), (0, 7), (129, 200)], spare=5, num_heads=4, num_kv_heads=2, head_dim=128)
    o = prefill_hopper(call)
    ((grid, given),) = kernel.launched
    assert o.stride() == call.empty_output().stride()
    assert given["o"].base is given["o_rows"] is o
    shapes = {name: (given[name].shape, given[name].block_shape) for name in "qkvo"}
    assert shapes["q"] == shapes["o"] == ([1, 4, 434, 128], [1, 1, 64, 128])
    assert shapes["k"] == shapes["v"] == ([1, 2, 512, 128], [1, 1, 128, 128])
    assert given["cu_seqlens_q"] is call.cu_seqlens_q
    assert given["cu_seqlens_k"] is call.cu_seqlens_k
    assert (given["batch"], given["HEAD_DIM_V"], given["MAY_HOLD_ANYTHING"]) == (3, 128, True)
    most = (434 + 4 * 127) // 128
    assert grid == (most * 4,)
    assert given["tiles"].shape == (most * 4, given["max_tiles"] + 1)
    assert sum(given["num_tiles"]) == 4 * (3 + 2 + 1), "the rows of no sequence are a tile, too"


def test_dense_calls_are_given_nothing_of_it(kernel):
    prefill_hopper(random_call(seqlen_q=300, head_dim=128, dtype=torch.float16))
    given = kernel.launched[0][1]
    assert [given[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "o_rows", "batch", "HEAD_DIM_V")] == [None] * 5


def test_lengths_do_not_make_a_plan(kernel):
    """They are on the device: as many rows in other shares are the same kind of call."""
    call = mixed([(300, 300), (100, 100)], head_dim=128)
    prefill_hopper(call)
    call.cu_seqlens_q[1] = 7
    prefill_hopper(call._replace(q=call.q.clone()))
    assert len(support._plans) == 1


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(support, "capability", lambda device: (9, 0))


PACKED = mixed([(80, 80), (60, 60)])
REFUSED = {
    "no sequence": (PACKED._replace(cu_seqlens_q=torch.zeros(1, dtype=torch.int32)), "no sequence is packed"),
    "pages": (paged(PACKED, 16), "K and V lie in pages of 16, and triton.prefill_hopper follows no block_table"),
    "float32": (mixed([(9, 9)], dtype=torch.float32), "float32 is multiplied exactly by triton.prefill alone"),
    "no keys": (mixed([(9, 0)]), "k (1, 1, 0, 16) is empty"),
}


@pytest.mark.parametrize(("call", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(hopper, call, reason):
    assert backend._refuses(call) == reason


def test_it_takes_packed_sequences(hopper):
    assert backend._refuses(PACKED) is None


@pytest.fixture
def on_gpu(monkeypatch):
    """The Triton backends, as on a GPU."""
    load = dispatch.load_backend
    names = [name for name in dispatch.BACKEND_MODULES if name.startswith("triton")]
    found = {name: load(name)._replace(devices=("cpu",)) for name in names}
    monkeypatch.setattr(dispatch, "load_backend", lambda name: found.get(name) or load(name)._replace(devices=()))


CHOICES = {
    "prefills": (PACKED, "triton.prefill_hopper"),
    "65 rows on average": (mixed([(1, 9), (129, 129)]), "triton.prefill_hopper"),
    "64 rows on average": (mixed([(1, 9), (127, 127)]), "triton.append"),
    "steps": (mixed([(1, 300), (1, 99)]), "triton.append"),
    "in pages": (paged(PACKED, 16), "triton.paged"),
    "one result whatever the neighbours": (PACKED._replace(batch_invariant=True), "triton.append"),
}


@pytest.mark.parametrize(("call", "name"), CHOICES.values(), ids=CHOICES)
def test_dispatch(hopper, on_gpu, call, name):
    assert dispatch.choose(call)[1].backend == name


def test_dispatch_on_other_chips(on_gpu):
    _, chosen = dispatch.choose(PACKED)
    assert chosen.backend == "triton.append"
    assert "triton.prefill_hopper: compute capability 8.0 is not 9.0" in chosen.reason


def test_a_named_backend_is_asked_alone(hopper, on_gpu):
    assert dispatch.choose(PACKED, ["triton.append", "triton.prefill_hopper"])[1].backend == "triton.append"
