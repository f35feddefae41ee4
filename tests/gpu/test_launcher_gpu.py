"""Launches by the CUDA driver give the bits of Triton's own launches (run with TRITON_INTERPRET=0)."""

import math
import threading

import pytest
import torch

from attnpatch.kernels.common import support
from attnpatch.kernels.decode.launch import decode
from tests.gpu.calls import ON_GPU, call_on_gpu

pytestmark = ON_GPU

TERMS = {
    "plain": {},
    "causal": {"window_right": 0, "q_offset": torch.tensor([299, 120])},
    "numbers": {"window_right": 0, "window_left": 1, "q_offset": 280, "softcap": 30.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 8)},
}


def call_of(name, seed=0):
    lse = torch.full((2, 8, 1), math.nan, device="cuda")
    return call_on_gpu(seqlen_q=1, seqlen_k=300, head_dim=64, seed=seed, **TERMS[name])._replace(lse=lse)


def run(call, num_splits):
    return decode(call, num_splits), call.lse


def assert_same(found, expected):
    torch.cuda.synchronize()
    for ours, tritons in zip(found, expected, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, tritons)


@pytest.fixture(params=[1, 4])
def num_splits(request):
    return request.param


@pytest.mark.parametrize("name", TERMS)
def test_the_bits_of_triton(name, num_splits, answers):
    expected = []
    for seed in (0, 1):
        support._plans.clear()
        expected.append(run(call_of(name, seed), num_splits))
    assert not answers
    found = [run(call_of(name, seed), num_splits) for seed in (0, 1)]
    assert answers == [True, True]
    for pair in zip(found, expected, strict=True):
        assert_same(*pair)
    assert not torch.equal(found[0][0], found[1][0])


def test_a_thread_that_is_new_to_cuda(num_splits, answers):
    """It has no context yet; what the driver then refuses goes through Triton."""
    expected, found, call = run(call_of("causal"), num_splits), [], call_of("causal")
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: found.extend(run(call, num_splits)))
    thread.start()
    thread.join()
    assert len(answers) == 1
    assert_same(found, expected)


def test_another_stream_and_a_graph(num_splits, answers):
    expected, call = run(call_of("causal"), num_splits), call_of("causal")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(call, num_splits)
    assert answers == [True]
    call.lse.fill_(math.nan)
    found[0].fill_(math.nan)
    graph.replay()
    assert_same(found, expected)
