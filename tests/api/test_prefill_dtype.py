"""The option prefill_dtype, from every way in to the call that a backend gets, and what is said where it is not met."""

import logging

import pytest
import torch

import attnpatch
from attnpatch import dispatch
from attnpatch.attention_call import bottom_right_offset
from attnpatch.kernels.common import support
from attnpatch.options import from_compile
from attnpatch.testing.inputs import key_bounds, packed, random_call
from tests.api.ways_in import QKV, WAYS_IN, Attention, patched


@pytest.fixture
def calls(monkeypatch):
    """Every call that is dispatched."""
    seen, run = [], dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda call, names: seen.append(call) or run(call, names))
    return seen


@pytest.fixture
def on_hopper(monkeypatch):
    """Triton's prefills are asked as on a GPU of capability 9.0, and another backend runs what they take."""
    load, run = dispatch.load_backend, dispatch.load_backend("cpu.tiled").run
    names = [name for name in dispatch.BACKEND_MODULES if name.startswith("triton.prefill")]
    found = {name: load(name)._replace(devices=("cpu",), run=run) for name in names}
    monkeypatch.setattr(dispatch, "load_backend", lambda name: found.get(name) or load(name)._replace(devices=()))
    monkeypatch.setattr(support, "capability", lambda device: (9, 0))
    monkeypatch.setattr(support, "_plans", {})
    dispatch._warn.cache_clear()


@pytest.mark.parametrize("way_in", WAYS_IN)
@pytest.mark.parametrize("options", [{}, {"prefill_dtype": None}, {"prefill_dtype": "fp8"}], ids=str)
def test_the_option_reaches_the_call(way_in, options, calls):
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(way_in(**options)(*QKV), Attention()(*QKV))
    assert [call.prefill_dtype for call in calls] == [options.get("prefill_dtype")]


@pytest.mark.parametrize("value", ["int8", "", False, torch.float8_e4m3fn], ids=str)
def test_it_is_none_or_fp8(value):
    with pytest.raises(ValueError, match=f"prefill_dtype={value!r} is none of None, 'fp8'"):
        attnpatch.patch(Attention(), prefill_dtype=value)


def test_the_operator_says_so_too():
    with pytest.raises(ValueError, match="prefill_dtype='fp4' is none of None, 'fp8'"):
        attnpatch.attention(*QKV, 1.0, prefill_dtype="fp4")


def test_it_is_no_option_of_inductor():
    options = from_compile(None, {"prefill_dtype": "fp8"})
    assert (options.prefill_dtype, options.rest, dict(options.inductor)) == ("fp8", "eager", {})


def test_where_there_is_no_kernel_the_report_and_the_log_say_so(caplog):
    """Once, for all shapes."""
    dispatch._warn.cache_clear()
    model = patched(prefill_dtype="fp8")
    with caplog.at_level(logging.WARNING, "attnpatch"), torch.no_grad():
        model(*QKV)
        model(*random_call(2, 2, 2, 6, 6, 8)[:3])
    (found,) = attnpatch.report(model).sites[0].dispatches
    sentence = "triton.prefill_fp8: runs on cuda, not cpu"
    assert (found.backend, found.reason) == ("cpu.sdpa", sentence)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"prefill_dtype='fp8', but prefills run in float32: {sentence}"]


def half_call(**case):
    return random_call(**{"dtype": torch.float16, "window_right": 0, "prefill_dtype": "fp8", **case})


CALL = half_call()
MASK = torch.ones(1, 1, 64, 64, dtype=torch.bool)
PACKED = packed([half_call(seqlen_q=n) for n in (100, 200)])
REFUSED = {
    "float32": (half_call(dtype=torch.float32), "float32 is multiplied exactly"),
    "width": (half_call(head_dim=80), "head_dim 80 by 80 is none of 64, 128, 256"),
    "widths": (half_call(head_dim=128, head_dim_v=64), "head_dim 128 by 64 is none of"),
    "additive mask": (half_call(attn_mask=MASK.half()), "an attn_mask, here torch.float16, is streamed by"),
    "packed": (PACKED, "2 sequences are packed, and triton.prefill_fp8 reads no cu_seqlens_q"),
}


@pytest.mark.parametrize(("call", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(on_hopper, call, sentence):
    """The model's dtype runs, and the reason says why, first of all."""
    backend, chosen = dispatch.choose(call)
    assert backend.name in ("triton.prefill_hopper", "triton.prefill")
    assert chosen.reason.startswith(f"triton.prefill_fp8: {sentence}")


TAKEN = {
    "causal": CALL,
    "mask": half_call(attn_mask=MASK),
    "padding": half_call(key_padding=MASK[0, 0, :1]),
    "padding and bounds": half_call(key_padding=MASK[0, 0, :1], key_bounds=key_bounds(0, 64).expand(1, 4, 64, 3)),
}


@pytest.mark.parametrize("call", TAKEN.values(), ids=TAKEN)
def test_it_is_taken_where_it_is_asked_for(on_hopper, call):
    assert dispatch.choose(call)[1] == ("prefill", "triton.prefill_fp8", "asked for by prefill_dtype='fp8'")


def test_it_is_never_taken_unasked(on_hopper):
    call = CALL._replace(prefill_dtype=None)
    assert dispatch.choose(call)[1] == ("prefill", "triton.prefill_hopper", "first choice")
    with pytest.raises(attnpatch.NoBackend, match="runs only prefills of which prefill_dtype='fp8' allows that"):
        dispatch.choose(call, ["triton.prefill_fp8"])


def test_backends_that_do_not_name_it(on_hopper):
    chosen = dispatch.choose(CALL, ["triton.prefill_hopper"])[1]
    assert chosen == ("prefill", "triton.prefill_hopper", "triton.prefill_fp8: backends= does not name it")
    assert dispatch.choose(CALL, ["triton.prefill_fp8"])[1].backend == "triton.prefill_fp8"


def test_backends_that_name_it_later(on_hopper, caplog):
    sentence = "triton.prefill_fp8: backends= names triton.prefill_hopper before it"
    with caplog.at_level(logging.WARNING, "attnpatch"):
        dispatch.run(CALL, ["triton.prefill_hopper", "triton.prefill_fp8"])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f"prefill_dtype='fp8', but prefills run in float16: {sentence}"


@pytest.mark.parametrize("padded", [0, 5])
def test_a_batch_of_a_model_with_its_attention_mask(on_hopper, padded, calls):
    """It brings padding and bounds, even where every token is real, and its prefill runs in 8 bits."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    model = transformers.LlamaForCausalLM(config).half().eval()
    real = torch.ones(2, 12, dtype=torch.long)
    real[1, :padded] = 0
    with torch.no_grad(), attnpatch.patched(model, prefill_dtype="fp8"):
        model(input_ids=torch.ones_like(real), attention_mask=real)
        found = {(d.phase, d.backend) for site in attnpatch.report(model).sites for d in site.dispatches}
    assert found == {("prefill", "triton.prefill_fp8")}
    assert [call.key_padding is not None and call.key_bounds is not None for call in calls] == [True, True]


STEPS = {
    "decode": half_call(seqlen_q=1, seqlen_k=64, q_offset=63),
    "append": half_call(seqlen_q=8, seqlen_k=64, q_offset=56),
}


@pytest.mark.parametrize("call", STEPS.values(), ids=STEPS)
def test_steps_are_no_prefills(on_hopper, call):
    assert not call.asks_for_fp8
    assert "fp8" not in dispatch.choose(call)[1].reason


def test_packed_steps_are_no_prefills():
    call = packed([half_call(seqlen_q=1, seqlen_k=n, q_offset=n - 1) for n in (100, 200)])
    assert PACKED.asks_for_fp8
    assert not call.asks_for_fp8
    assert torch.equal(call.q_offset, bottom_right_offset(call.cu_seqlens_q, call.cu_seqlens_k.diff()))


def test_gradients_are_those_of_the_attention_itself():
    q, k, v = (x.clone().requires_grad_() for x in QKV)
    o = attnpatch.attention(q, k, v, 1.0, prefill_dtype="fp8")
    expected = torch.autograd.grad(attnpatch.attention(q, k, v, 1.0).sum(), (q, k, v))
    for found, grad in zip(torch.autograd.grad(o.sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(found, grad)
