"""key_bounds, sinks, slopes and the lse in triton.prefill and triton.decode, in the interpreter, against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch.dispatch import load_backend
from attnpatch.kernels.decode.launch import decode
from attnpatch.kernels.reference import hidden_keys
from attnpatch.testing.inputs import check_backend, key_bounds, random_call

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero):RuntimeWarning")  # numpy's, not a kernel's

KEYS = 140
ROW = torch.arange(KEYS)
HEAD = torch.arange(2)[:, None]
SEQUENCE = torch.arange(2)[:, None, None]


def split_in(num_splits):
    return load_backend("triton.decode")._replace(run=lambda call: decode(call, num_splits))


RUNS = {
    "prefill": (load_backend("triton.prefill"), 70),
    "decode, 3 splits": (split_in(3), 1),
}


@pytest.fixture(params=RUNS.values(), ids=RUNS)
def kernel(request):
    return request.param


def call_for(rows, **terms):
    """The last ``rows`` of a square of KEYS rows, whose masks and bounds ``terms`` describe; always with an lse."""
    for name, width in (("key_bounds", 3), ("attn_mask", KEYS)):
        if name in terms:
            terms[name] = terms[name].expand(2, 2, KEYS, width)[:, :, KEYS - rows :]
    terms.setdefault("q_offset", KEYS - rows)
    return random_call(2, 2, 1, rows, KEYS, 16, dtype=torch.float16, lse=True, **terms)


def check(kernel, **terms):
    backend, rows = kernel
    return check_backend(backend, call_for(rows, **terms))


def bool_mask(*shape, keep=0.7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < keep


def bias(*shape, hide=0.0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return values.masked_fill(~bool_mask(*shape, keep=1 - hide), -math.inf)


def poisoned(call, dead):
    """NaN in the keys and values that bool ``dead`` ``[batch, num_kv_heads or 1, seqlen_k]`` marks."""
    return call._replace(
        k=call.k.masked_fill(dead[..., None], math.nan), v=call.v.masked_fill(dead[..., None], math.nan)
    )


THIRDS = ROW // 50 * 50

BOUNDS = {
    "all": key_bounds(0, KEYS),
    "beyond both ends": key_bounds(-70, 3 * KEYS),
    "documents": key_bounds(THIRDS, THIRDS + 50),
    "causal": key_bounds(0, ROW + 1),
    "a window": key_bounds(ROW - 30, ROW + 1),
    "a prefix, then causal": key_bounds(0, torch.where(ROW < 100, 100, ROW + 1)),
    "per sequence": key_bounds(SEQUENCE * 66, 100 + 30 * SEQUENCE),
    "per head": key_bounds(HEAD * 20, ROW - HEAD),
    "one block": key_bounds(64, 128),
    "rows that see nothing": key_bounds(torch.where(ROW % 3 == 0, KEYS, 2), torch.where(ROW % 3 == 0, 0, 90)),
    "the last rows see nothing": key_bounds(torch.where(ROW > 100, KEYS, 2), torch.where(ROW > 100, 0, 90)),
    "nothing": key_bounds(KEYS, 0),
    "left of the keys": key_bounds(-90, -70),
    "right of the keys": key_bounds(KEYS + 70, KEYS + 90),
    "an empty stretch": key_bounds(99, 9),
}


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_bounds(kernel, bounds):
    check(kernel, key_bounds=bounds)


@pytest.mark.parametrize("left", [None, 40], ids=["causal", "window"])
@pytest.mark.parametrize("bounds", ["documents", "per head", "rows that see nothing", "right of the keys"])
def test_bounds_and_a_band(kernel, bounds, left):
    check(kernel, key_bounds=BOUNDS[bounds], window_left=left, window_right=0)


MASKS = {
    "bool": {"attn_mask": bool_mask(2, 1, KEYS, KEYS)},
    "bias": {"attn_mask": bias(1, 2, KEYS, KEYS, hide=0.2)},
    "padding": {"key_padding": bool_mask(2, KEYS)},
    "all": {"attn_mask": bias(1, 2, KEYS, KEYS), "key_padding": bool_mask(2, KEYS), "softcap": 3.0, "window_right": 0},
}


def with_plainness(bounds, plain):
    bounds, plain = torch.broadcast_tensors(bounds, torch.as_tensor(plain)[..., None])
    return torch.cat([bounds[..., :2], plain[..., :1]], dim=-1).int()


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("bounds", ["per head", "rows that see nothing"])
def test_bounds_and_what_they_do_not_replace(kernel, bounds, masks):
    """plain = 0: mask and padding count as well."""
    check(kernel, key_bounds=with_plainness(BOUNDS[bounds], 0), **masks)


@pytest.mark.parametrize("holes", [slice(0, 1), slice(75, 80), slice(139, 140)], ids=["first", "middle", "last"])
def test_a_row_that_is_not_plain_among_plain_ones(kernel, holes):
    plain = torch.ones(KEYS, dtype=torch.int32)
    plain[holes] = 0
    mask = torch.ones(1, 1, KEYS, KEYS, dtype=torch.bool)
    mask[:, :, holes] = bool_mask(1, 1, 1, KEYS)
    check(kernel, key_bounds=with_plainness(BOUNDS["causal"], plain), attn_mask=mask)


@pytest.mark.parametrize("wrong", ["bool", "bias", "padding"])
def test_where_rows_are_plain_no_mask_is_read(kernel, wrong):
    """A mask that breaks the promise shows that nobody looks."""
    backend, rows = kernel
    call = call_for(rows, key_bounds=BOUNDS["documents"], **MASKS[wrong])
    assert torch.equal(backend.run(call), backend.run(call._replace(attn_mask=None, key_padding=None)))


def test_what_lies_outside_of_the_bounds_does_not_count(kernel):
    """Each sequence has its own unwritten slots; one head sees less than its group."""
    backend, rows = kernel
    first, stop = 30 * SEQUENCE, 80 + 45 * SEQUENCE
    call = call_for(rows, key_bounds=key_bounds(first + HEAD * 9, stop - HEAD))
    check_backend(backend, poisoned(call, ((first > ROW) | (stop <= ROW))[:, 0, None]))


LATE = ROW >= 120

UNSEEN = {
    "between two stretches": {"key_bounds": key_bounds(torch.where(LATE, 80, 0), torch.where(LATE, 130, 50))},
    "left of a window": {"key_bounds": key_bounds(torch.where(LATE, 10, 70), KEYS), "window_left": 60},
    "right of the diagonal": {"key_bounds": key_bounds(0, torch.where(LATE, 50, KEYS)), "window_right": 0},
    "beside a row that sees nothing": {"key_bounds": key_bounds(torch.where(LATE, 30, 60), torch.where(LATE, 30, 99))},
}


@pytest.mark.parametrize("terms", UNSEEN.values(), ids=UNSEEN)
def test_what_no_row_of_a_tile_sees_does_not_count(terms):
    """The ends of the tile's stretches do not tell."""
    call = call_for(64, **terms)
    dead = hidden_keys(call).all(dim=2).all(dim=1, keepdim=True)
    assert dead.any()
    check_backend(load_backend("triton.prefill"), poisoned(call, dead))


def test_what_a_bias_hides_does_not_count(kernel):
    """Rows of a tile that do not exist read no bias, and must not pass for rows that see a key."""
    backend, rows = kernel
    call = call_for(rows, attn_mask=torch.zeros(1, 1, KEYS, KEYS).masked_fill(ROW % 5 == 2, -math.inf))
    check_backend(backend, poisoned(call, (ROW % 5 == 2)[None, None]))


SINKS = {
    "moderate": torch.linspace(-2, 2, 2),
    "bfloat16": torch.linspace(-2, 2, 2).bfloat16(),
    "float64, every second": torch.linspace(-2, 2, 4, dtype=torch.float64)[::2],
    "large": torch.linspace(5, 300, 2),
    "small": torch.linspace(-3000, -50, 2),
    "-inf": torch.full((2,), -math.inf),
}

SLOPES = {
    "per head": torch.tensor([0.5, 0.0]),
    "per sequence": torch.tensor([[0.5, 1.0], [-0.05, 0.1]]),
}

NEW_TERMS = {
    **{f"sinks, {name}": {"sinks": sinks} for name, sinks in SINKS.items()},
    **{f"slopes, {name}": {"alibi_slopes": slopes} for name, slopes in SLOPES.items()},
    "lse": {},
    "both, capped": {"sinks": SINKS["moderate"], "alibi_slopes": SLOPES["per sequence"], "softcap": 2.0},
}

BANDS = {
    "full": {},
    "window": {"window_left": 20, "window_right": 0},
    "rows without keys": {"window_right": 0, "q_offset": -50},
    "offset per sequence": {"window_right": 0, "q_offset": torch.tensor([60, 20])},
    "bounds": {"key_bounds": BOUNDS["rows that see nothing"]},
}


@pytest.mark.parametrize("terms", NEW_TERMS.values(), ids=NEW_TERMS)
def test_sinks_slopes_and_lse(kernel, terms):
    check(kernel, window_right=0, **terms)


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_sinks_and_slopes_in_a_band(kernel, band):
    check(kernel, **NEW_TERMS["both, capped"], **band)


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kernel", [*RUNS.values(), (split_in(1), 1)], ids=[*RUNS, "decode"])
def test_every_term_at_once(kernel, masks):
    """A step that is not split too: it differs in what happens to the sums at the end."""
    bounds = with_plainness(BOUNDS["documents"], 0)
    check(kernel, key_bounds=bounds, sinks=SINKS["moderate"], alibi_slopes=SLOPES["per sequence"], **masks)


def test_no_keys(kernel):
    backend, rows = kernel
    call = random_call(1, 2, 1, rows, 0, lse=True, sinks=SINKS["moderate"], key_bounds=key_bounds(0, 0))
    assert not check_backend(backend, call).any()


@st.composite
def calls(draw):
    batch, num_kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows, keys = draw(st.sampled_from([1, 40, 80])), draw(st.integers(1, 150))
    num_heads = num_kv_heads * group
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    shape = tuple(draw(st.sampled_from([1, n])) for n in (batch, num_heads, rows))
    first, length = (torch.randint(0, keys + 10, shape, generator=generator) for _ in range(2))
    terms = {
        "key_bounds": key_bounds(first - 5, first + length, 0),
        "window_right": draw(st.none() | st.integers(0, 50)),
        "q_offset": draw(st.integers(-20, 100)),
        "key_padding": draw(st.none() | st.just(bool_mask(batch, keys))),
        "sinks": draw(st.none() | st.just(torch.randn(num_heads, generator=generator))),
        "alibi_slopes": draw(st.none() | st.just(torch.rand(batch, num_heads, generator=generator))),
    }
    return random_call(batch, num_heads, num_kv_heads, rows, keys, 16, dtype=torch.float16, lse=True, **terms)


@settings(max_examples=8, deadline=None)
@given(call=calls())
def test_any_call(call):
    check_backend(load_backend("triton.prefill"), call)
    if call.seqlen_q == 1:
        check_backend(split_in(3), call)
