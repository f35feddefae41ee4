"""PagedCache through models as they are: the tokens of a DynamicCache, pages that come and go, errors that say why."""

import copy
import subprocess
import sys

import pytest
import torch
from transformers.cache_utils import DynamicCache

import attnpatch
from attnpatch.caches.paged import PagedCache
from attnpatch.caches.pages import OutOfPages


def logits(model, ids, cache=None):
    with torch.no_grad():
        return model(torch.tensor(ids), past_key_values=cache, use_cache=cache is not None).logits[:, -1]


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_generate(model_with, run, mode, attn_implementation, page_size):
    model = model_with(attn_implementation=attn_implementation)
    expected = run(model, DynamicCache(config=model.config), **mode)
    cache = PagedCache(model.config, num_pages=160, page_size=page_size)
    assert torch.equal(run(model, cache, **mode), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    cache.reset()
    assert (cache.free_pages, cache.get_seq_length()) == (160, 0)


def test_assisted_decoding(model_with, run):
    """The assistant proposes what the model mostly refuses: every step crops."""
    model, assistant = model_with(), model_with(num_hidden_layers=1, hidden_size=32)
    options = {"batch": 1, "assistant_model": assistant, "max_new_tokens": 10}
    cache = PagedCache(model.config, num_pages=16, page_size=4)
    assert torch.equal(run(model, cache, **options), run(model, DynamicCache(config=model.config), **options))


def test_a_chat_goes_on_in_the_kept_cache(model, run):
    caches = PagedCache(model.config, num_pages=16, page_size=4), DynamicCache(config=model.config)
    turns = []
    for cache in caches:
        first = run(model, cache)
        ids = torch.cat([first, torch.full((2, 3), 7)], dim=1)
        turns.append(model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False))
    assert torch.equal(*turns)


def test_a_window_is_left_to_the_mask(model_with, run):
    model = model_with("Mistral", sliding_window=6)
    options = {"length": 4, "pads": 1, "max_new_tokens": 9}
    cache = PagedCache(model.config, num_pages=16, page_size=4)
    assert torch.equal(run(model, cache, **options), run(model, DynamicCache(config=model.config), **options))
    assert cache.get_seq_length() == 12, "the layers keep what their window has passed"


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_without_an_attention_mask(model_with, attn_implementation):
    """transformers then builds no mask for one new token: what is returned must be the stored keys and no more."""
    model = model_with(attn_implementation=attn_implementation)
    cache = PagedCache(model.config, num_pages=8, page_size=4)
    logits(model, [[3, 4, 5, 6, 7]], cache)
    torch.testing.assert_close(logits(model, [[8]], cache), logits(model, [[3, 4, 5, 6, 7, 8]]))


def test_pages_of_others_are_not_read(model, run):
    cache = PagedCache(model.config, num_pages=16, page_size=4)
    for layer in cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    assert torch.equal(run(model, cache), run(model, DynamicCache(config=model.config)))
    used = sorted({page for row in cache.sequences.table.rows for page in row})
    assert len(used) == 2 * 4
    assert cache.layers[1].keys.isnan().all(-1).all(1).sum() == 16 * 4 - 2 * 14, "14 tokens of 2 sequences are written"


def test_forks_share_a_prefix_and_go_their_ways(model):
    prefix, ways = [3, 4, 5, 6, 7, 8], [[9, 10, 11], [12], [13, 14, 15, 16, 17]]
    trunk = PagedCache(model.config, num_pages=12, page_size=4)
    logits(model, [prefix], trunk)
    forks = [trunk.fork() for _ in ways]
    assert trunk.free_pages == 10, "a fork takes no page before it writes"
    for fork, way in zip(forks, ways, strict=True):
        for i, token in enumerate(way):
            torch.testing.assert_close(logits(model, [[token]], fork), logits(model, [prefix + way[: i + 1]]))
    assert trunk.free_pages == 10 - (2 + 1 + 2)
    torch.testing.assert_close(logits(model, [[20]], trunk), logits(model, [[*prefix, 20]]))
    del forks, fork
    assert trunk.free_pages == 10


def test_an_empty_fork_begins_a_batch_of_its_own(model):
    cache = PagedCache(model.config, num_pages=12, page_size=4)
    logits(model, [[3, 4, 5]], cache)
    other = cache.fork(rows=())
    torch.testing.assert_close(logits(model, [[8, 9], [6, 7]], other), logits(model, [[8, 9], [6, 7]]))
    assert (cache.get_seq_length(), other.get_seq_length(), other.free_pages) == (3, 2, 9)


CHANGES = {
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "ids": lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 0])),
    "bools": lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "crop off": lambda cache: cache.crop(-3),
    "crop off a tensor": lambda cache: cache.crop(torch.tensor(-3)),
    "crop to": lambda cache: cache.crop(4 if isinstance(cache, PagedCache) else -3),
    "crop nothing": lambda cache: cache.crop(0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_the_batch(model, change):
    caches = PagedCache(model.config, num_pages=16, page_size=4), DynamicCache(config=model.config)
    after = []
    for cache in caches:
        logits(model, [[3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16]], cache)
        change(cache)
        batch = cache.layers[0].keys.shape[0] if isinstance(cache, DynamicCache) else cache.batch_size
        after.append(logits(model, [[20 + i] for i in range(batch)], cache))
    torch.testing.assert_close(*after)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


def test_full_pool_changes_nothing(model):
    cache = PagedCache(model.config, num_pages=2, page_size=4)
    logits(model, [[3, 4, 5, 6, 7]], cache)
    with pytest.raises(OutOfPages, match=r"need 1 pages of 4 tokens; 0 of 2 are free"):
        logits(model, [[8, 9, 10, 11]], cache)
    assert cache.get_seq_length() == 5
    torch.testing.assert_close(logits(model, [[8]], cache), logits(model, [[3, 4, 5, 6, 7, 8]]))


def test_eviction(model):
    asked, others = [], []

    def evict(cache, missing):
        asked.append((cache, missing))
        return bool(others) and others.pop().reset() is None

    cache = PagedCache(model.config, num_pages=4, page_size=4, on_full=evict)
    others += [cache.fork(rows=()), cache.fork(rows=())]
    for other in others:
        logits(model, [[3, 4]], other)
    torch.testing.assert_close(logits(model, [list(range(3, 19))], cache), logits(model, [list(range(3, 19))]))
    assert asked == [(cache, 2), (cache, 1)]
    with pytest.raises(OutOfPages):
        logits(model, [[20]], cache)
    assert asked[2:] == [(cache, 1)]


def test_a_hook_that_frees_nothing_is_not_asked_forever(model):
    asked = []
    cache = PagedCache(model.config, num_pages=1, page_size=4, on_full=lambda cache, n: asked.append(n) or True)
    with pytest.raises(OutOfPages, match="need 2 pages"):
        logits(model, [[3, 4, 5, 6, 7]], cache)
    assert asked == [1]


def test_a_forward_that_failed_is_done_again(model):
    cache = PagedCache(model.config, num_pages=8, page_size=4)
    logits(model, [[3, 4, 5]], cache)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, [[6, 7]], cache)
    handle.remove()
    assert cache.get_seq_length() == 3
    torch.testing.assert_close(logits(model, [[8]], cache), logits(model, [[3, 4, 5, 8]]))


def test_modes_of_autograd_mix(model):
    cache = PagedCache(model.config, num_pages=8, page_size=4)
    with torch.inference_mode():
        model(torch.tensor([[3, 4, 5]]), past_key_values=cache)
    logits(model, [[6, 7]], cache)
    got = model(torch.tensor([[8]]), past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(got, logits(model, [[3, 4, 5, 6, 7, 8]]))
    assert not any(x.requires_grad for layer in cache.layers for x in (layer.keys, layer.values))


@pytest.mark.parametrize("patched", [False, True])
def test_gradients_reach_the_tokens_of_the_forward(model, patched):
    """Not those stored before, which are constants: the prefix is stored without a gradient for both."""

    def gradients(cache):
        model.zero_grad()
        with torch.no_grad():
            model(torch.tensor([[3, 4, 5]]), past_key_values=cache)
        model(torch.tensor([[8, 9]]), past_key_values=cache).logits.square().mean().backward()
        return [x.grad.clone() for x in model.parameters()]

    expected = gradients(DynamicCache(config=model.config))
    if patched:
        attnpatch.patch(model)
    got = gradients(PagedCache(model.config, num_pages=8, page_size=4))
    torch.testing.assert_close(got, expected)


def test_a_deepcopy_is_another_cache(model):
    cache = PagedCache(model.config, num_pages=8, page_size=4)
    logits(model, [[3, 4, 5]], cache)
    other = copy.deepcopy(cache)
    logits(model, [[9, 9]], cache)
    torch.testing.assert_close(logits(model, [[6]], other), logits(model, [[3, 4, 5, 6]]))
    del other
    assert cache.free_pages == 6


def test_another_batch_is_refused(model):
    cache = PagedCache(model.config, num_pages=8, page_size=4)
    logits(model, [[3, 4, 5]], cache)
    with pytest.raises(ValueError, match="holds 3 tokens of 1 sequences and was given 2"):
        logits(model, [[6], [7]], cache)


def test_another_dtype_is_refused(model):
    cache = PagedCache(model.config, num_pages=8, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"caches 2 heads of 16, torch.float32 on cpu; .* 2 heads of 16, torch.bfloat16"
    ):
        logits(model, [[3]], cache)


def test_the_config_gives_the_dtype(model_with):
    model = model_with(dtype="bfloat16")
    assert PagedCache(model.config, num_pages=2).layers[0].keys.dtype == torch.bfloat16


def test_heads_of_models_without_groups(model_with, run):
    model = model_with("GPTNeoX", num_key_value_heads=None)
    cache = PagedCache(model.config, num_pages=16)
    assert cache.layers[0].keys.shape == (16, 4, 16, 16)
    assert torch.equal(run(model, cache), run(model, DynamicCache(config=model.config)))


def test_models_that_do_not_fit():
    from transformers import MllamaConfig, Qwen3NextConfig, T5Config

    with pytest.raises(ValueError, match=r"qwen3_next.* has linear_attention"):
        PagedCache(Qwen3NextConfig(num_hidden_layers=4), num_pages=2)
    with pytest.raises(ValueError, match="t5 has an encoder"):
        PagedCache(T5Config(), num_pages=2)
    with pytest.raises(ValueError, match="mllama_text_model has cross-attention"):
        PagedCache(MllamaConfig(), num_pages=2)


def test_import_needs_neither_transformers_nor_triton():
    lines = [
        "import sys; sys.modules.update(transformers=None, triton=None)",
        "import attnpatch, attnpatch.caches.pages",
        "from attnpatch import *",
        "try: attnpatch.PagedCache",
        "except ImportError as error: print(error)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert "transformers" in done.stdout
    assert attnpatch.PagedCache is PagedCache
    with pytest.raises(AttributeError, match="no attribute 'PagedCash'"):
        attnpatch.PagedCash  # noqa: B018


def test_the_config_of_a_saved_model(model, tmp_path):
    """transformers turns its dtype into a word."""
    model.config.dtype = "float64"
    assert PagedCache(model.config, num_pages=4).layers[0].keys.dtype == torch.float64
