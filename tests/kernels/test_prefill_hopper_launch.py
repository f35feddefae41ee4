"""The launcher of triton.prefill_hopper: what it hands over, and tables of tiles that outlive their readers.

Without a GPU: the kernel is a stand-in that remembers its arguments, and CUDA's streams are three functions.
"""

import threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from attnpatch import masking
from attnpatch.kernels.common import support
from attnpatch.kernels.prefill import launch as prefill_launch
from attnpatch.kernels.prefill.configs import INTERPRETED
from attnpatch.kernels.prefill_hopper import launch, tables
from attnpatch.kernels.prefill_hopper.launch import prefill_hopper
from attnpatch.kernels.reference import attention_lse_reference
from attnpatch.testing.inputs import key_bounds, random_call
from attnpatch.testing.tolerance import assert_same_function


class Kernel:
    """Remembers grid and arguments of each launch."""

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda **arguments: self.launched.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    found = Kernel()
    monkeypatch.setattr(launch, "_prefill_hopper_kernel", found)
    monkeypatch.setattr(support, "_plans", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    tables.table.cache_clear()
    return found


def call_of(seqlen=300, **case):
    return random_call(**{"seqlen_q": seqlen, "head_dim": 128, "dtype": torch.float16, "window_right": 0, **case})


def test_tensors_become_descriptors(kernel):
    call = call_of(batch=2, num_heads=4, num_kv_heads=2)
    o = prefill_hopper(call)
    ((grid, given),) = kernel.launched
    assert o.stride() == call.empty_output().stride()
    assert given["q"].base is call.q
    assert given["o"].base is o
    shapes = {name: (given[name].shape, given[name].block_shape) for name in "qkvo"}
    assert shapes["q"] == shapes["o"] == ([2, 4, 300, 128], [1, 1, 64, 128])
    assert shapes["k"] == shapes["v"] == ([2, 2, 300, 128], [1, 1, 128, 128])
    assert given["k"].strides == list(call.k.stride())
    assert grid == (2 * 4 * 3,), "a program for each tile, of which there are fewer than multiprocessors"
    assert given["num_tiles"].tolist() == [1] * 24
    assert given["tiles"].shape == (24, given["max_tiles"] + 1)


def test_a_dimension_of_one_has_any_stride(kernel):
    call = call_of(num_heads=1, num_kv_heads=1)
    prefill_hopper(call._replace(k=call.k.as_strided(call.k.shape, (5, 7, 128, 1))))
    assert kernel.launched[0][1]["k"].strides == [16, 16, 128, 1]


def in_rows_of_72(x, first):
    """``x``, from column ``first`` on."""
    return x.new_zeros(*x.shape[:3], 72)[..., first : first + x.shape[3]].copy_(x)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_lies_at_an_odd_address_is_copied_with_its_strides(kernel, name):
    """Rows of 120 bytes, which TMA reads where they are 144 apart."""
    call = call_of(head_dim=60, head_dim_v=64)
    tensors = {each: in_rows_of_72(getattr(call, each), each == name) for each in "qkv"}
    assert tensors[name].data_ptr() % 16
    prefill_hopper(call._replace(**tensors))
    given = kernel.launched[0][1]
    assert given[name].base.data_ptr() % 16 == 0
    assert given[name].base.stride() == tensors[name].stride()
    assert torch.equal(given[name].base, getattr(call, name))
    assert [given[each].base is x for each, x in tensors.items()] == [each != name for each in tensors]


def test_padding_gets_bounds_and_ranges(kernel):
    """32 keys of the second sequence are padding on the left: its tiles begin behind them."""
    real = torch.ones(2, 300, dtype=torch.bool)
    real[1, :32] = False
    prefill_hopper(call_of(batch=2, key_padding=real))
    given = kernel.launched[0][1]
    assert given["MAY_HOLD_ANYTHING"]
    assert given["ranges"].shape == (2, 1, 3, 6), "heads share them"
    assert given["ranges_strides"] == (18, 0, 6)
    assert given["ranges"][:, 0, :, 0].tolist() == [[300] * 3] * 2, "the kernel computes all tiles"
    assert given["ranges"][:, 0, :, 1].tolist() == [[0, 0, 0], [32, 32, 32]]


def test_bounds_per_head(kernel):
    first = torch.arange(4)[None, :, None].expand(1, 4, 300)
    prefill_hopper(call_of(key_bounds=key_bounds(first, 300)))
    given = kernel.launched[0][1]
    assert given["ranges_strides"] == (72, 18, 6)
    assert given["ranges"][0, :, 0, 1].tolist() == [0, 1, 2, 3]


ROW = torch.arange(300)
LATER = (ROW >= 128)[:, None]
HOLES = torch.rand(300, 300, generator=torch.Generator().manual_seed(1)) < 0.7
HOLES[:, 0] = True
CAUSAL = ROW[:, None] >= ROW
MASKED = {
    "causal": ({"attn_mask": CAUSAL}, [True, True, True]),
    "holes": ({"attn_mask": CAUSAL & HOLES}, [False, False, False]),
    "holes in later tiles": ({"attn_mask": CAUSAL & (HOLES | ~LATER)}, [True, False, False]),
    "one hole": ({"attn_mask": CAUSAL & ~((ROW == 9) & (ROW == 140)[:, None])}, [True, False, True]),
    "one row for all": ({"attn_mask": (ROW >= 9)[None]}, [True, True, True]),
    "rows that see no key": ({"attn_mask": CAUSAL & LATER}, [True, True, True]),
    "padding with holes": ({"key_padding": HOLES[:2]}, [False, False, False]),
    "padding and mask": ({"key_padding": (ROW < 290).expand(2, -1), "attn_mask": CAUSAL & (HOLES | ~LATER)}, None),
    "padding with a hole at the end, causal": ({"key_padding": (ROW != 140).expand(2, -1), "window_right": 0}, None),
}
"""Masks, and which tiles are all plain: two sequences, three tiles. None: of each sequence or head another answer."""


def masked_call(mask, **case):
    """A call whose K and V no kernel may multiply where no row sees them."""
    terms = {"batch": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "window_right": None, **case, **mask}
    return call_of(**terms, lse=True)


def check_share(kernel, call):
    """What the stand-in leaves undone, which is nothing of its own tiles and all of the others; return whose are whose.

    The stand-in writes nothing, so that what is not poison any more was computed by triton.prefill.
    """
    call.lse.fill_(torch.nan)
    with poisoned_allocations():
        o = prefill_hopper(call)
    end = kernel.launched[-1][1]["ranges"][..., 0].expand(2, 2, 3)
    own = (end != 0).repeat_interleave(128, dim=2)[:, :, :300]
    assert o[own].isnan().all()
    assert call.lse[own].isnan().all()
    expected, lse = attention_lse_reference(call)
    original, _ = attention_lse_reference(call, call.q.dtype)
    rest = ~own
    assert torch.equal(call.lse[rest] == -torch.inf, lse[rest] == -torch.inf)
    assert (o[rest & (lse == -torch.inf)] == 0).all()
    seen = rest & (lse > -torch.inf)
    if seen.any():
        assert_same_function(o[seen], original[seen], expected[seen])
        torch.testing.assert_close(call.lse[seen].double(), lse[seen], rtol=0, atol=1e-4)
    return end != 0


@contextmanager
def poisoned_allocations():
    allocate = Tensor.new_empty_strided

    def poisoned(self, *sizes, **options):
        return allocate(self, *sizes, **options).fill_(torch.nan)

    with mock.patch.object(Tensor, "new_empty_strided", poisoned):
        yield


@pytest.mark.parametrize(("mask", "whole"), MASKED.values(), ids=MASKED)
def test_tiles_with_rows_that_are_not_plain_are_left_to_triton_prefill(kernel, mask, whole):
    """In the interpreter."""
    found = check_share(kernel, masked_call(mask))
    if whole is not None:
        assert found[0, 0].tolist() == whole


REST_TERMS = {
    "sinks, slopes, softcap": {
        "sinks": torch.linspace(-1, 1, 2),
        "alibi_slopes": torch.linspace(0.1, 1, 2),
        "softcap": 5.0,
    },
    "window, offsets": {"window_left": 99, "window_right": 0, "q_offset": torch.tensor([0, -9])},
}


@pytest.mark.parametrize("terms", REST_TERMS.values(), ids=REST_TERMS)
def test_terms_of_what_is_left(kernel, terms):
    check_share(kernel, masked_call(MASKED["holes in later tiles"][0], **terms))


def test_masks_per_head(kernel):
    """Bounds of each head: the second has no holes."""
    mask = torch.stack([CAUSAL & HOLES, CAUSAL])[None]
    call = masked_call({"attn_mask": mask, "key_bounds": masking.key_bounds(mask)})
    assert check_share(kernel, call)[0, :, 0].tolist() == [False, True]


def test_few_programs_walk_all_that_is_left(kernel, monkeypatch):
    """Twelve tiles and three programs, of which each looks at two tiles together."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=3))
    monkeypatch.setattr(launch, "choose_rest", lambda *_, **__: INTERPRETED._replace(BLOCK_M=128))
    values = prefill_launch.prefill_launch
    monkeypatch.setattr(launch, "prefill_launch", partial(values, LOOK=2))
    check_share(kernel, masked_call(MASKED["holes"][0]))
    check_share(kernel, masked_call(MASKED["one hole"][0]))


def test_masks_that_are_known_by_their_bounds_alone_launch_nothing_else(kernel, monkeypatch):
    monkeypatch.setattr(launch, "prefill_launch", None)
    prefill_hopper(call_of(key_bounds=key_bounds(0, 300, 0)))
    assert (kernel.launched[0][1]["ranges"][..., 0] == 300).all(), "plain is a promise about masks, and here are none"


def test_without_bounds_there_are_no_ranges(kernel):
    prefill_hopper(call_of())
    assert kernel.launched[0][1]["ranges"] is kernel.launched[0][1]["ranges_strides"] is None


HOLDS_ANYTHING = {
    "causal": ({}, False),
    "full": ({"window_right": None}, False),
    "keys behind the last row": ({"seqlen_k": 400}, True),
    "rows at the end": ({"seqlen_k": 400, "q_offset": 100}, False),
    "an offset on the device": ({"q_offset": torch.tensor(0)}, True),
    "bounds": ({"window_right": None, "key_bounds": key_bounds(0, 300)}, True),
    "a window from the first key on": ({"seqlen_k": 400, "q_offset": 100, "window_left": 100}, False),
    "keys before the first window": ({"seqlen_k": 400, "q_offset": 100, "window_left": 99}, True),
}


@pytest.mark.parametrize(("case", "holds"), HOLDS_ANYTHING.values(), ids=HOLDS_ANYTHING)
def test_keys_that_no_row_sees(kernel, case, holds):
    prefill_hopper(call_of(**case))
    assert kernel.launched[0][1]["MAY_HOLD_ANYTHING"] is holds


def test_no_rows(kernel):
    assert prefill_hopper(call_of(0, seqlen_k=9)).shape == (1, 4, 0, 128)
    assert kernel.launched == []


def test_calls_of_a_kind_share_a_plan_and_lengths_a_table(kernel):
    for seqlen in (257, 257, 300, 384, 385):
        prefill_hopper(call_of(seqlen))
    assert len(support._plans) == 4
    found = [arguments["tiles"] for _, arguments in kernel.launched]
    assert [x is found[0] for x in found] == [True, True, True, True, False]


def test_lengths_share_a_table_whose_heads_do_not_fit_the_cache_together(kernel):
    """Of 1,793 keys 18 heads would fit, of 1,920 only 17; both are 15 blocks."""
    for seqlen_k in (1793, 1920):
        prefill_hopper(call_of(9, num_heads=64, num_kv_heads=32, seqlen_k=seqlen_k, window_right=None))
    first, second = (arguments["tiles"] for _, arguments in kernel.launched)
    assert first is second


def test_another_window_or_head_has_a_table_of_its_own(kernel):
    for case in ({}, {"window_left": 99}, {"num_heads": 8}, {"batch": 2}, {"head_dim": 256}):
        prefill_hopper(call_of(600, **case))
    assert len({id(arguments["tiles"]) for _, arguments in kernel.launched}) == 5


class OnGpu(Tensor):
    """A tensor that says it is on a GPU and remembers for which streams it was kept."""

    def get_device(self):
        return 1

    def record_stream(self, stream):
        self.kept.append(stream.cuda_stream)


@pytest.fixture
def streams(monkeypatch):
    """The current stream, and whether it captures."""
    state = SimpleNamespace(current=5, captures=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: state.current, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=state.current))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captures)
    monkeypatch.setattr(tables, "_in_graphs", set())
    return state


def table_on_gpu():
    found = [torch.zeros(2, 3).as_subclass(OnGpu), torch.zeros(2).as_subclass(OnGpu)]
    for x in found:
        x.kept = []
    return tables.Table(*found), found


def test_a_table_is_not_freed_before_the_streams_that_read_it_are_done(streams):
    table, tensors = table_on_gpu()
    for streams.current in (5, 5, 6, 5, 6, 0):
        table.read()
    assert [x.kept for x in tensors] == [[5, 6, 0]] * 2
    assert not tables._in_graphs


def test_a_table_that_a_graph_reads_is_never_freed(streams):
    """Even where the stream that captures has read it before."""
    table, tensors = table_on_gpu()
    table.read()
    streams.captures = True
    table.read()
    assert tables._in_graphs == {table}
    assert [x.kept for x in tensors] == [[5], [5]]


def test_tables_are_made_where_no_graph_sees_it(monkeypatch):
    """In another thread, which may copy while others capture, on another stream."""
    threads, done = set(), []

    def copied(arrays, device):
        threads.add(threading.get_ident())
        return done

    monkeypatch.setattr(tables, "_copies", copied)
    assert tables._on_device([np.zeros(2)], torch.device("cuda", 0)) is done
    assert threads
    assert threading.get_ident() not in threads


def test_an_error_in_that_thread_is_raised(monkeypatch):
    def fail(arrays, device):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tables, "_copies", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        tables._on_device([np.zeros(2)], torch.device("cuda", 0))
