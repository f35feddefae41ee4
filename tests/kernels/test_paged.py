"""triton.paged in the interpreter: keys in pages of a pool, unused ones full of NaN, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpatch.dispatch import load_backend
from attnpatch.testing.inputs import key_bounds, paged, random_call
from tests.kernels.calls import bias, bool_mask, check, poison

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero):RuntimeWarning")  # numpy's, not a kernel's

KEYS = 130
OFFSETS = torch.tensor([120, 17])


def dense(**case):
    sizes = {"batch": 2, "num_heads": 3, "num_kv_heads": 1, "seqlen_q": 1, "seqlen_k": KEYS, "head_dim": 16}
    terms = {"q_offset": OFFSETS, "window_right": 0, "lse": True, "dtype": torch.float16}
    return random_call(**{**sizes, **terms, **case})


@pytest.mark.parametrize(("rows", "num_splits"), [(1, 0), (1, 3), (7, 1)])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 200])
def test_pages(chip, page_size, rows, num_splits):
    """Of hidden blocks some have no page: -1, or an id beyond the pool."""
    chip(7)
    call = paged(dense(seqlen_q=rows), page_size)
    assert page_size > 64 or not call.block_table.ge(0).logical_and(call.block_table < call.k.shape[0]).all()
    check(call, num_splits)


def test_pages_that_fit():
    check(paged(dense(seqlen_k=128, q_offset=127), 64), 2)


@pytest.mark.parametrize("rows", [65, 80])
def test_more_rows_than_an_append(rows):
    """No other kernel of Triton follows a table."""
    check(paged(dense(batch=1, num_heads=1, seqlen_q=rows, q_offset=40), 16))


TERMS = {
    "no band": {"window_right": None, "q_offset": 0},
    "a number": {"q_offset": 70},
    "one for all": {"q_offset": torch.tensor(70)},
    "rows that see nothing": {"q_offset": torch.tensor([-2, 128])},
    "a window": {"window_left": 40},
    "a window within a page": {"window_left": 2},
    "past the keys": {"q_offset": 150, "window_left": 60},
    "padding": {"key_padding": bool_mask(2, KEYS)},
    "bool mask": {"attn_mask": bool_mask(2, 1, 1, KEYS)},
    "bias": {"attn_mask": bias(1, 3, 1, KEYS, hide=0.3)},
    "bounds": {"key_bounds": key_bounds(torch.arange(3)[:, None] * 20, 99)},
    "bounds and padding": {"key_bounds": key_bounds(5, 120, 0), "key_padding": bool_mask(2, KEYS)},
    "sinks, slopes, softcap": {"sinks": torch.zeros(3), "alibi_slopes": torch.linspace(0, 1, 3), "softcap": 3.0},
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms(terms):
    check(paged(dense(seqlen_q=3, **terms), 16), 2)


def test_what_attn_mask_hides_has_pages():
    """A mask alone does not keep a kernel from reading: NaN there must not count."""
    mask = torch.arange(KEYS) < torch.tensor([[100], [20]])
    call = paged(poison(dense(q_offset=0, window_right=None, attn_mask=mask[:, None, None]), ~mask), 16)
    check(call, 2)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_poison_beside_the_last_key(page_size):
    """The rest of a sequence's last page is read with it."""
    dead = torch.arange(KEYS) > OFFSETS[:, None]
    check(paged(poison(dense(), dead), page_size), 2)


def layouts(call):
    k, v = call.k, call.v
    both, by_token = torch.stack([k, v], dim=1), torch.stack([k, v]).transpose(2, 3).contiguous().transpose(2, 3)
    yield "pages of K and V in turn", call._replace(k=both[:, 0], v=both[:, 1])
    yield "[pages, page_size, heads, head_dim]", call._replace(k=by_token[0], v=by_token[1])
    yield "transposed", call._replace(k=k.transpose(2, 3).contiguous().transpose(2, 3))
    yield "sliced", call._replace(k=torch.cat([k[..., :1], k], dim=3)[..., 1:])
    yield "int64 ids", call._replace(block_table=call.block_table.long())
    yield "table by columns", call._replace(block_table=call.block_table.t().contiguous().t())
    yield "every second id", call._replace(block_table=call.block_table.repeat_interleave(2, dim=1)[:, ::2])


@pytest.mark.parametrize("page_size", [1, 16])
def test_layouts(page_size):
    call = paged(dense(num_heads=4, num_kv_heads=2), page_size)
    o = check(call, 2)
    for name, other in layouts(call):
        assert torch.equal(check(other, 2), o), name


def test_ids():
    """Shared and repeated pages; ids far outside where nothing is visible."""
    call = paged(dense(window_right=None), 16)
    table = call.block_table[:1].expand(2, -1)
    check(call._replace(block_table=table), 2)
    table = table.clone()
    table[:, 3] = table[:, 5]
    check(call._replace(block_table=table), 2)
    hidden = torch.arange(table.shape[1]) * 16 > OFFSETS[:, None]
    for nowhere in (-1, -(2**31), 2**31 - 1, call.k.shape[0]):
        check(call._replace(block_table=table.masked_fill(hidden, nowhere), window_right=0), 2)


def test_pages_are_read_where_the_table_says():
    """Another page in the place of one is another result, of its own sequence alone."""
    call = paged(dense(), 16)
    table = call.block_table.clone()
    table[0, 0] = table[1, 0]
    before, after = check(call), check(call._replace(block_table=table))
    assert not torch.allclose(before[0], after[0], atol=1e-2)
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 40), (80, 16)])
def test_head_dims(head_dim, head_dim_v):
    check(paged(dense(head_dim=head_dim, head_dim_v=head_dim_v), 16), 2)


def test_float32():
    check(paged(dense(dtype=torch.float32, head_dim=64, seqlen_q=3), 16), 2)


REFUSALS = {
    "triton.decode": "K lies in pages",
    "triton.append": "K lies in pages",
    "triton.prefill": "K and V lie in pages of 16, and triton.prefill follows no block_table",
}


@pytest.mark.parametrize(("name", "sentence"), REFUSALS.items(), ids=REFUSALS)
def test_refused_elsewhere(name, sentence):
    assert load_backend(name).refuses(paged(dense(seqlen_q=2), 16)) == sentence


def test_refuses_what_lies_in_no_page():
    assert load_backend("triton.paged").refuses(dense()) == "K does not lie in pages"


@st.composite
def calls(draw):
    batch, keys, rows = draw(st.integers(1, 3)), draw(st.integers(1, 200)), draw(st.sampled_from([1, 1, 2, 5]))
    offset = st.integers(-rows - 1, keys + 2)
    terms = {
        "q_offset": draw(offset | st.lists(offset, min_size=batch, max_size=batch).map(torch.tensor)),
        "window_left": draw(st.none() | st.integers(0, 100)),
        "window_right": draw(st.none() | st.just(0)),
        "key_padding": draw(st.none() | st.just(bool_mask(batch, keys))),
        "attn_mask": draw(st.none() | st.just(bool_mask(1, 1, rows, keys))),
        "batch_invariant": draw(st.booleans()),
    }
    call = dense(batch=batch, num_heads=draw(st.integers(1, 4)), seqlen_q=rows, seqlen_k=keys, **terms)
    return paged(call, draw(st.sampled_from([1, 2, 3, 16, 48, 64])), seed=draw(st.integers(0, 9))), draw(
        st.integers(0, 7)
    )


@settings(max_examples=6, deadline=None)
@given(case=calls())
def test_any_call(case):
    check(*case)
