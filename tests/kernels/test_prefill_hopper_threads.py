"""What triton.prefill_hopper computes, as Python on threads (gluon_on_threads.py), against float64."""

import math
from types import SimpleNamespace

import pytest
import torch

from attnpatch.dispatch import load_backend
from attnpatch.kernels.common import support
from attnpatch.kernels.prefill_hopper import launch
from attnpatch.testing.inputs import check_backend, key_bounds, packed, random_call
from tests.kernels import gluon_on_threads

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero):RuntimeWarning")  # numpy's, not a kernel's

BACKEND = load_backend("triton.prefill_hopper")._replace(refuses=lambda call: None)


class Kernel:
    """Stands in for the kernel."""

    def __getitem__(self, grid):
        return lambda **arguments: gluon_on_threads.run(grid, arguments)


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    """On a GPU of five multiprocessors, where outputs hold NaN before."""
    allocate = torch.Tensor.new_empty_strided
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", lambda x, *sizes: allocate(x, *sizes).fill_(math.nan))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=5))
    monkeypatch.setattr(launch, "_prefill_hopper_kernel", Kernel())
    monkeypatch.setattr(support, "_plans", {})


def call_of(**case):
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float16}
    return random_call(**{**sizes, "window_right": 0, "lse": True, **case})


def mixed(mix, spare=0, **case):
    """Sequences of (rows, keys), the last row on the last key unless the case has an offset of its own."""
    parts = [{"seqlen_q": q, "seqlen_k": k, "q_offset": k - q} for q, k in mix]
    return packed([call_of(**{**part, **case}, seed=i) for i, part in enumerate(parts)], spare)


TERMS = {
    "causal": {},
    "no band": {"window_right": None},
    "a window": {"window_left": 130},
    "a window of one key": {"window_left": 0},
    "both sides": {"window_left": 20, "window_right": 140},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([-1.0, 2.0])},
    "slopes": {"alibi_slopes": torch.tensor([0.1, 1.0])},
    "rows that see nothing": {"q_offset": -70, "sinks": torch.zeros(2)},
}
WIDTHS = [(24, 24), (128, 128), (192, 128), (256, 256)]

BOUNDS = {
    "documents": key_bounds(torch.arange(300) // 90 * 90, torch.arange(300) // 90 * 90 + 90),
    "gaps": key_bounds(torch.arange(300) // 64 % 3 * 100, torch.arange(300) // 64 % 3 * 100 + 40),
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_batches(terms):
    check_backend(BACKEND, call_of(batch=2, seqlen_q=150, seqlen_k=300, **{"q_offset": 150, **terms}))


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_bounds(bounds):
    check_backend(BACKEND, call_of(seqlen_q=300, window_right=None, key_bounds=bounds))


HOLES = torch.rand(300, generator=torch.Generator().manual_seed(1)) < 0.7
BEFORE = torch.arange(300)[None, :] <= torch.arange(300)[:, None]
MASKS = {
    "causal": {"attn_mask": BEFORE[None, None]},
    "holes in some tiles": {"attn_mask": (BEFORE & (HOLES | (torch.arange(300)[:, None] < 128)))[None, None]},
    "padding on the left": {"key_padding": torch.arange(300)[None, :] >= 40, "window_right": 0},
    "padding with holes": {"key_padding": HOLES[None, :], "window_right": 0},
}


@pytest.mark.parametrize("terms", MASKS.values(), ids=MASKS)
def test_masks(terms):
    """Tiles with holes are triton.prefill's, in the interpreter."""
    check_backend(BACKEND, call_of(**{"seqlen_q": 300, "window_right": None, **terms}))


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_widths(widths):
    check_backend(BACKEND, call_of(seqlen_q=200, head_dim=widths[0], head_dim_v=widths[1]))


def test_keys_before_every_window_may_be_no_numbers():
    call = call_of(seqlen_q=128, seqlen_k=428, q_offset=300, window_left=20)
    for x in (call.k, call.v):
        x[:, :, :280] = math.nan
    check_backend(BACKEND, call)


def test_offsets_on_the_device():
    """Keys behind them are NaN."""
    call = call_of(batch=2, seqlen_q=130, seqlen_k=400, q_offset=torch.tensor([200, -1]))
    for b, stop in enumerate((330, 129)):
        call.k[b, :, stop:], call.v[b, :, stop:] = math.nan, math.nan
    check_backend(BACKEND, call)


MIXES = {
    "one": [(300, 300)],
    "whole blocks": [(128, 128), (256, 256)],
    "prompts": [(130, 130), (1, 1), (65, 65), (64, 64), (128, 128)],
    "chunks of prompts": [(100, 400), (200, 201)],
    "empty sequences": [(0, 0), (0, 50), (130, 0), (140, 140), (0, 1), (1, 0), (0, 0)],
    "more rows than keys": [(300, 70), (130, 130), (140, 1)],
}


@pytest.mark.parametrize("spare", [0, 9, 200])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_packed(mix, spare):
    """Rows and keys of no sequence are NaN; those rows give zeros."""
    call = mixed(mix, spare)
    o = check_backend(BACKEND, call)
    assert not o[:, :, call.seqlen_q - spare :].any()


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms_of_packed_sequences(terms):
    check_backend(BACKEND, mixed([(140, 300), (0, 3), (70, 70)], 9, **terms))


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_widths_of_packed_sequences(widths):
    check_backend(BACKEND, mixed([(140, 300), (70, 70)], 9, head_dim=widths[0], head_dim_v=widths[1]))


def test_slopes_and_offsets_of_packed_sequences():
    call = mixed([(140, 300), (70, 70)], alibi_slopes=torch.tensor([[0.1, 1.0]]))
    assert call.alibi_slopes.shape == (2, 2)
    for offset in (call.q_offset, -5, torch.tensor(60)):
        check_backend(BACKEND, call._replace(q_offset=offset))


def test_packed_rows_on_keys_that_are_not():
    """What no row sees is NaN."""
    call = mixed([(140, 300), (1, 300), (0, 300)], q_offset=50)
    k, v = (x.unflatten(2, (3, 300))[0].transpose(0, 1).clone() for x in (call.k, call.v))
    for b, stop in enumerate((190, 51, 0)):
        k[b, :, stop:], v[b, :, stop:] = math.nan, math.nan
    check_backend(BACKEND, call._replace(k=k, v=v, cu_seqlens_k=None))


def test_a_sequence_that_is_no_numbers_leaves_its_neighbours_alone():
    call = mixed([(100, 100), (70, 90), (130, 130)])
    first = BACKEND.run(call)
    call.q[:, :, 100:170], call.k[:, :, 100:190], call.v[:, :, 100:190] = math.nan, math.nan, math.inf
    second = BACKEND.run(call)
    assert second[:, :, 100:170].isnan().all()
    for rows in (slice(0, 100), slice(170, 300)):
        assert torch.equal(first[:, :, rows], second[:, :, rows])


def test_a_barrier_at_which_nobody_arrives_is_an_error(monkeypatch):
    monkeypatch.setattr(gluon_on_threads, "PATIENCE_S", 0.1)
    monkeypatch.setattr(gluon_on_threads.MBARRIER, "arrive", lambda barrier, count: None)
    with pytest.raises(TimeoutError):
        BACKEND.run(call_of(seqlen_q=600))
