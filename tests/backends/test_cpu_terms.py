"""cpu.sdpa and cpu.tiled: key_bounds, sinks, slopes and the lse, beside the float64 reference."""

import pytest
import torch

from attnpatch import dispatch
from attnpatch.testing.inputs import check_backend, key_bounds, random_call

BACKENDS = ["cpu.sdpa", "cpu.tiled"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return dispatch.load_backend(request.param)


ROW = torch.arange(30)
SEQUENCE = torch.arange(2)[:, None, None]
HEAD = torch.arange(4)[:, None]
HOLES = torch.arange(30).expand(2, 30) % 3 != 1

BANDS = {
    "full": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 2, "window_right": 0},
    "before the keys": {"window_right": 0, "q_offset": -2},
    "offset tensor": {"window_right": 0, "q_offset": torch.tensor(2)},
}

BOUNDS = {
    "all": key_bounds(0, 30),
    "beyond both ends": key_bounds(-5, 99),
    "a document per ten rows": key_bounds(ROW // 10 * 10, ROW // 10 * 10 + 10),
    "causal": key_bounds(0, ROW + 1),
    "per sequence": key_bounds(SEQUENCE * 7, 20 + 3 * SEQUENCE),
    "per head": key_bounds(HEAD, ROW - HEAD),
    "rows that see nothing": key_bounds(torch.where(ROW % 3 == 0, 30, 2), torch.where(ROW % 3 == 0, 0, 25)),
    "nothing": key_bounds(30, 0),
    "an empty stretch": key_bounds(9, 9),
}


@pytest.mark.parametrize("terms", [{}, BANDS["causal"], BANDS["window"]], ids=["full", "causal", "window"])
@pytest.mark.parametrize("rows", [30, 6, 1], ids=["prefill", "append", "decode"])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_bounds(backend, bounds, rows, terms):
    terms = {**terms, "q_offset": 30 - rows, "key_bounds": bounds.expand(2, 4, 30, 3)[:, :, 30 - rows :]}
    check_backend(backend, random_call(batch=2, seqlen_q=rows, seqlen_k=30, **terms))


@pytest.mark.parametrize("mask", [torch.rand(2, 1, 30, 30) > 0.4, torch.randn(1, 4, 30, 30)], ids=["bool", "bias"])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_bounds_and_the_terms_they_do_not_replace(backend, bounds, mask):
    """plain = 0: mask and padding count as well."""
    bounds = torch.cat([bounds[..., :2], torch.zeros_like(bounds[..., :1])], dim=-1)
    terms = {"key_bounds": bounds, "attn_mask": mask, "key_padding": HOLES}
    check_backend(backend, random_call(batch=2, seqlen_q=30, **terms))


def test_a_mask_is_not_read_where_every_row_is_plain(backend):
    """A mask that breaks the promise shows that nobody looks."""
    bounds = key_bounds(0, ROW + 1)
    wrong = random_call(seqlen_q=30, key_bounds=bounds, attn_mask=torch.zeros(1, 1, 30, 30, dtype=torch.bool))
    assert torch.equal(backend.run(wrong), backend.run(wrong._replace(attn_mask=None)))


@pytest.mark.parametrize("rows", [30, 1], ids=["prefill", "decode"])
def test_what_lies_outside_of_the_bounds_is_not_read(backend, rows):
    """Each sequence and each KV head has its own unwritten slots."""
    bounds = key_bounds(SEQUENCE + HEAD // 2, 12 + 5 * SEQUENCE + HEAD // 2).expand(2, 4, rows, 3)
    call = random_call(batch=2, seqlen_q=rows, seqlen_k=30, key_bounds=bounds)
    first, stop = -bounds[:, ::2, :1, 0], bounds[:, ::2, :1, 1]
    dead = ((first > ROW) | (stop <= ROW))[..., None]
    check_backend(backend, call._replace(k=call.k.masked_fill(dead, torch.nan), v=call.v.masked_fill(dead, torch.nan)))


SINKS = {
    "moderate": torch.linspace(-2, 2, 4),
    "bfloat16": torch.linspace(-2, 2, 4).bfloat16(),
    "large": torch.linspace(50, 3000, 4),
    "small": torch.linspace(-3000, -50, 4),
    "-inf": torch.full((4,), -torch.inf),
}

SLOPES = {
    "per head": torch.tensor([0.5, 0.25, 0.125, 0.0]),
    "per sequence": torch.tensor([[0.5, 0.25, 0.125, 1.0], [0.0, 2.0, -0.5, 0.1]]),
}

NEW_TERMS = {
    **{f"sinks {name}": {"sinks": sinks} for name, sinks in SINKS.items()},
    **{f"slopes {name}": {"alibi_slopes": slopes} for name, slopes in SLOPES.items()},
    "lse": {},
    "both, capped": {"sinks": SINKS["moderate"], "alibi_slopes": SLOPES["per sequence"], "softcap": 2.0},
}

TILED = "cpu.tiled"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [30, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("terms", NEW_TERMS.values(), ids=NEW_TERMS)
def test_sinks_slopes_and_lse(terms, band, rows, dtype):
    call = random_call(batch=2, seqlen_q=rows, seqlen_k=30, dtype=dtype, lse=True, **band, **terms)
    check_backend(dispatch.load_backend(TILED), call)


def test_float64():
    call = random_call(batch=2, seqlen_q=30, dtype=torch.float64, lse=True, window_right=0, **NEW_TERMS["both, capped"])
    check_backend(dispatch.load_backend(TILED), call)


def test_many_tiles_of_every_term():
    """Rows and keys of several tiles; rows that see nothing among them."""
    row = torch.arange(300)
    call = random_call(
        *(1, 2, 1, 300, 2100, 8),
        key_bounds=key_bounds(row * 3, torch.where(row % 7 == 0, 0, row * 7 + 5), 0),
        attn_mask=torch.randn(1, 2, 300, 2100),
        sinks=torch.tensor([1.0, -1.0]),
        alibi_slopes=torch.tensor([0.01, 0.002]),
        q_offset=1000,
        lse=True,
    )
    check_backend(dispatch.load_backend(TILED), call)


def test_a_sink_takes_its_share():
    """Four equal scores and a sink of the same: each key weighs a fifth."""
    call = random_call(seqlen_q=1, seqlen_k=4, sinks=torch.zeros(4), lse=True)
    call = call._replace(q=torch.zeros_like(call.q))
    o = check_backend(dispatch.load_backend(TILED), call)
    torch.testing.assert_close(o, call.v.repeat_interleave(2, dim=1).sum(dim=2, keepdim=True) / 5)
    torch.testing.assert_close(call.lse, torch.full_like(call.lse, 5.0).log())
