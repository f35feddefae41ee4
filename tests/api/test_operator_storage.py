"""The operator's arguments for pages, quantised K and V and packed sequences: checks, fakes, what they record."""

import pytest
import torch

import attnpatch
from attnpatch import dispatch, ops
from attnpatch.attention_call import AttentionCall, bottom_right_offset
from attnpatch.ops import make_call
from attnpatch.testing.inputs import key_bounds, packed, paged, quantised, random_call

B, H, HKV, Q, K, D, DV = 2, 4, 2, 3, 9, 8, 5
PAGES, PAGE = 8, 4


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def ints(*values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


def dense(**changes):
    return {"q": zeros(B, H, Q, D), "k": zeros(B, HKV, K, D), "v": zeros(B, HKV, K, DV), "sm_scale": 0.3, **changes}


def pages(**changes):
    pools = {
        "k": zeros(PAGES, HKV, PAGE, D),
        "v": zeros(PAGES, HKV, PAGE, DV),
        "block_table": ints([1, 2, 3], [0, 4, 5]),
    }
    return {**dense(), **pools, **changes}


def in_int8(**changes):
    return dense(k=zeros(B, HKV, K, D, dtype=torch.int8), **{"k_scale": torch.ones(B, HKV, K), **changes})


def row(**changes):
    rows = {"q": zeros(1, H, 7, D), "k": zeros(1, HKV, 11, D), "v": zeros(1, HKV, 11, DV)}
    return {**dense(), **rows, "cu_seqlens_q": ints(0, 3, 7), "cu_seqlens_k": ints(0, 5, 11), **changes}


def row_on_batch(**changes):
    return row(**{"k": zeros(B, HKV, K, D), "v": zeros(B, HKV, K, DV), "cu_seqlens_k": None, **changes})


META = {"device": "meta"}

BAD = {
    "table_dtype": (pages(block_table=zeros(B, 3)), r"must be int32 or int64 .*; got torch.float32 \(2, 3\)"),
    "table_rank": (pages(block_table=ints(0, 1)), r"\[batch, num_blocks\] on cpu; got torch.int32 \(2,\) on cpu"),
    "table_device": (pages(block_table=ints([0], [1], **META)), "block_table must be .* on cpu; got .* on meta"),
    "table_batch": (pages(block_table=ints([0, 1])), "must share the batch size; got 2, 1 and 1"),
    "pool_sizes": (pages(v=zeros(PAGES + 1, HKV, PAGE, DV)), "k and v must have as many pages; got 8 and 9"),
    "page_sizes": (pages(v=zeros(PAGES, HKV, PAGE + 1, DV)), "k and v must have the same length; got 4 and 5"),
    "no_pages": (pages(k=zeros(0, HKV, PAGE, D), v=zeros(0, HKV, PAGE, DV)), r"none 0; got \(0, 2, 4, 8\)"),
    "empty_pages": (pages(k=zeros(PAGES, HKV, 0, D), v=zeros(PAGES, HKV, 0, DV)), r"none 0; got \(8, 2, 0, 8\)"),
    "padding_of_pages": (pages(key_padding=zeros(B, PAGE).bool()), r"key_padding \(2, 4\) is not .* = \(2, 12\)"),
    "mask_of_pages": (pages(attn_mask=zeros(Q, PAGE)), r"does not broadcast to .*seqlen_k\] = \(2, 4, 3, 12\)"),
    "scale_missing": (in_int8(k_scale=None), "k_scale is missing for k in torch.int8: it belongs to k in int8 or "),
    "scale_of_v": (in_int8(v=zeros(B, HKV, K, DV, dtype=torch.float8_e5m2)), "v_scale is missing for v in torch.float"),
    "scale_idle": (dense(k_scale=torch.ones(B, HKV, K)), "k_scale is given, but k is torch.float32: it belongs to"),
    "scale_dtype": (in_int8(k_scale=zeros(B, HKV, K).half()), "k_scale must be float32; got torch.float16"),
    "scale_shape": (in_int8(k_scale=zeros(B, HKV, Q)), r"k_scale \(2, 2, 3\) does not broadcast to .* = \(2, 2, 9\)"),
    "scale_rank": (in_int8(k_scale=zeros(B, HKV, K, D)), r"k_scale \(2, 2, 9, 8\) does not broadcast"),
    "scale_device": (in_int8(k_scale=torch.ones(B, HKV, K, **META)), "k_scale is on meta, q on cpu"),
    "other_dtype": (dense(k=zeros(B, HKV, K, D).half()), r"one float dtype; .*\(k and v may be int8 or float8_e4m3fn"),
    "other_integers": (dense(k=zeros(B, HKV, K, D).to(torch.int16)), "share one float dtype; got .* torch.int16"),
    "codes_too_wide": (dense(k=zeros(B, HKV, K, D).to(torch.uint8)), r"got 8 and 16 \(8 bytes of codes, two channels"),
    "quantised_q": (in_int8(q=zeros(B, H, Q, D).to(torch.float8_e5m2)), "share one float dtype; got torch.float8_e5m2"),
    "only_k_packed": (row(cu_seqlens_q=None), "cu_seqlens_k is given without cu_seqlens_q: pack q too"),
    "packed_in_pages": (row(block_table=ints([0], [0])), "cu_seqlens_k and block_table are both given"),
    "cu_dtype": (row(cu_seqlens_q=ints(0, 3, 7).long()), r"cu_seqlens_q must be int32 .*; got torch.int64"),
    "cu_rank": (row(cu_seqlens_k=ints([0, 11])), r"cu_seqlens_k must be int32 \[batch \+ 1\] on cpu; got .* \(1, 2\)"),
    "cu_empty": (row(cu_seqlens_q=ints()), r"cu_seqlens_q must be int32 \[batch \+ 1\] on cpu; got torch.int32 \(0,\)"),
    "cu_device": (row(cu_seqlens_q=ints(0, 7, **META)), "cu_seqlens_q must be .* on cpu; got .* on meta"),
    "cu_lengths": (row(cu_seqlens_k=ints(0, 11)), "must share the batch size; got 2, 1 and 1"),
    "q_not_packed": (row(q=zeros(B, H, Q, D)), r"q must be \[1, heads, total, head_dim\] with cu_seqlens_q; got \(2,"),
    "k_not_packed": (row(k=zeros(B, HKV, 11, D)), "k must be .* with cu_seqlens_k; got"),
    "v_not_packed": (row(v=zeros(B, HKV, 11, DV)), "v must be .* with cu_seqlens_k; got"),
    "k_of_another_batch": (row_on_batch(cu_seqlens_q=ints(0, 2, 4, 7)), "must share the batch size; got 3, 2 and 2"),
    "packed_mask": (row(attn_mask=zeros(7, 11)), "attn_mask is given beside cu_seqlens_q, which takes causal and"),
    "packed_padding": (row(key_padding=zeros(B, 11).bool()), "key_padding is given beside cu_seqlens_q"),
    "packed_bounds": (row(key_bounds=zeros(7, 3).int()), "key_bounds is given beside cu_seqlens_q"),
    "packed_offset": (row(q_offset_tensor=ints(1, 2, 3)), r"q_offset_tensor must be .* \[batch=2\]"),
    "packed_slopes": (row(alibi_slopes=zeros(1, H)), r"alibi_slopes must be .* \[batch=2, num_heads\]"),
}  # fmt: skip


@pytest.mark.parametrize("operator", [ops.attention, ops.attention_lse])
@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(arguments, message, operator):
    with pytest.raises((ValueError, RuntimeError), match=message):
        operator(**arguments)


@pytest.mark.parametrize("name", [name for name in BAD if "device" not in name])
def test_the_fake_makes_the_same_checks(name):
    arguments, message = BAD[name]
    arguments = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    with pytest.raises((ValueError, RuntimeError), match=message.replace("on cpu", "on meta")):
        attnpatch.attention(**arguments)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_strided_sequence_ends(name):
    """Which kernels would read as if they lay side by side."""
    strided = ints(0, 99, 3, 99, 7)[::2] if name == "cu_seqlens_q" else ints(0, 99, 5, 99, 11)[::2]
    with pytest.raises(ValueError, match=rf"{name} must be contiguous; got stride 2: give it {name}\.contiguous\(\)"):
        attnpatch.attention(**row(**{name: strided}))


def arguments_of(call: AttentionCall):
    """The call as the operator's keywords."""
    fields = call._asdict()
    offset = fields.pop("q_offset")
    fields["q_offset_tensor" if isinstance(offset, torch.Tensor) else "q_offset"] = offset
    return {name: x for name, x in fields.items() if x is not None and name != "lse"}


PLAIN = random_call(B, H, HKV, Q, K, D, DV, window_right=0, q_offset=ints(K - Q, 2))
LENGTHS = ((3, 5), (0, 4), (4, 9), (0, 0), (2, 0))
PACKED = packed(
    [random_call(1, H, HKV, q, k, D, DV, window_right=0, q_offset=k - q, seed=q) for q, k in LENGTHS], spare=2
)
ON_BATCH = packed([random_call(1, H, HKV, q, K, D, DV, seed=q) for q in (3, 0, 4)])._replace(
    k=PLAIN.k[[0, 1, 0]], v=PLAIN.v[[0, 1, 0]], cu_seqlens_k=None
)

CALLS = {
    "pages": paged(PLAIN, PAGE),
    "pages of one key": paged(PLAIN, 1),
    "int64 table": paged(PLAIN, PAGE)._replace(block_table=paged(PLAIN, PAGE).block_table.long()),
    "int8": quantised(PLAIN, torch.int8),
    "fp8 per head": quantised(PLAIN, torch.float8_e4m3fn, "head"),
    "only v": quantised(PLAIN, torch.float8_e5m2)._replace(k=PLAIN.k, k_scale=None),
    "int8 pages": quantised(paged(PLAIN, PAGE), torch.int8),
    "packed": PACKED,
    "packed q": ON_BATCH,
    "packed, pages": paged(PACKED, PAGE),
    "packed, int8 pages": quantised(paged(PACKED, PAGE), torch.int8),
    "batch invariant": PLAIN._replace(batch_invariant=True),
}


@pytest.mark.parametrize("operator", ["attention", "attention_lse"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_opcheck(call, operator):
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    utils = (
        utils[1:] if "float8" in str(call.v.dtype) else utils
    )  # test_schema compares, which torch does not for those
    torch.library.opcheck(getattr(torch.ops.attnpatch, operator).default, (), arguments_of(call), test_utils=utils)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_fake_has_the_layout(call):
    arguments = arguments_of(call)
    y, lse = ops.attention_lse(**arguments)
    fakes = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    fake_y, fake_lse = ops.attention_lse(**fakes)
    assert (y.shape, y.stride(), y.dtype) == (fake_y.shape, fake_y.stride(), fake_y.dtype)
    assert (lse.shape, lse.stride(), lse.dtype) == (fake_lse.shape, fake_lse.stride(), fake_lse.dtype)
    assert y.transpose(1, 2).is_contiguous()
    assert y.dtype == call.q.dtype


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_is_written(call):
    arguments = arguments_of(call)
    before = {n: x.clone() for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    attnpatch.attention(**arguments)
    for name, x in before.items():
        torch.testing.assert_close(arguments[name].double(), x.double(), rtol=0, atol=0, equal_nan=True)


NO_BACKWARD = {
    "pages": "attention with block_table has no backward: run it under torch.no_grad",
    "int8": "attention with k_scale, v_scale has no backward",
    "only v": "attention with v_scale has no backward",
    "packed": "attention with cu_seqlens_q, cu_seqlens_k has no backward",
    "packed, int8 pages": "attention with block_table, k_scale, v_scale, cu_seqlens_q has no backward",
}


@pytest.mark.parametrize("operator", [ops.attention, ops.attention_lse])
@pytest.mark.parametrize(("name", "message"), NO_BACKWARD.items(), ids=NO_BACKWARD)
def test_no_backward(name, message, operator):
    """The forward runs where a gradient may be wanted; asking for it names what stands in its way."""
    call = CALLS[name]
    y = operator(**arguments_of(call._replace(q=call.q.clone().requires_grad_())))
    y = y if isinstance(y, torch.Tensor) else y[0]
    with pytest.raises(NotImplementedError, match=message):
        y.sum().backward()


def test_a_batch_invariant_call_has_a_backward():
    q = PLAIN.q.clone().requires_grad_()
    grads = [
        torch.autograd.grad(attnpatch.attention(**arguments_of(PLAIN._replace(q=q, batch_invariant=x))).sum(), q)[0]
        for x in (False, True)
    ]
    torch.testing.assert_close(*grads)


REFUSALS = {
    "pages": "K and V lie in pages of 4, and torch's scaled_dot_product_attention follows no block_table",
    "int8": "K is int8, and torch's scaled_dot_product_attention multiplies no scale in",
    "only v": "V is float8_e5m2, and torch's scaled_dot_product_attention multiplies no scale in",
    "packed": "5 sequences are packed, and torch's scaled_dot_product_attention reads no cu_seqlens_q",
    "batch invariant": "batch_invariant: torch's scaled_dot_product_attention chooses its blocks by the batch",
}


@pytest.mark.parametrize(("name", "message"), REFUSALS.items(), ids=REFUSALS)
def test_sdpa_refuses(name, message):
    with pytest.raises(attnpatch.NoBackend, match=f"cpu.sdpa: {message}"):
        attnpatch.attention(**arguments_of(CALLS[name]), backends="cpu.sdpa")
    assert dispatch.load_backend("sdpa.blocked").refuses(CALLS[name]) == message


@pytest.mark.parametrize("name", [name for name in REFUSALS if name != "batch invariant"])
def test_prefill_refuses(name):
    message = REFUSALS[name].replace("torch's scaled_dot_product_attention", "triton.prefill")
    assert dispatch.load_backend("triton.prefill").refuses(CALLS[name]) == message


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_sequences_compile_whole(call):
    arguments = arguments_of(call)
    compiled = torch.compile(lambda **a: attnpatch.attention(**a) + 1.0, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**arguments), attnpatch.attention(**arguments) + 1.0)


def test_what_a_call_says_of_itself():
    pages, sequences = CALLS["pages"], CALLS["packed, pages"]
    assert (pages.batch, pages.seqlen_q, pages.seqlen_k, pages.page_size, pages.phase) == (B, Q, 12, PAGE, "append")
    assert (sequences.batch, sequences.seqlen_q, sequences.seqlen_k, sequences.phase) == (5, 11, 12, "varlen")
    assert (PACKED.batch, PACKED.seqlen_k) == (5, 20)
    assert paged(PLAIN._replace(q=PLAIN.q[:, :, :1]), PAGE).phase == "decode"


def test_bottom_right():
    found = bottom_right_offset(PACKED.cu_seqlens_q, PACKED.cu_seqlens_k.diff())
    assert (found.tolist(), found.dtype) == ([k - q for q, k in LENGTHS], torch.int32)
    assert bottom_right_offset(PACKED.cu_seqlens_q, 9).tolist() == [9 - q for q, _ in LENGTHS]


def test_an_offset_of_one_element_is_that_of_every_sequence():
    """Kernels step through it by its stride."""
    assert make_call(**dense(q_offset_tensor=ints(4))).q_offset.stride() == (0,)


WRITTEN_OUT = {  # in float32, four bytes each; scores and probabilities are written and read
    "batch": (PLAIN, 4 * 4 * H * B * Q * K, 2 * 4 * H * B * K * (D + DV)),
    "pages": (CALLS["pages"], 4 * 4 * H * B * Q * 12, 2 * 4 * H * B * 12 * (D + DV)),
    "int8": (CALLS["int8"], 4 * 4 * H * B * Q * K, 2 * 4 * H * B * K * (D + DV)),
    "packed": (PACKED, 4 * 4 * H * 11 * 20 // 5, 2 * 4 * H * 20 * (D + DV)),
    "packed q": (ON_BATCH, 4 * 4 * H * 7 * K, 2 * 4 * H * 3 * K * (D + DV)),
    "packed, pages": (CALLS["packed, pages"], 4 * 4 * H * 11 * 12, 2 * 4 * H * 5 * 12 * (D + DV)),
}


@pytest.mark.parametrize(("call", "scores", "repeats"), WRITTEN_OUT.values(), ids=WRITTEN_OUT)
def test_traffic(call, scores, repeats):
    """Of what was computed: a pool's spare pages and a table's capacity are no keys of anybody."""
    assert dispatch.traffic_of(call) == (scores, repeats)


def test_bounds_and_padding_of_pages_count_keys():
    call = paged(random_call(B, H, HKV, 1, K, D), PAGE)
    given = arguments_of(call._replace(key_padding=None))
    by_padding = attnpatch.attention(**{**given, "key_padding": torch.arange(12).expand(B, 12) < K})
    by_bounds = attnpatch.attention(**{**given, "key_bounds": key_bounds(0, K)[None]})
    torch.testing.assert_close(by_padding, by_bounds)
