"""Calls on a CUDA device, forced splits, repeated runs and replayed graphs, for the tests of flash-decode."""

import math
import os

import pytest
import torch

from attnpatch.dispatch import load_backend
from attnpatch.kernels.common.support import capability
from attnpatch.kernels.decode.launch import decode
from attnpatch.testing.inputs import check_backend, random_call
from attnpatch.testing.samples import check_samples

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets; set TRITON_INTERPRET=0"),
]

CUDA = torch.device("cuda")


def prefill_backend():
    """The one that prefills in 16 bits get on this device, where K and V are plain tensors and there is no mask."""
    return "triton.prefill_hopper" if capability(torch.device("cuda", 0)) == (9, 0) else "triton.prefill"


def call_on_gpu(**case):
    """Two sequences of eight heads that share two, in bfloat16, unless the case says otherwise."""
    case = {key: value.to(CUDA) if isinstance(value, torch.Tensor) else value for key, value in case.items()}
    defaults = {"batch": 2, "num_heads": 8, "num_kv_heads": 2, "dtype": torch.bfloat16, "device": "cuda"}
    return random_call(**{**defaults, **case})


def bool_mask(*shape, keep=0.7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < keep


def bias(*shape, hide=0.2):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return values.masked_fill(~bool_mask(*shape, keep=1 - hide), torch.finfo(torch.float32).min)


def check(call, num_splits=0):
    """Check ``call`` on the flash-decode backend that takes it, its keys split in ``num_splits``."""
    one_query = call.seqlen_q == 1 and call.cu_seqlens_q is None
    name = "triton.paged" if call.block_table is not None else "triton.decode" if one_query else "triton.append"
    return check_backend(load_backend(name)._replace(run=lambda call: decode(call, num_splits)), call)


def bits(call):
    """Output and lse of a run of its own."""
    lse = torch.full(call.q.shape[:3], -math.inf, device=CUDA)
    return torch.cat([decode(call._replace(lse=lse)), lse[..., None]], dim=3)


def check_repeats(call):
    first = bits(call)
    assert all(torch.equal(bits(call), first) for _ in range(20))


def check_replays(call, name, values):
    """A captured graph serves whatever ``call``'s tensor ``name`` comes to hold: the bits of a fresh run, and right."""
    decode(call)  # compiles outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(call)
    for value in values:
        getattr(call, name).copy_(torch.as_tensor(value))
        captured.fill_(math.nan)
        graph.replay()
        assert torch.equal(captured, decode(call)), value
        check_samples(captured, call)


def check_no_wait(call):
    """Nothing of a run waits for the device."""
    decode(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
