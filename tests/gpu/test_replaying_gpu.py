"""Decode steps replayed from CUDA graphs: the text, the counts and the memory."""

import gc

import pytest
import torch

import attnpatch
from attnpatch import BufferedCache
from attnpatch.caches.tbq4 import TBQ4Cache
from tests.gpu.test_generate_gpu import left_padded, tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 8},
    "beams": {"num_beams": 3},
    "chunked prefill": {"prefill_chunk_size": 16},
}


def generate(model, cache=None, length=37, batch=3, **options):
    torch.manual_seed(3)
    inputs = left_padded(length, batch)
    torch.manual_seed(4)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**inputs, past_key_values=cache, **options)


def steps(model, captured):
    return sum(d.calls for site in attnpatch.report(model).sites for d in site.dispatches if d.captured is captured)


@pytest.mark.parametrize("rest", ["eager", "inductor"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_tokens(rest, mode):
    model = tiny_llama(torch.float32)
    expected = [generate(model, **mode) for _ in range(2)]
    with attnpatch.patched(model, strict=True, rest=rest, cuda_graphs=True):
        found = [generate(model, BufferedCache(model), **mode) for _ in range(2)]
        replayed = steps(model, captured=True)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert replayed >= 3 * 2 * 20


class Quiet:
    """A processor of logits: an error where the host waits for the device between the eighth token and the twelfth."""

    def __init__(self):
        self.count = 0

    def __call__(self, input_ids, scores):
        self.count += 1
        if self.count in (8, 12):
            torch.cuda.set_sync_debug_mode("error" if self.count == 8 else "default")
        return scores


@pytest.fixture
def quiet():
    yield Quiet()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", [BufferedCache, TBQ4Cache])
def test_nothing_waits_between_tokens(kind, quiet):
    model = tiny_llama(torch.float32)
    with attnpatch.patched(model, strict=True, cuda_graphs=True):
        generate(model, kind(model), eos_token_id=3, logits_processor=[quiet])
    assert quiet.count >= 12


def test_text_that_ends_by_itself():
    """Sequences end at different lengths, and one token is computed too many."""
    model = tiny_llama(torch.float32)
    options = {"eos_token_id": generate(model, max_new_tokens=9)[:, -1].tolist(), "max_new_tokens": 24}
    expected = generate(model, **options)
    assert expected.shape[1] < 37 + 24
    with attnpatch.patched(model, strict=True, cuda_graphs=True):
        cache = BufferedCache(model)
        assert torch.equal(generate(model, cache, **options), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_prompt_lookup():
    model = tiny_llama(torch.float32)
    expected = generate(model, batch=1, prompt_lookup_num_tokens=3)
    with attnpatch.patched(model, strict=True, cuda_graphs=True):
        assert torch.equal(generate(model, BufferedCache(model), batch=1, prompt_lookup_num_tokens=3), expected)


def test_4_bits():
    model = tiny_llama(torch.float32)
    with attnpatch.patched(model, strict=True):
        expected = generate(model, TBQ4Cache(model))
    with attnpatch.patched(model, strict=True, cuda_graphs=True):
        assert torch.equal(generate(model, TBQ4Cache(model)), expected)
        assert steps(model, captured=True) == 3 * 21


def test_growth_and_another_batch():
    model = tiny_llama(torch.float32)
    cases = [{"length": 250, "max_new_tokens": 40}, {"batch": 2}, {"batch": 5}, {"batch": 3}]
    expected = [generate(model, **case) for case in cases]
    with attnpatch.patched(model, strict=True, cuda_graphs=True):
        for case, tokens in zip(cases, expected, strict=True):
            assert torch.equal(generate(model, BufferedCache(model), **case), tokens)


def test_the_next_call_is_replayed_from_its_first_step_on():
    model = tiny_llama(torch.float32)
    expected = generate(model)
    with attnpatch.patched(model, strict=True, cuda_graphs=True):
        for _ in range(3):
            assert torch.equal(generate(model), expected)
            gc.collect()
        run, replayed = steps(model, captured=False), steps(model, captured=True)
        assert torch.equal(generate(model), expected)
        assert steps(model, captured=False) == run + 3, "the prompt, in three layers"
        assert steps(model, captured=True) == replayed + 3 * 23


def test_unpatch_frees_the_graphs():
    model = tiny_llama(torch.bfloat16)

    def reserved():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def patch_and_generate():
        attnpatch.patch(model, cuda_graphs=True)
        generate(model, BufferedCache(model))

    patch_and_generate()  # cuBLAS keeps a workspace of 32 MiB for the stream that torch captures on
    attnpatch.unpatch(model)
    before = reserved()
    patch_and_generate()
    during = reserved()
    attnpatch.unpatch(model)
    assert during > before
    assert reserved() <= before
    assert steps(attnpatch.patch(model), captured=True) == 0
