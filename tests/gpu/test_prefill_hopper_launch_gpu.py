"""Launches of triton.prefill_hopper by the driver, in graphs, on streams and devices (run with TRITON_INTERPRET=0)."""

import gc
import math
import threading
from functools import partial

import pytest
import torch

from attnpatch.kernels.common import support
from attnpatch.kernels.prefill_hopper import tables
from attnpatch.kernels.prefill_hopper.launch import prefill_hopper
from attnpatch.testing.inputs import key_bounds
from attnpatch.testing.samples import check_samples
from tests.gpu.calls import CUDA, ON_GPU, bool_mask, call_on_gpu

pytestmark = [*ON_GPU, pytest.mark.usefixtures("hopper")]

TERMS = {
    "causal": {"window_right": 0},
    "offsets on the device": {"seqlen_k": 400, "window_right": 0, "q_offset": torch.tensor([100, 30])},
    "window, softcap": {"window_left": 99, "window_right": 0, "softcap": 20.0},
    "terms": {"window_right": 0, "sinks": torch.linspace(-1, 1, 8), "alibi_slopes": torch.linspace(0.1, 1, 8)},
    "padding": {"window_right": 0, "key_padding": bool_mask(2, 300)},
    "mask": {"attn_mask": (bool_mask(300, 300) | (torch.arange(300)[:, None] < 128)).expand(1, 1, 300, 300)},
    "mask and bounds": {"attn_mask": bool_mask(2, 8, 300, 300), "key_bounds": key_bounds(0, 300, 0)},
    "256": {"window_right": 0, "head_dim": 256},
}


@pytest.fixture(autouse=True)
def _no_tables():
    tables.table.cache_clear()


def call_of(name, seqlen=300, seed=0):
    call = call_on_gpu(**{"seqlen_q": seqlen, "head_dim": 128, "seed": seed, **TERMS[name]})
    return call._replace(lse=torch.full((2, 8, seqlen), math.nan, device=CUDA))


def launches_of(name):
    """Of a run: a mask without bounds gets them first."""
    return 2 if name in ("padding", "mask") else 1


def run(call):
    return prefill_hopper(call), call.lse


def assert_same(found, expected):
    torch.cuda.synchronize()
    for ours, tritons in zip(found, expected, strict=True):
        assert not ours.isnan().any()
        assert torch.equal(ours, tritons)


def through_triton(*calls):
    """Results of launches that are each the first of a plan."""
    results = []
    for call in calls:
        support._plans.clear()
        results.append(run(call))
    support._plans.clear()
    return results


@pytest.mark.parametrize("name", TERMS)
def test_the_bits_of_triton(name, answers):
    """On other tensors than those that the maps were laid out for."""
    expected = through_triton(call_of(name, seed=0), call_of(name, seed=1))
    assert not answers
    run(call_of(name, seed=2))
    found = [run(call_of(name, seed=seed)) for seed in (0, 1)]
    assert answers == [True] * 2 * launches_of(name)
    for pair in zip(found, expected, strict=True):
        assert_same(*pair)
    assert not torch.equal(found[0][0], found[1][0])


def test_an_address_that_another_shape_had(answers):
    """Shapes in turn in the same memory: each plan has maps of its own."""
    memory = torch.empty(2**24, device=CUDA, dtype=torch.bfloat16)
    calls = {n: call_of("causal", n, seed=n) for n in (300, 700, 130)}
    expected = dict(zip(calls, through_triton(*calls.values()), strict=True))
    for n in (300, 700, 130, 700, 300, 130):
        call, start = calls[n], 0
        placed = {}
        for name in "qkv":
            x = getattr(call, name)
            placed[name] = memory[start:].as_strided(x.shape, x.stride(), memory.storage_offset() + start).copy_(x)
            start += -(-x.numel() // 8) * 8
        assert_same(run(call._replace(**placed)), expected[n])
    assert answers == [True] * 3


def test_a_thread_that_is_new_to_cuda(answers):
    (expected,), found, call = through_triton(call_of("causal")), [], call_of("causal")
    run(call)
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: found.extend(run(call)))
    thread.start()
    thread.join()
    assert len(answers) == 1
    assert_same(found, expected)


def captured(call, **options):
    """A graph of a run, and what it writes."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        found = run(call)
    return graph, found


def check_replay(graph, found, expected):
    """Also after plans and tables are gone and their memory is another's."""
    support._plans.clear()
    tables.table.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((n,), -1, dtype=torch.int64, device=CUDA) for n in (64, 512, 4096, 2**20) for _ in range(64)]
    for _ in range(3):
        for x in found:
            x.fill_(math.nan)
        graph.replay()
        assert_same(found, expected)
    del junk


@pytest.mark.parametrize("name", TERMS)
def test_a_graph_of_a_shape_that_has_run(name, answers):
    (expected,), call = through_triton(call_of(name)), call_of(name)
    run(call)
    graph, found = captured(call)
    assert answers == [True] * launches_of(name)
    check_replay(graph, found, expected)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_the_first_call_of_a_shape_in_a_graph(mode):
    """The kernel is loaded; the plan and the table are made while the graph is captured."""
    (expected,), call = through_triton(call_of("causal", 700)), call_of("causal", 700)
    tables.table.cache_clear()
    check_replay(*captured(call, capture_error_mode=mode), expected)


def test_a_table_made_in_a_graph_serves_other_streams():
    """It is there when its launch is captured, not when the graph is replayed."""
    (expected,), call = through_triton(call_of("causal", 700)), call_of("causal", 700)
    tables.table.cache_clear()
    graph, _ = captured(call)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same(run(call_of("causal", 700)), expected)
    graph.replay()


def test_allocations_of_a_thread_that_go_to_the_pool_of_a_graph():
    """As torch's cudagraph trees warm up: a table must not lie in the pool, where replays overwrite it."""
    (expected,), call = through_triton(call_of("causal", 700)), call_of("causal", 700)
    tables.table.cache_clear()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        run(call)
        mine = {segment["address"]: segment["total_size"] for segment in pool.snapshot()}
    (table,) = [launches.table for launches in support._plans.values() if hasattr(launches, "table")]
    for x in table.read():
        assert not any(start <= x.data_ptr() < start + size for start, size in mine.items())
    assert_same(run(call), expected)


def test_nothing_waits_for_the_device():
    for name in TERMS:
        call = call_of(name)
        run(call)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(call)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_lengths_do_not_recompile():
    """One kernel serves every length; odd ones and 1 are what Triton would specialise."""
    from attnpatch.kernels.prefill.kernel import _prefill_kernel
    from attnpatch.kernels.prefill_hopper.kernel import _prefill_hopper_kernel
    from attnpatch.kernels.prefill_hopper.ranges import _ranges_kernel

    def compiled():
        kernels = (_prefill_hopper_kernel, _ranges_kernel, _prefill_kernel)
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    def run_length(n):
        prefill_hopper(call_on_gpu(seqlen_q=n, head_dim=72, window_right=0))
        prefill_hopper(call_on_gpu(seqlen_q=n, head_dim=72, window_right=0, key_padding=bool_mask(2, n)))

    for n in (17, 64, 65):
        run_length(n)
    before = compiled()
    for n in (1, 2, 16, 17, 100, 111, 128, 500):
        run_length(n)
    assert all(now <= then + 1 for now, then in zip(compiled(), before, strict=True))  # strides of a single row differ


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices(answers):
    to_second = partial(torch.Tensor.to, device="cuda:1")
    call = call_of("padding")
    (expected,) = through_triton(call)
    second = call._replace(**{n: to_second(x) for n, x in call._asdict().items() if isinstance(x, torch.Tensor)})
    for _ in range(2):
        found = [run(each) for each in (call, second)]
    torch.cuda.synchronize("cuda:1")
    assert answers == [True] * 2 * launches_of("padding")
    assert found[1][0].get_device() == 1
    assert_same(found[0], expected)
    assert_same([x.to(CUDA) for x in found[1]], expected)


def test_right_on_a_shape_of_a_model():
    call = call_on_gpu(batch=1, num_heads=32, num_kv_heads=8, seqlen_q=2048, head_dim=128, window_right=0)
    for _ in range(2):
        check_samples(prefill_hopper(call), call)
