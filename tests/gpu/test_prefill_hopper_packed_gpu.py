"""Packed sequences on triton.prefill_hopper on a CUDA device (run with TRITON_INTERPRET=0)."""

import math

import pytest
import torch

from attnpatch.dispatch import choose, load_backend
from attnpatch.kernels.prefill_hopper.launch import prefill_hopper
from attnpatch.testing.inputs import check_backend, packed
from attnpatch.testing.samples import check_samples
from tests.gpu.calls import CUDA, ON_GPU, call_on_gpu

NAME = "triton.prefill_hopper"

pytestmark = [*ON_GPU, pytest.mark.usefixtures("hopper")]

MIXES = {
    "one": [(1000, 1000)],
    "whole blocks": [(128, 128), (256, 256), (128, 128)],
    "prompts": [(300, 300), (1, 1), (129, 129), (64, 64), (65, 65), (1000, 1000), (63, 63), (127, 127)],
    "chunks of prompts": [(200, 700), (128, 1000), (300, 301), (77, 500)],
    "steps and a prompt": [(1, 700), (1, 1), (1, 129), (900, 900), (1, 64)],
    "empty sequences": [(0, 0), (0, 50), (300, 0), (200, 200), (0, 1), (1, 0), (0, 0)],
    "more rows than keys": [(300, 70), (130, 130), (140, 1)],
}

TERMS = {
    "no band": {"window_right": None},
    "a window": {"window_left": 130},
    "a window of one key": {"window_left": 0},
    "both sides": {"window_left": 20, "window_right": 140},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.linspace(-1, 3, 8)},
    "slopes": {"alibi_slopes": torch.linspace(0, 1, 8)},
    "slopes per sequence": {"alibi_slopes": torch.linspace(0, 1, 8)[None]},
    "one offset": {"q_offset": 3},
    "rows that see nothing": {"q_offset": -150},
    "every term": {
        **{"window_left": 200, "softcap": 30.0, "sinks": torch.zeros(8), "alibi_slopes": torch.linspace(0, 0.1, 8)},
    },
}


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """What the launcher allocates for the output holds NaN before."""
    allocate = torch.Tensor.new_empty_strided
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", lambda x, *sizes: allocate(x, *sizes).fill_(math.nan))


def mixed(mix, spare=0, **case):
    """Sequences of (rows, keys), the last row on the last key unless the case has an offset of its own."""
    defaults = {"batch": 1, "head_dim": 128, "window_right": 0, "lse": True}
    parts = [{"seqlen_q": q, "seqlen_k": k, "q_offset": k - q} for q, k in mix]
    return packed([call_on_gpu(**{**defaults, **part, **case}, seed=i) for i, part in enumerate(parts)], spare)


def check(call):
    return check_backend(load_backend(NAME), call)


def bits(call):
    """Output and lse of a run of its own."""
    lse = torch.full(call.q.shape[:3], -math.inf, device=CUDA)
    return torch.cat([prefill_hopper(call._replace(lse=lse)), lse[..., None]], dim=3)


@pytest.mark.parametrize("spare", [0, 9, 300])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_mixes(mix, spare):
    """Rows and keys of no sequence are NaN; those rows give zeros."""
    call = mixed(mix, spare)
    o = check(call)
    rows = call.seqlen_q - spare
    assert not o[:, :, rows:].any()
    assert (call.lse[:, :, rows:] == -math.inf).all()


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_terms(name, dtype):
    check(mixed([(200, 700), (0, 3), (300, 300), (65, 80)], 9, dtype=dtype, **TERMS[name]))


@pytest.mark.parametrize("offset", [-40, torch.tensor(3), torch.tensor([70])], ids=str)
def test_one_offset_for_all(offset):
    """A number, or a tensor of one element."""
    offset = offset.to(CUDA) if isinstance(offset, torch.Tensor) else offset
    check(mixed([(200, 700), (300, 300)])._replace(q_offset=offset))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(16, 16), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str
)
@pytest.mark.parametrize("window_left", [None, 130], ids=["causal", "window"])
def test_head_dims(head_dim, head_dim_v, window_left):
    check(mixed(MIXES["prompts"], 9, head_dim=head_dim, head_dim_v=head_dim_v, window_left=window_left))


@pytest.mark.parametrize("heads", [(8, 8), (9, 3), (8, 1), (71, 1)], ids=str)
def test_groups(heads):
    check(mixed(MIXES["chunks of prompts"], num_heads=heads[0], num_kv_heads=heads[1]))


def test_keys_that_are_not_packed():
    """K and V are ``[batch, ...]``, as a cache has them; what no row sees is NaN."""
    call = mixed([(300, 500), (1, 500), (0, 500), (200, 500)], q_offset=100)
    k, v = (x.unflatten(2, (4, 500))[0].transpose(0, 1).clone() for x in (call.k, call.v))
    for b, stop in enumerate((400, 101, 0, 300)):
        k[b, :, stop:], v[b, :, stop:] = math.nan, math.nan
    check(call._replace(k=k, v=v, cu_seqlens_k=None))


def test_strides_of_a_fused_projection():
    """q, k and v as views of one ``[total, 3, heads, head_dim]``."""
    call = mixed(MIXES["prompts"], num_heads=4, num_kv_heads=4)
    qkv = torch.randn(1, call.seqlen_q, 3, 4, 128, device=CUDA, dtype=torch.bfloat16)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    check(call._replace(q=q, k=k, v=v))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sequence_that_is_no_numbers_leaves_its_neighbours_alone(head_dim):
    """A block that ends a sequence reads on into the next one."""
    call = mixed([(200, 200), (100, 130), (200, 200)], head_dim=head_dim)
    first, spoilt = bits(call), call._replace(k=call.k.clone(), v=call.v.clone(), q=call.q.clone())
    spoilt.q[:, :, 200:300], spoilt.k[:, :, 200:330], spoilt.v[:, :, 200:330] = math.nan, math.nan, math.inf
    second = bits(spoilt)
    for rows in (slice(0, 200), slice(300, 500)):
        assert torch.equal(first[:, :, rows], second[:, :, rows])


def test_the_neighbours_change_no_bit():
    mix = [(300, 300), (64, 900), (129, 129), (1, 40)]
    parts = [
        call_on_gpu(batch=1, head_dim=128, seqlen_q=q, seqlen_k=k, q_offset=k - q, window_right=0, seed=i)
        for i, (q, k) in enumerate(mix)
    ]
    together, first = bits(packed(parts)), 0
    for part in parts:
        rows = slice(first, first + part.seqlen_q)
        for others in ([], [part] * 7):
            alone = bits(packed([part, *others], spare=5))
            assert torch.equal(alone[:, :, : part.seqlen_q], together[:, :, rows])
        first = rows.stop


def test_repeats():
    call = mixed(MIXES["prompts"] * 4, 9, num_heads=32, num_kv_heads=8)
    first = bits(call)
    assert all(torch.equal(bits(call), first) for _ in range(20))


def log_uniform(n=64, shortest=16, longest=4096):
    steps = torch.rand(n, generator=torch.Generator().manual_seed(0)).tolist()
    return [round(shortest * (longest / shortest) ** step) for step in steps]


@pytest.mark.parametrize("window_right", [None, 0], ids=["full", "causal"])
def test_many_lengths(window_right):
    mix = [(n, n) for n in log_uniform()]
    call = mixed(mix, num_heads=32, num_kv_heads=8, window_right=window_right, lse=None)
    assert choose(call)[1].backend == NAME
    for _ in range(2):
        o = prefill_hopper(call)
        check_samples(o, call)
        assert not o.isnan().any()


def test_more_sequences_than_a_program_looks_at_together():
    check(mixed([(1 + 7 * i % 40, 1 + 7 * i % 40) for i in range(700)], num_heads=2, num_kv_heads=1))


def test_a_graph_replays_with_other_lengths():
    """The sequences of a bucket: as many rows and keys at most, in other shares."""
    call = mixed([(100, 700), (500, 500), (1, 9), (300, 2000)], lse=None, window_right=None)
    call = call._replace(q_offset=torch.zeros(4, dtype=torch.int64, device=CUDA))
    prefill_hopper(call)  # compiles outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = prefill_hopper(call)
    rows = ([0, 100, 600, 601, 901], [0, 1, 2, 3, 4], [0, 0, 901, 901, 901], [0, 0, 0, 0, 0], [0, 300, 600, 800, 900])
    keys = ([0, 700, 1200, 1209, 3209], [0, 1, 2, 3, 4], [0, 0, 3000, 3000, 3209], [0, 0, 0, 0, 0])
    for cu_seqlens_q in rows:
        for cu_seqlens_k in keys:
            call.cu_seqlens_q.copy_(torch.tensor(cu_seqlens_q))
            call.cu_seqlens_k.copy_(torch.tensor(cu_seqlens_k))
            captured.fill_(math.nan)
            graph.replay()
            assert torch.equal(captured, prefill_hopper(call)), (cu_seqlens_q, cu_seqlens_k)
            assert not captured[:, :, cu_seqlens_q[-1] :].any()
            check_samples(captured, call)


def test_nothing_waits_for_the_device():
    call = mixed(MIXES["prompts"])
    prefill_hopper(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prefill_hopper(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_driver_takes_all_three_launches(answers):
    call = mixed(MIXES["prompts"], lse=None)
    first = prefill_hopper(call)
    assert not answers
    assert torch.equal(prefill_hopper(call), first)
    assert answers == [True]


def test_lengths_do_not_recompile():
    """One kernel serves every number of rows, keys and sequences; odd ones and 1 are what Triton would specialise."""
    from attnpatch.kernels.prefill_hopper import dealing
    from attnpatch.kernels.prefill_hopper.kernel import _prefill_hopper_kernel

    def compiled():
        kernels = (_prefill_hopper_kernel, dealing._blocks_kernel, dealing._deal_kernel)
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    def run(*lengths):
        prefill_hopper(mixed([(n, n) for n in lengths], head_dim=72))

    for lengths in ((17,), (64, 64), (65, 1, 3)):
        run(*lengths)
    before = compiled()
    for lengths in ((2,), (16,) * 16, (111, 500), (128,), (1,) * 33):
        run(*lengths)
    assert all(now <= then + 1 for now, then in zip(compiled(), before, strict=True))  # strides of a single row differ
