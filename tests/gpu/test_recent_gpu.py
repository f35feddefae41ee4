"""Tokens as they were beside TBQ4 codes on a CUDA device: rings, the merge, and attention on both against float64."""

import os

import pytest
import torch

from attnpatch import merging, ops, tbq4
from attnpatch.graph import value
from attnpatch.kernels.cache_write import reference
from attnpatch.recent import FIRST, rows_for, with_recent
from attnpatch.testing.recording import check_rewrite
from tests.kernels.test_merge import arguments, check
from tests.rewrites.test_recent import decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets; set TRITON_INTERPRET=0"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 32, 1, 128), (8, 14, 3, 64), (2, 5, 64, 80)], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_merge(dtype, shape, sinks):
    check(merging.merge, [None if x is None else x.cuda() for x in arguments(shape, dtype, sinks=sinks, strided=True)])


@pytest.mark.parametrize("new", [1, 64, 300])
def test_rings(new):
    rings = [torch.zeros(2, 3, rows_for(64), 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    expected = [x.cpu() for x in rings]
    for position in (0, 2, 60, 200, 1000):
        k, v = (torch.randn(2, 3, new, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        ops.cache_write(*rings, k, v, torch.tensor(position, device="cuda"), ring_from=FIRST)
        reference.cache_write(*expected, k.cpu(), v.cpu(), torch.tensor(position), ring_from=FIRST)
    for ring, other in zip(rings, expected, strict=True):
        assert torch.equal(ring.cpu(), other)


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("new", "position"), [(1, 500), (1, 3), (4, 700), (64, 200)])
def test_attention(dtype, head_dim, new, position):
    """Of a padded batch; the same graph on every length."""
    torch.manual_seed(new + position)
    keys = [torch.randn(2, 2, 768, head_dim, device="cuda").to(dtype) for _ in range(2)]
    rings = [torch.zeros(2, 2, rows_for(64), head_dim, dtype=dtype, device="cuda") for _ in range(2)]
    stored = [x[:, :, : position + new] for x in keys]
    ops.cache_write(*rings, *stored, torch.tensor(0, device="cuda"), ring_from=FIRST)
    padding = torch.ones(2, 768, dtype=torch.bool, device="cuda")
    padding[0, : position // 2] = False
    q = torch.randn(2, 12, new, head_dim, device="cuda").to(dtype)

    def attend(q, kc, kn, vc, vn, k_ring, v_ring, position, padding):
        k = with_recent(decode(kc, kn, head_dim, q.dtype), k_ring.to(q.dtype), position, q.shape[2])
        v = with_recent(decode(vc, vn, head_dim, q.dtype), v_ring.to(q.dtype), position, q.shape[2])
        i = position + torch.arange(q.shape[2], device=q.device)[:, None]
        mask = (torch.arange(768, device=q.device) <= i) & padding[:, None, None]
        k, v = (x.repeat_interleave(6, dim=1) for x in (k, v))
        scores = (q @ k.mT * 0.1).masked_fill(~mask, torch.finfo(q.dtype).min)
        return scores.softmax(-1) @ v

    codes = [x for states in keys for x in tbq4.encode(states)]
    recording = check_rewrite(attend, q, *codes, *rings, torch.tensor(position, device="cuda"), padding)
    of_codes, of_ring = recording.named("attention_lse")
    assert [value(x.args[1]).dtype for x in (of_codes, of_ring)] == [torch.uint8, dtype]
    ((dispatches, _),) = recording.collector.graphs[0].runs
    assert dispatches[0].backend == "triton.tbq4"
