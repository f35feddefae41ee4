"""What triton.prefill_hopper decides on the host: which key blocks a tile sees, who computes it, what it refuses.

The kernel itself needs the chip: tests/gpu/test_prefill_hopper_gpu.py; its compiled code is looked at in test_sass.py.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

import attnpatch
from attnpatch import dispatch
from attnpatch.kernels.common import support
from attnpatch.kernels.prefill_hopper import backend
from attnpatch.kernels.prefill_hopper.launch import ranges_launch, ranges_shape
from attnpatch.kernels.prefill_hopper.masks import key_blocks, seen_keys
from attnpatch.kernels.prefill_hopper.schedule import assign
from attnpatch.testing.inputs import key_bounds, paged, quantised, random_call

WINDOW = st.none() | st.integers(0, 70)


@given(
    m_block=st.integers(0, 6),
    offset=st.integers(-60, 60),
    seqlen_q=st.integers(1, 100),
    seqlen_k=st.integers(1, 150),
    window_left=WINDOW,
    window_right=WINDOW,
)
def test_key_blocks_against_every_score(m_block, offset, seqlen_q, seqlen_k, window_left, window_right):
    """Blocks that are left out hide everything, those called full hide nothing."""
    block_m, block_n = 16, 8
    m = m_block * block_m % max(seqlen_q, 1) // block_m * block_m
    band = (offset, seqlen_q, seqlen_k, window_left, window_right)
    lo, full_lo, full_hi, hi = seen_keys.fn(m, *band, block_m)
    last, num, right, left = key_blocks.fn(lo, full_lo, full_hi, hi, block_n)
    position = np.arange(m, min(m + block_m, seqlen_q))[:, None] + offset
    keys = np.arange((seqlen_k + block_n - 1) // block_n * block_n)[None, :]
    visible = np.broadcast_to(keys < seqlen_k, (len(position), keys.shape[1])).copy()
    if window_left is not None:
        visible &= keys >= position - window_left
    if window_right is not None:
        visible &= keys <= position + window_right
    seen_by_some = np.flatnonzero(visible.any(0))
    assert ((lo <= seen_by_some) & (seen_by_some < hi)).all()
    walked = [last - j for j in range(num)]
    assert num >= 1
    assert min(walked) >= 0
    assert max(walked) * block_n < seqlen_k
    for block in range(keys.shape[1] // block_n):
        seen = visible[:, block * block_n : (block + 1) * block_n]
        if block not in walked:
            assert not seen.any()
        elif right <= walked.index(block) < num - left:
            assert seen.all()


@given(
    costs=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    batch=st.integers(1, 4),
    num_heads=st.integers(1, 20),
    section=st.integers(1, 50),
    programs=st.integers(1, 24),
)
def test_every_tile_has_one_program(costs, batch, num_heads, section, programs):
    tiles, counts = assign(costs, batch, num_heads, section, programs)
    assert (tiles[:, -1] == 0).all(), "a program reads on by one"
    dealt = sorted(int(tile) for row, n in zip(tiles, counts, strict=True) for tile in row[:n])
    blocks = range(len(costs))
    assert dealt == [b << 48 | h << 32 | block for b in range(batch) for h in range(num_heads) for block in blocks]
    loads = [sum(costs[tile & 0xFFFFFFFF] for tile in row[:n]) for row, n in zip(tiles, counts, strict=True)]
    assert max(loads) <= sum(loads) / programs + max(costs), "nobody gets a tile while another has less to do"


def test_programs_have_as_much_to_do():
    costs = [1.5 + key_blocks.fn(*seen_keys.fn(m, 0, 4096, 4096, None, 0, 128), 128)[1] for m in range(0, 4096, 128)]
    tiles, counts = assign(costs, 4, 32, 32, 132)
    loads = [sum(costs[tile & 0xFFFFFFFF] for tile in row[:n]) for row, n in zip(tiles, counts, strict=True)]
    assert max(loads) * 132 / sum(loads) < 1.01


@given(
    seqlen_q=st.integers(1, 40),
    seqlen_k=st.integers(1, 50),
    offset=st.integers(-20, 40),
    window=st.tuples(WINDOW, WINDOW),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_ranges_against_every_row(seqlen_q, seqlen_k, offset, window, padded, seed):
    """In the interpreter. Rows that are not plain count where there are masks."""
    generator = torch.Generator().manual_seed(seed)
    first, stop = torch.randint(0, seqlen_k + 1, (2, 1, 1, seqlen_q), generator=generator)
    plain = torch.randint(0, 2, (1, 1, seqlen_q), generator=generator)
    bounds = torch.stack([-first, stop, plain], -1).int().expand(1, 2, seqlen_q, 3)
    sizes = {"num_heads": 2, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": 16}
    call = random_call(**sizes, key_bounds=bounds, q_offset=offset, window_left=window[0], window_right=window[1])
    call = call._replace(key_padding=torch.ones(1, seqlen_k, dtype=torch.bool) if padded else None)
    found = torch.full(ranges_shape(call, 16), -7, dtype=torch.int32)
    ranges_launch(call, tuple(found.shape), 16)(call, found)
    assert found.shape[:2] == (1, 1), "bounds that all heads share are read once"
    position = torch.arange(seqlen_q) + offset
    low, high = first[0, 0], stop[0, 0]
    low = low if window[0] is None else torch.maximum(low, position - window[0])
    high = high if window[1] is None else torch.minimum(high, position + window[1] + 1)
    high = high.clamp(min=0)
    for block, rows in enumerate(range(0, seqlen_q, 16)):
        tile = slice(rows, rows + 16)
        whole = not padded or bool(plain[0, 0, tile].all())
        edges = [low[tile].min(), low[tile].max(), high[tile].min(), high[tile].max() * whole]
        assert found[0, 0, block, :5].tolist() == [seqlen_q * whole, *map(int, edges)]
        seen = torch.zeros(seqlen_k, dtype=torch.bool)
        for n in range(*tile.indices(seqlen_q)):
            seen[low[n] : max(low[n], high[n])] = True
        if found[0, 0, block, 5]:
            assert seen[low[tile].min() : high[tile].max()].all(), "no gap"


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(support, "capability", lambda device: (9, 0))


def half_call(**case):
    return random_call(**{"batch": 2, "num_heads": 2, "seqlen_q": 9, "dtype": torch.float16, **case})


CALL = half_call()
REFUSED = {
    "float32": (half_call(dtype=torch.float32), "float32 is multiplied exactly by triton.prefill alone"),
    "additive mask": (
        half_call(attn_mask=torch.zeros(1, 1, 9, 9)),
        "an attn_mask, here torch.float32, is streamed by triton.prefill alone",
    ),
    "mask per head": (
        half_call(attn_mask=torch.ones(1, 2, 9, 9, dtype=torch.bool)),
        "an attn_mask of its own for each head comes without key_bounds, and a scan of it takes too long",
    ),
    "pages": (
        paged(CALL, 16),
        "K and V lie in pages of 16, and triton.prefill_hopper follows no block_table",
    ),
    "8 bits": (
        quantised(CALL, torch.int8),
        "K is int8, and triton.prefill_hopper multiplies no scale in",
    ),
    "rows of 18 bytes": (
        half_call(head_dim=9),
        "q has strides (162, 9, 18, 1); TMA reads rows of neighbours, multiples of 16 bytes apart",
    ),
    "channels apart": (
        CALL._replace(k=CALL.k.transpose(2, 3).contiguous().transpose(2, 3)),
        "k has strides (1152, 576, 1, 9); TMA reads rows of neighbours, multiples of 16 bytes apart",
    ),
    "one for all heads": (
        CALL._replace(v=CALL.v[:, :1].expand_as(CALL.v)),
        "v has strides (1152, 0, 128, 1); TMA reads rows of neighbours, multiples of 16 bytes apart",
    ),
    "output of 120 bytes": (
        half_call(head_dim_v=64)._replace(v=CALL.v[..., :60]),
        "head_dim_v 60 is no multiple of 8, so that TMA cannot write each head's rows",
    ),
    "no keys": (half_call(seqlen_k=0), "k (2, 2, 0, 64) is empty"),
    "head_dim 264": (
        half_call(head_dim=264),
        "head_dim 264 is above 256, the widest tile of triton.prefill_hopper",
    ),
    "sequences": (
        half_call(batch=1, seqlen_q=1, head_dim=8)._replace(q=torch.empty(1 << 15, 2, 1, 8, dtype=torch.float16)),
        "32768 sequences of 2 heads are not below 32768 of 65536",
    ),
}


@pytest.mark.parametrize(("call", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(hopper, call, reason):
    assert backend._refuses(call) == reason


def test_chips_and_versions_of_triton(monkeypatch):
    monkeypatch.setattr(support, "capability", lambda device: (10, 0))
    assert backend._refuses(CALL) == "compute capability 10.0 is not 9.0, whose warpgroup products it is written for"
    monkeypatch.setattr(support, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert backend._refuses(CALL) == "its warpgroup products are those of NVIDIA's chips"
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(backend, "_triton", lambda: "4.0")
    assert backend._refuses(CALL) == "it is written in Gluon of Triton 3.6 to 3.9, not 4.0"


def test_which_triton():
    assert triton.__version__.startswith(backend._triton() + ".")


TAKEN = {
    "causal": half_call(window_right=0),
    "more rows than keys": half_call(seqlen_k=4, q_offset=5),
    "padding and bounds": half_call(
        key_padding=torch.ones(2, 9, dtype=torch.bool), key_bounds=key_bounds(0, 9).expand(2, 2, 9, 3)
    ),
    "mask": half_call(attn_mask=torch.ones(1, 1, 9, 9, dtype=torch.bool)),
    "mask of one head": half_call(num_heads=1, num_kv_heads=1, attn_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool)),
    "mask per head and bounds": half_call(
        attn_mask=torch.ones(1, 2, 9, 9, dtype=torch.bool), key_bounds=key_bounds(0, 9).expand(2, 2, 9, 3)
    ),
    "all terms": half_call(
        window_left=3, softcap=5.0, sinks=torch.zeros(2), alibi_slopes=torch.ones(2), q_offset=torch.tensor([1, 2])
    ),
    "192 and 128": half_call(head_dim=192, head_dim_v=128),
    "rows 72 apart": CALL._replace(k=F.pad(CALL.k, (0, 8))[..., :64], v=F.pad(CALL.v, (0, 8))[..., :64]),
    "odd address": CALL._replace(k=F.pad(CALL.k, (1, 7))[..., 1:65]),
    "one head, whose stride means nothing": half_call(num_heads=1, num_kv_heads=1)._replace(
        v=torch.empty(2, 9, 64, dtype=torch.float16).as_strided((2, 1, 9, 64), (576, 7, 64, 1))
    ),
}


@pytest.mark.parametrize("call", TAKEN.values(), ids=TAKEN)
def test_what_it_takes(hopper, call):
    assert backend._refuses(call) is None


def test_dispatch_prefers_it_and_says_why_not(monkeypatch):
    names = [name for name in dispatch.BACKEND_MODULES if name.startswith("triton.prefill")]
    assert names == ["triton.prefill_fp8", "triton.prefill_hopper", "triton.prefill"]
    monkeypatch.setattr(support, "capability", lambda device: (9, 0))
    on_gpu = {name: dispatch.load_backend(name)._replace(devices=("cpu", "cuda")) for name in names}
    monkeypatch.setattr(dispatch, "load_backend", on_gpu.__getitem__)
    names = names[1:]
    assert dispatch.choose(CALL, names)[1] == ("prefill", "triton.prefill_hopper", "first choice")
    call, reason = REFUSED["additive mask"]
    assert dispatch.choose(call, names)[1] == ("prefill", "triton.prefill", f"triton.prefill_hopper: {reason}")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_padded_batch_of_a_model(implementation, hopper, monkeypatch, tiny_llama):
    """It brings padding and bounds, and is not refused: the report names the backend, here run by another."""
    transformers = pytest.importorskip("transformers")
    taken = []

    def run(call):
        taken.append(call)
        return dispatch.load_backend("cpu.tiled").run(call)

    stand_in = dispatch.Backend(backend.NAME, ("cpu",), backend._refuses, run)
    others = dispatch.load_backend
    monkeypatch.setattr(dispatch, "load_backend", lambda name: stand_in if name == backend.NAME else others(name))
    monkeypatch.setattr(support, "_plans", {})
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float16)
    model.set_attn_implementation(implementation)
    real = torch.ones(2, 12, dtype=torch.long)
    real[1, :5] = 0
    with torch.no_grad(), attnpatch.patched(model.eval(), backends=[backend.NAME], strict=True):
        model(input_ids=torch.ones_like(real), attention_mask=real)
        found = {(d.phase, d.backend, d.mask) for site in attnpatch.report(model).sites for d in site.dispatches}
    assert found == {("prefill", "triton.prefill_hopper", "causal, padding")}
    assert all(call.key_padding is not None and call.key_bounds is not None for call in taken)
    assert taken
