"""The rest of the graph in Inductor, replayed from CUDA graphs: same numbers, and every call still counted."""

from __future__ import annotations

import pytest
import torch

import attnpatch
from attnpatch.backend import COMPILED
from attnpatch.testing.tolerance import assert_same_function, run_float64
from tests.gpu.calls import prefill_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CALLS = 6


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) * 0.125
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return (probabilities @ v).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) * 2.0


def test_replayed_calls_are_counted() -> None:
    q, k, v = (torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    compiled = torch.compile(causal_attention, backend="attnpatch", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(q, k, v).clone()
    assert_same_function(y, causal_attention(q, k, v), run_float64(causal_attention, q, k, v))
    site = attnpatch.Report([COMPILED.graphs[-1]], COMPILED.gaps).sites[0]
    assert {(d.phase, d.backend) for d in site.dispatches} == {("prefill", prefill_backend())}
    assert sum(d.calls for d in site.dispatches) == CALLS
    assert any(d.captured for d in site.dispatches)
