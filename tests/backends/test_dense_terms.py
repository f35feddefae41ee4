"""Pages, quantised K and V, packed sequences: kernels/dense.py beside loops in Python, and cpu.tiled on all of them."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnpatch import dispatch
from attnpatch.attention_call import QUANTISED
from attnpatch.kernels.dense import dense, sequences
from attnpatch.kernels.reference import attention_lse_reference, attention_reference
from attnpatch.testing.inputs import check_backend, key_bounds, packed, paged, quantised, random_call
from attnpatch.testing.samples import check_samples, relative_error

TILED = dispatch.load_backend("cpu.tiled")
H, HKV, D, DV = 4, 2, 8, 5
SIZES = {"num_heads": H, "num_kv_heads": HKV, "head_dim": D, "head_dim_v": DV, "lse": True}
PAGE_SIZES = (1, 3, 16)
PER = ("token", "head")

RANDOM = settings(
    max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def row_of(x, scale, call, b, h, j):
    """Key or value j of sequence b and head h, by the words of AttentionCall."""
    if call.block_table is not None:
        page = int(call.block_table[b, j // call.page_size])
        b, j = min(max(page, 0), len(x) - 1), j % call.page_size
    elif call.cu_seqlens_k is not None:
        b, j = 0, int(call.cu_seqlens_k[b]) + j
    return x[b, h, j].double() * (1.0 if scale is None else scale[b, h, j].double())


def rows_of(x, scale, call, b):
    """K or V of sequence b in float64, ``[1, num_kv_heads, its keys, width]``."""
    length = call.seqlen_k if call.cu_seqlens_k is None else int(call.cu_seqlens_k[b + 1] - call.cu_seqlens_k[b])
    rows = torch.zeros(1, HKV, length, x.shape[3], dtype=torch.float64)
    for h in range(HKV):
        for j in range(length):
            rows[0, h, j] = row_of(x, scale, call, b, h, j)
    return rows


def alone(call, b):
    """Sequence b as a plain call in float64."""
    rows = (b, slice(None), slice(None))
    if call.cu_seqlens_q is not None:
        rows = (0, slice(None), slice(int(call.cu_seqlens_q[b]), int(call.cu_seqlens_q[b + 1])))
    offset, slopes = call.q_offset, call.alibi_slopes
    masks = {n: getattr(call, n) for n in ("attn_mask", "key_padding", "key_bounds")}
    return call._replace(
        q=call.q[rows].double()[None],
        k=rows_of(call.k, call.k_scale, call, b),
        v=rows_of(call.v, call.v_scale, call, b),
        q_offset=int(offset[b]) if isinstance(offset, torch.Tensor) and offset.dim() else offset,
        alibi_slopes=slopes[b] if slopes is not None and slopes.dim() == 2 else slopes,
        **{n: None if x is None else x[b][None] for n, x in masks.items()},
        **dict.fromkeys(("block_table", "k_scale", "v_scale", "cu_seqlens_q", "cu_seqlens_k", "lse")),
    )


def by_loops(call):
    """Output and lse of sequence after sequence in float64; zeros and -inf in the rows of none."""
    outputs, lses = zip(*(attention_lse_reference(alone(call, b)) for b in range(call.batch)), strict=True)
    if call.cu_seqlens_q is None:
        return torch.cat(outputs), torch.cat(lses)
    o, lse = torch.cat(outputs, dim=2), torch.cat(lses, dim=2)
    spare = (0, call.seqlen_q - lse.shape[2])
    return torch.nn.functional.pad(o, (0, 0, *spare)), torch.nn.functional.pad(lse, spare, value=-torch.inf)


def check(call):
    """cpu.tiled and the reference beside the loops, in float64, where hardly anything may differ."""
    o64, lse64 = by_loops(call)
    torch.testing.assert_close(attention_reference(call), o64)
    torch.testing.assert_close(TILED.run(call), o64)
    torch.testing.assert_close(call.lse, lse64.float())


@st.composite
def stored(draw, call):
    """The call with K and V quantised or not, in pages or not, in one order or the other."""
    dtype, per = draw(st.sampled_from((None, *QUANTISED))), draw(st.sampled_from(PER))
    page_size, seed = draw(st.sampled_from((None, *PAGE_SIZES))), draw(st.integers(0, 9))
    which, pages_first = draw(st.sampled_from(("both", "k", "v"))), draw(st.booleans())
    call = paged(call, page_size, seed=seed) if page_size and pages_first else call
    if dtype is not None:
        plain, call = call, quantised(call, dtype, per)
        call = call._replace(v=plain.v, v_scale=None) if which == "k" else call
        call = call._replace(k=plain.k, k_scale=None) if which == "v" else call
    return paged(call, page_size, seed=seed) if page_size and not pages_first else call


@st.composite
def head_terms(draw, batch):
    """Terms that every kind of call takes."""
    slopes = torch.linspace(0, 1, batch * H).view(batch, H)
    return {
        "dtype": torch.float64,
        "seed": draw(st.integers(0, 99)),
        "window_left": draw(st.sampled_from((None, None, 0, 3))),
        "softcap": draw(st.sampled_from((None, 1.5))),
        "sinks": draw(st.sampled_from((None, torch.linspace(-2, 3, H)))),
        "alibi_slopes": draw(st.sampled_from((None, slopes[0], slopes))),
    }


@st.composite
def batches(draw):
    """A batch with terms of every kind."""
    batch, seqlen_q, seqlen_k = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 20))
    offset = draw(st.sampled_from((seqlen_k - seqlen_q, 0, torch.arange(batch) * 2)))
    length = draw(st.integers(0, seqlen_k))
    masks = {
        "none": {},
        "padding": {"key_padding": torch.arange(seqlen_k).expand(batch, seqlen_k) < length},
        "bounds": {"key_bounds": key_bounds(length // 2, length + 3)},
        "bool": {"attn_mask": (torch.arange(batch * seqlen_q * seqlen_k) % 3 != 0).view(batch, 1, seqlen_q, seqlen_k)},
        "bias": {"attn_mask": torch.linspace(-2, 2, H * seqlen_q * seqlen_k).view(1, H, seqlen_q, seqlen_k)},
    }
    terms = {**draw(head_terms(batch)), **masks[draw(st.sampled_from(sorted(masks)))], "q_offset": offset}
    terms["window_right"] = draw(st.sampled_from((None, 0, 1)))
    return random_call(batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **SIZES, **terms)


@RANDOM
@given(data=st.data())
def test_any_batch(data):
    check(data.draw(batches().flatmap(stored)))


@st.composite
def rows(draw):
    """Packed sequences, empty ones among them, that end at their last key."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=4))
    return row(lengths, draw(st.sampled_from((0, 3))), **draw(head_terms(len(lengths))))


def row(lengths, spare, seed=0, alibi_slopes=None, **terms):
    """Packed sequences of these numbers of rows and keys, causal; slopes of their own where there are some for each."""
    calls = []
    for i, (seqlen_q, seqlen_k) in enumerate(lengths):
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[i : i + 1]
        terms.update(window_right=0, q_offset=seqlen_k - seqlen_q, seed=seed + i, alibi_slopes=slopes)
        calls.append(random_call(1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **SIZES, **terms))
    return packed(calls, spare)


@RANDOM
@given(data=st.data())
def test_any_packed_sequences(data):
    check(data.draw(rows().flatmap(stored)))


@RANDOM
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4), seqlen_k=st.integers(0, 9), seed=st.integers(0, 9))
def test_packed_rows_on_a_batch_of_keys(lengths, seqlen_k, seed):
    """No band: every row sees all keys of its sequence."""
    calls = [random_call(1, seqlen_q=n, seqlen_k=seqlen_k, seed=seed + i, **SIZES) for i, n in enumerate(lengths)]
    call = packed([x._replace(q=x.q.double(), k=x.k.double(), v=x.v.double()) for x in calls])
    check(call)
    k, v = (x.unflatten(2, (call.batch, seqlen_k))[0].transpose(0, 1) for x in (call.k, call.v))
    o, lse = TILED.run(call), call.lse.clone()
    check(call._replace(k=k, v=v, cu_seqlens_k=None))
    torch.testing.assert_close(TILED.run(call._replace(k=k, v=v, cu_seqlens_k=None)), o)
    torch.testing.assert_close(call.lse, lse)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LENGTHS = ((3, 5), (0, 4), (70, 90), (0, 0), (2, 0), (1, 33))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("quantisation", [None, *QUANTISED], ids=str)
@pytest.mark.parametrize("per", PER)
def test_dtypes(dtype, page_size, quantisation, per):
    """As right as the same written out in q's dtype; NaN in what is hidden, in outputs and in spare rows."""
    decode = random_call(
        2, seqlen_q=1, seqlen_k=77, dtype=dtype, window_right=0, q_offset=torch.tensor([76, 40]), **SIZES
    )
    for call in (decode, row(LENGTHS, 4, dtype=dtype)):
        call = paged(call, page_size)
        o = check_backend(TILED, call if quantisation is None else quantised(call, quantisation, per))
        assert o.dtype == dtype


def test_rows_of_no_sequence():
    """The padding of a bucket: zeros and -inf, whatever lies there."""
    call = row(LENGTHS, 4)
    assert call.q[:, :, -4:].isnan().all()
    o = check_backend(TILED, call)
    assert (o[:, :, -4:] == 0).all()
    assert (call.lse[:, :, -4:] == -torch.inf).all()
    assert (call.lse[:, :, :3] > -torch.inf).all()


def test_sequences_that_share_pages():
    """A common prefix lies in the pool once."""
    call = paged(random_call(2, seqlen_q=2, seqlen_k=12, dtype=torch.float64, **SIZES), 4)
    table = call.block_table.clone()
    table[1, :2] = table[0, :2]
    check(call._replace(block_table=table))


@pytest.mark.parametrize("strided", ["pool", "table", "scale"])
def test_strides(strided):
    call = quantised(paged(random_call(2, seqlen_q=2, seqlen_k=12, dtype=torch.float64, **SIZES), 4), torch.int8)
    changed = {
        "pool": {n: getattr(call, n).transpose(1, 2).contiguous().transpose(1, 2) for n in "kv"},
        "table": {"block_table": torch.stack([call.block_table.long()] * 2, dim=-1)[..., 0]},
        "scale": {n: getattr(call, n).permute(2, 0, 1).contiguous().permute(1, 2, 0) for n in ("k_scale", "v_scale")},
    }[strided]
    assert all(getattr(call, name).stride() != x.stride() for name, x in changed.items())
    check(call._replace(**changed))


PLAIN = random_call(2, seqlen_q=3, seqlen_k=12, dtype=torch.float64, window_right=0, q_offset=9, **SIZES)
STORED = quantised(paged(PLAIN, 4), torch.int8)
WRONG = {
    "another page": (STORED, lambda x: {"block_table": x.block_table.roll(1, dims=1)}),
    "another sequence's pages": (STORED, lambda x: {"block_table": x.block_table.flip(0)}),
    "scale of k": (STORED, lambda x: {"k_scale": x.k_scale * 1.01}),
    "scale of v": (STORED, lambda x: {"v_scale": x.v_scale.roll(1, dims=1)}),
    "rows of q": (row(((3, 5), (3, 5)), 0), lambda x: {"cu_seqlens_q": x.cu_seqlens_q - torch.tensor([0, 1, 0]).int()}),
    "rows of k": (row(((3, 5), (3, 5)), 0), lambda x: {"cu_seqlens_k": x.cu_seqlens_k - torch.tensor([0, 1, 0]).int()}),
}


@pytest.mark.parametrize(("call", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_shows(call, change):
    """The checks of this file can fail."""
    o = check_backend(TILED, call)
    assert not torch.allclose(o, TILED.run(call._replace(**change(call))), rtol=1e-3)


def test_what_the_inputs_poison():
    """Spare pages, what fills the last page up, pages behind what a sequence sees; and its entries of the table."""
    call = random_call(2, seqlen_q=1, seqlen_k=30, window_right=0, q_offset=torch.tensor([29, 7]), **SIZES)
    stored = paged(call, 4)
    assert stored.seqlen_k == 32
    assert stored.k.isnan().all(dim=3).all(dim=1).sum() == 4 * 19 - 38  # 16 pages and 3, of which 30 + 8 keys are real
    behind = stored.block_table[1, 2:]
    assert (behind == -1).any()
    assert (behind >= len(stored.k)).any()
    assert ((behind >= 0) & (behind < len(stored.k))).any()
    assert (quantised(stored, torch.int8).k == 127).all(dim=3).all(dim=1).sum() == 38
    assert (quantised(stored, torch.float8_e5m2).k_scale.isnan()).all(dim=1).sum() == 38


def test_packed_keys_that_no_band_hides_fill_no_page():
    call = packed([random_call(1, seqlen_q=2, seqlen_k=n, **SIZES) for n in (4, 7)])
    with pytest.raises(ValueError, match=r"lengths \[4, 7\] fill no pages of 4, and the band hides none"):
        paged(call, 4)


def test_dense_keeps_q_s_dtype_or_takes_one():
    call = quantised(random_call(dtype=torch.bfloat16), torch.int8)
    assert (dense(call).k.dtype, dense(call, torch.float64).v.dtype) == (torch.bfloat16, torch.float64)
    exact = call.v.double() * call.v_scale.double()[..., None]
    assert torch.equal(dense(call, torch.float64).v, exact)


def test_sequences_are_views():
    """Nothing of a plain call is copied; q and lse of packed sequences lie where they lay."""
    call = row(LENGTHS, 4)
    for place, part in sequences(call):
        assert part.q.untyped_storage().data_ptr() == call.q.untyped_storage().data_ptr()
        part.lse.fill_(place[2].start)
    starts = [start for start, (rows, _) in zip((0, 3, 3, 73, 73, 75), LENGTHS, strict=True) for _ in range(rows)]
    assert call.lse[0, 1].tolist() == [*starts, *[-torch.inf] * 4]


@pytest.mark.parametrize("call", [paged(PLAIN, 4), STORED, row(LENGTHS, 4), paged(row(LENGTHS, 4), 16)])
def test_samples(call):
    """Right outputs pass, one wrong row of one head does not."""
    o = TILED.run(call)
    check_samples(o, call)
    assert relative_error(o, call) < 1e-5
    o[:, 0, 0] += 0.1
    with pytest.raises(AssertionError, match="against float64 is above the allowed"):
        check_samples(o, call)


@pytest.mark.parametrize("storage", ["dense", "pages", "int8"])
def test_batch_invariance(storage):
    """To the bit what the sequence gives alone, whatever runs beside it: tiles begin at a window's own first key."""
    offsets = torch.tensor([2990, 1700, 40, 2100])
    call = random_call(4, seqlen_q=3, seqlen_k=3000, window_left=1500, window_right=0, q_offset=offsets, **SIZES)
    call = call if storage == "dense" else paged(call, 16)
    call = quantised(call, torch.int8) if storage == "int8" else call
    together, mixed = (TILED.run(call._replace(batch_invariant=x)) for x in (True, False))
    singles = torch.cat([TILED.run(part._replace(lse=part.lse.clone())) for _, part in sequences(call)])
    assert torch.equal(together, singles)
    assert not torch.equal(mixed, singles)
