"""key_bounds, sinks, slopes, the lse and the scan of a mask on a CUDA device (run with TRITON_INTERPRET=0)."""

import math
import os

import pytest
import torch

from attnpatch import masking, ops
from attnpatch.dispatch import load_backend
from attnpatch.kernels.decode.launch import decode
from attnpatch.kernels.reference import hidden_keys
from attnpatch.testing.inputs import check_backend, key_bounds, random_call
from attnpatch.testing.samples import check_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets; set TRITON_INTERPRET=0"),
]

CUDA = torch.device("cuda")
KEYS = 700
ROW = torch.arange(KEYS)
HEAD = torch.arange(8)[:, None]
SEQUENCE = torch.arange(2)[:, None, None]


def split_in(num_splits):
    return load_backend("triton.decode")._replace(run=lambda call: decode(call, num_splits))


RUNS = {
    "prefill": (load_backend("triton.prefill"), 333),
    "decode": (split_in(0), 1),
    "decode, 1 split": (split_in(1), 1),
    "decode, 7 splits": (split_in(7), 1),
}


@pytest.fixture(params=RUNS.values(), ids=RUNS)
def kernel(request):
    return request.param


def call_for(rows, **terms):
    """The last ``rows`` of a square of KEYS rows, whose masks and bounds ``terms`` describe; always with an lse."""
    for name, width in (("key_bounds", 3), ("attn_mask", KEYS)):
        if name in terms:
            terms[name] = terms[name].expand(2, 8, KEYS, width)[:, :, KEYS - rows :]
    terms = {"q_offset": KEYS - rows, "dtype": torch.bfloat16, "head_dim": 64, **terms}
    terms = {name: x.to(CUDA) if isinstance(x, torch.Tensor) else x for name, x in terms.items()}
    return random_call(2, 8, 2, rows, KEYS, device="cuda", lse=True, **terms)


def check(kernel, **terms):
    backend, rows = kernel
    return check_backend(backend, call_for(rows, **terms))


def bool_mask(*shape, keep=0.7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < keep


def bias(*shape, hide=0.2):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return values.masked_fill(~bool_mask(*shape, keep=1 - hide), -math.inf)


def poisoned(call, dead):
    """NaN in the keys and values that bool ``dead`` ``[batch, seqlen_k]`` marks."""
    dead = dead[:, None, :, None].to(CUDA)
    return call._replace(k=call.k.masked_fill(dead, math.nan), v=call.v.masked_fill(dead, math.nan))


THIRDS = ROW // 250 * 250
THIRD = ROW % 3 == 0

BOUNDS = {
    "beyond both ends": key_bounds(-70, 3 * KEYS),
    "documents": key_bounds(THIRDS, THIRDS + 250),
    "causal": key_bounds(0, ROW + 1),
    "a window": key_bounds(ROW - 100, ROW + 1),
    "a prefix, then causal": key_bounds(0, (ROW + 1).clamp(min=400)),
    "per sequence": key_bounds(SEQUENCE * 333, 500 + 200 * SEQUENCE),
    "per head": key_bounds(HEAD * 40, ROW - HEAD),
    "rows that see nothing": key_bounds(torch.where(THIRD, KEYS, 2), torch.where(THIRD, 0, 650)),
    "nothing": key_bounds(KEYS, 0),
    "right of the keys": key_bounds(KEYS + 70, KEYS + 90),
}

MASKS = {
    "bool": {"attn_mask": bool_mask(2, 1, KEYS, KEYS)},
    "bias": {"attn_mask": bias(1, 8, KEYS, KEYS)},
    "padding": {"key_padding": bool_mask(2, KEYS)},
    "all": {"attn_mask": bias(1, 8, KEYS, KEYS), "key_padding": bool_mask(2, KEYS), "softcap": 3.0},
}

NEW_TERMS = {
    "sinks": {"sinks": torch.linspace(-2, 2, 8)},
    "bfloat16 sinks": {"sinks": torch.linspace(-2, 2, 8).bfloat16()},
    "large sinks": {"sinks": torch.linspace(5, 80, 8)},
    "slopes": {"alibi_slopes": torch.linspace(0.01, 0.5, 8)},
    "slopes per sequence": {"alibi_slopes": torch.linspace(0.01, 0.5, 16).view(2, 8)},
    "lse": {},
    "both, capped": {"sinks": torch.zeros(8), "alibi_slopes": torch.linspace(0.01, 0.5, 8), "softcap": 2.0},
}


@pytest.mark.parametrize("terms", [{}, {"window_right": 0}, {"window_left": 99, "window_right": 0}], ids=str)
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_bounds(kernel, bounds, terms):
    check(kernel, key_bounds=bounds, **terms)


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("bounds", ["documents", "per head", "rows that see nothing"])
def test_bounds_and_what_they_do_not_replace(kernel, bounds, masks):
    first_and_stop = BOUNDS[bounds][..., :2]
    check(kernel, key_bounds=torch.cat([first_and_stop, torch.zeros_like(first_and_stop[..., :1])], dim=-1), **masks)


@pytest.mark.parametrize("wrong", ["bool", "bias", "padding"])
def test_where_rows_are_plain_no_mask_is_read(kernel, wrong):
    """A mask that breaks the promise shows that nobody looks."""
    backend, rows = kernel
    call = call_for(rows, key_bounds=BOUNDS["documents"], **MASKS[wrong])
    masked = backend._replace(run=lambda unmasked: backend.run(call))
    check_backend(masked, call._replace(attn_mask=None, key_padding=None))


def test_what_lies_outside_of_the_bounds_does_not_count(kernel):
    backend, rows = kernel
    first, stop = 300 * SEQUENCE, 450 + 250 * SEQUENCE
    call = call_for(rows, key_bounds=key_bounds(first + HEAD * 9, stop - HEAD))
    check_backend(backend, poisoned(call, ((first > ROW) | (stop <= ROW))[:, 0]))


LATE = ROW >= KEYS - 20

UNSEEN = {
    "between two stretches": {"key_bounds": key_bounds(torch.where(LATE, 400, 0), torch.where(LATE, KEYS, 200))},
    "left of a window": {"key_bounds": key_bounds(torch.where(LATE, 10, 660), KEYS), "window_left": 60},
    "right of the diagonal": {"key_bounds": key_bounds(0, torch.where(LATE, 50, KEYS)), "window_right": 0},
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("terms", UNSEEN.values(), ids=UNSEEN)
def test_what_no_row_of_a_tile_sees_does_not_count(terms, head_dim):
    """The ends of the tile's stretches do not tell."""
    call = call_for(64, head_dim=head_dim, **terms)
    dead = hidden_keys(call).all(dim=2).all(dim=1)
    assert dead.any()
    check_backend(load_backend("triton.prefill"), poisoned(call, dead))


@pytest.mark.parametrize("window_left", [None, 99], ids=["causal", "window"])
@pytest.mark.parametrize("terms", NEW_TERMS.values(), ids=NEW_TERMS)
def test_sinks_slopes_and_lse(kernel, terms, window_left):
    check(kernel, window_right=0, window_left=window_left, **terms)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("masks", ["bool", "all"])
def test_every_term_at_once(kernel, masks, dtype, head_dim):
    bounds = BOUNDS["rows that see nothing"] * torch.tensor([1, 1, 0], dtype=torch.int32)
    terms = {**NEW_TERMS["both, capped"], **MASKS[masks], "key_bounds": bounds, "window_right": 0}
    check(kernel, dtype=dtype, head_dim=head_dim, **terms)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_plain_bounds(kernel, dtype, head_dim):
    check(kernel, dtype=dtype, head_dim=head_dim, key_bounds=BOUNDS["documents"], window_right=0)


SEQLEN = 4096


def large(kind):
    row, sequence = torch.arange(SEQLEN, device=CUDA), torch.arange(2, device=CUDA).view(-1, 1, 1, 1)
    mask = (row <= row[:, None]) & (row >= 1000 * sequence)
    if kind == "holes":
        mask &= torch.rand(mask.shape, device=CUDA) > 0.01
    if kind == "bias":
        return torch.zeros(mask.shape, dtype=torch.bfloat16, device=CUDA).masked_fill_(~mask, -math.inf)
    return mask


@pytest.mark.parametrize("kind", ["causal", "holes", "bias"])
def test_an_opaque_mask_of_4096_rows(kind):
    mask = large(kind)
    terms = {"attn_mask": mask, "key_bounds": ops.key_bounds(mask)}
    call = random_call(2, 32, 8, SEQLEN, head_dim=128, dtype=torch.bfloat16, device="cuda", **terms)
    check_samples(load_backend("triton.prefill").run(call), call)


def test_a_graph_replays_with_another_mask():
    """A static cache under an opaque mask: what is read grows with the mask's contents."""
    mask = torch.zeros(2, 1, 1, 4096, dtype=torch.bool, device=CUDA)
    call = random_call(2, 8, 2, 1, 4096, 128, dtype=torch.bfloat16, device="cuda")
    terms = {"sm_scale": call.sm_scale, "attn_mask": mask, "backends": "triton.decode"}

    def step():
        return ops.attention(call.q, call.k, call.v, key_bounds=ops.key_bounds(mask), **terms)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for valid in (1, 0, 700, 4096):
        mask.copy_(torch.arange(4096, device=CUDA) < valid)
        captured.fill_(math.nan)
        graph.replay()
        poison = (torch.arange(4096, device=CUDA) >= valid)[None, None, :, None]
        reference = call._replace(attn_mask=mask.expand(2, 8, 1, 4096), k=call.k.masked_fill(poison, 0))
        check_samples(captured, reference)
        assert valid > 0 or not captured.any()


def test_nothing_waits_for_the_device(kernel):
    backend, rows = kernel
    call = call_for(rows, key_bounds=BOUNDS["documents"], **MASKS["bool"], **NEW_TERMS["both, capped"])
    backend.run(call)
    ops.key_bounds(call.attn_mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.run(call)
        ops.key_bounds(call.attn_mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


SCANNED = {
    "causal": bool_mask(1, 1, KEYS, KEYS, keep=1).tril(),
    "nothing": bool_mask(2, 1, KEYS, KEYS, keep=0),
    "holes": bool_mask(2, 3, KEYS, KEYS),
    "few": bool_mask(2, 3, KEYS, 9000, keep=0.001),
    "one row": bool_mask(2, 1, 1, 33333, keep=0.001),
    "bias": bias(2, 1, KEYS, KEYS),
    "half minimum": torch.zeros(2, 1, KEYS, KEYS).half().masked_fill(bool_mask(1, 1, KEYS, KEYS), -65504.0),
    "bfloat16 minimum": bias(1, 1, KEYS, KEYS).bfloat16().clamp(min=torch.finfo(torch.bfloat16).min),
    "float64": bias(1, 1, KEYS, KEYS).double(),
    "expanded": bool_mask(1, 1, KEYS, KEYS).expand(2, 8, KEYS, KEYS),
    "transposed": bool_mask(1, 1, 300, KEYS).transpose(2, 3),
    "no keys": bool_mask(2, 1, KEYS, 0),
    "no rows": bool_mask(2, 1, 0, KEYS),
}


@pytest.mark.parametrize("mask", SCANNED.values(), ids=SCANNED)
def test_scan(mask):
    """The operator takes the kernel here, and plain torch on the CPU."""
    assert torch.equal(ops.key_bounds(mask.to(CUDA)).cpu(), masking.key_bounds(mask))


@pytest.mark.parametrize("operator", [torch.ops.attnpatch.attention_lse, torch.ops.attnpatch.attention])
def test_opcheck(operator):
    mask = bias(1, 1, 64, 64).to(CUDA)
    q, k, v = (torch.randn(1, 4, 64, 32, device=CUDA, requires_grad=True) for _ in range(3))
    terms = {"sinks": torch.randn(4, device=CUDA, requires_grad=True), "alibi_slopes": torch.rand(4, device=CUDA)}
    terms = {**terms, "key_bounds": ops.key_bounds(mask), "attn_mask": mask, "window_right": 0}
    torch.library.opcheck(operator.default, (q, k, v, 0.3), terms)


def test_gradients():
    """The recomputing backward on the device, against the one on the CPU."""
    call = random_call(2, 4, 2, 150, 150, 32, sinks=torch.randn(4), key_bounds=key_bounds(torch.arange(150) - 30, 140))
    grads = {}
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in (call.q, call.k, call.v, call.sinks)]
        o, lse = ops.attention_lse(
            *leaves[:3], 0.3, window_right=0, sinks=leaves[3], key_bounds=call.key_bounds.to(device)
        )
        seen = lse.masked_fill(lse == -math.inf, 0.0)
        grads[device] = torch.autograd.grad(o.square().sum() + seen.sum(), leaves)
    for ours, expected in zip(grads["cuda"], grads["cpu"], strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-4, atol=1e-4)
