"""TBQ4Cache through models as they are: the tokens of a dense cache of rounded keys, its bytes, what it refuses."""

import copy

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import DynamicCache

import attnpatch
from attnpatch import tbq4
from attnpatch.caches import layers
from attnpatch.caches.tbq4 import TBQ4Cache
from tests.caches.simulated import simulated_cache


def logits(model, ids, cache=None):
    with torch.no_grad():
        return model(torch.as_tensor(ids), past_key_values=cache, use_cache=cache is not None).logits[:, -1]


def ids_of(length, batch=1):
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_generate(model_with, run, mode, attn_implementation):
    model = model_with(attn_implementation=attn_implementation)
    expected = run(model, simulated_cache(model), **mode)
    cache = TBQ4Cache(model)
    assert torch.equal(run(model, cache, **mode), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_the_tokens_are_not_those_of_a_dense_cache(model, run):
    """Else the other tests would pass with a cache that rounds nothing."""
    options = {"max_new_tokens": 24}
    dense = run(model, DynamicCache(config=model.config), **options)
    assert not torch.equal(run(model, TBQ4Cache(model), **options), dense)


CHOICES = {
    "K alone": {"values": "dense"},
    "V alone": {"keys": "dense"},
    "int8 K": {"keys": "int8"},
    "not centred": {"centre_keys": False},
    "int8, not centred": {"keys": "int8", "centre_keys": False},
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_formats(model, choice):
    caches = TBQ4Cache(model, **choice), simulated_cache(model, **choice)
    for ids in (ids_of(9, 2), ids_of(1, 2), ids_of(70, 2), ids_of(3, 2)):
        got, expected = (logits(model, ids, cache) for cache in caches)
        torch.testing.assert_close(got, expected)
    assert (got - logits(model, torch.cat([ids_of(n, 2) for n in (9, 1, 70, 3)], 1))).abs().max() > 1e-4


@pytest.mark.parametrize("choice", [{"keys": "dense", "values": "dense"}, {"skip_layers": (0, 1)}], ids=str)
def test_dense_is_exact(model, run, choice):
    cache = TBQ4Cache(model, **choice)
    assert torch.equal(run(model, cache), run(model, DynamicCache(config=model.config)))
    assert cache.layers[1].key_buffer.dtype == cache.layers[1].value_buffer.dtype == torch.float32


@pytest.mark.parametrize(
    ("skip_layers", "dense"), [((0,), {0}), ((-1,), {2}), (("first", "last"), {0, 2}), ((1, -2), {1}), ((), set())]
)
def test_skip_layers(model_with, run, skip_layers, dense):
    model = model_with(num_hidden_layers=3)
    cache = TBQ4Cache(model, skip_layers=skip_layers)
    assert torch.equal(run(model, cache), run(model, simulated_cache(model, dense)))
    assert {i for i, layer in enumerate(cache.layers) if layer.key_buffer.dtype != torch.uint8} == dense


def test_what_is_stored_is_the_codec(model_with):
    """Codes and norms of the keys that the model made, at the place of their token, zeros behind them."""
    model = model_with(num_hidden_layers=1)
    cache, dense = TBQ4Cache(model, centre_keys=False), DynamicCache(config=model.config)
    logits(model, ids_of(7, 2), cache)
    logits(model, ids_of(7, 2), dense)
    (layer,), (expected,) = cache.layers, dense.layers
    for stored, states in (
        ((layer.key_buffer, layer.key_scale), expected.keys),
        ((layer.value_buffer, layer.value_scale), expected.values),
    ):
        for x, of_codec in zip(stored, tbq4.encode(states), strict=True):
            assert torch.equal(x[:, :, :7], of_codec)
            assert x.shape[2] == 256
            assert not x[:, :, 7:].any()


def test_long_chunks_attend_on_their_own_keys_as_they_were(model):
    """Of 65 tokens and more; on what was stored before they attend as it is stored."""
    past, ids = ids_of(5), ids_of(65)
    caches = TBQ4Cache(model), simulated_cache(model)
    for cache in caches:
        logits(model, past, cache)
    raw, expected = (logits(model, ids, cache) for cache in caches)
    torch.testing.assert_close(raw, expected)
    caches[0].crop(-65)
    logits(model, ids[:, :64], caches[0])
    assert not torch.allclose(logits(model, ids[:, 64:], caches[0]), raw, rtol=1e-4, atol=1e-5), "64 + 1 are appends"


@pytest.mark.parametrize("groups", [[1] * 12, [2, 10], [5, 3, 4]], ids=str)
def test_appends_do_not_depend_on_how_tokens_are_grouped(model, groups):
    ids, cache, whole = ids_of(12), TBQ4Cache(model), TBQ4Cache(model)
    for one in (cache, whole):
        logits(model, ids_of(6), one)
    expected = logits(model, ids, whole)
    for group in ids.split(groups, dim=1):
        got = logits(model, group, cache)
    torch.testing.assert_close(got, expected)
    for layer, other in zip(cache.layers, whole.layers, strict=True):
        assert (layer.key_buffer != other.key_buffer).float().mean() < 1e-3, (
            "codes at a boundary may differ by rounding"
        )


def test_assisted_decoding(model_with, run):
    """The assistant proposes what the model mostly refuses: every step crops."""
    model, assistant = model_with(), model_with(num_hidden_layers=1, hidden_size=32)
    options = {"batch": 1, "assistant_model": assistant, "max_new_tokens": 10}
    assert torch.equal(run(model, TBQ4Cache(model), **options), run(model, simulated_cache(model), **options))


def test_a_chat_goes_on_in_the_kept_cache(model, run):
    turns = []
    for cache in (TBQ4Cache(model), simulated_cache(model)):
        first = run(model, cache)
        ids = torch.cat([first, torch.full((2, 3), 7)], dim=1)
        turns.append(model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False))
    assert torch.equal(*turns)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_without_an_attention_mask(model_with, attn_implementation):
    """transformers then builds no mask for one new token: what is returned must be the stored keys and no more."""
    model = model_with(attn_implementation=attn_implementation)
    caches = TBQ4Cache(model), simulated_cache(model)
    for cache in caches:
        logits(model, [[3, 4, 5, 6, 7]], cache)
    torch.testing.assert_close(*(logits(model, [[8]], cache) for cache in caches))


CHANGES = {
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "ids": lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 0])),
    "bools": lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "crop off": lambda cache: cache.crop(-3),
    "crop off a tensor": lambda cache: cache.crop(torch.tensor(-3)),
    "crop to": lambda cache: cache.crop(4 if isinstance(cache, TBQ4Cache) else -3),
    "crop to more": lambda cache: cache.crop(40 if isinstance(cache, TBQ4Cache) else 0),
    "crop nothing": lambda cache: cache.crop(0),
}


@pytest.mark.parametrize("centre_keys", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_the_batch(model, change, centre_keys):
    caches = TBQ4Cache(model, centre_keys=centre_keys), simulated_cache(model, centre_keys=centre_keys)
    after = []
    for cache in caches:
        logits(model, [[3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16]], cache)
        change(cache)
        if not isinstance(cache, TBQ4Cache) and centre_keys:
            _move_centres(cache, change)
        batch = cache.batch_size if isinstance(cache, TBQ4Cache) else cache.layers[0].keys.shape[0]
        after.append(logits(model, [[20 + i] for i in range(batch)], cache))
    torch.testing.assert_close(*after)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


def _move_centres(cache, change):
    """The simulated layers know nothing of rows: their centres follow as a cache's keys do."""
    centres = DynamicCache()
    for i, layer in enumerate(cache.layers):
        centres.update(layer.centre.expand(-1, -1, 8, -1), layer.centre, i)
    change(centres)
    for layer, moved in zip(cache.layers, centres.layers, strict=True):
        layer.centre = moved.keys[:, :, :1]


def test_rows_that_stay_as_many_stay_where_they_are(model):
    """A recorded CUDA graph of a beam search keeps its addresses."""
    cache = TBQ4Cache(model)
    logits(model, ids_of(5, 2), cache)
    places = cache.layers[0].key_buffer.data_ptr(), cache.layers[0].value_scale.data_ptr()
    cache.reorder_cache(torch.tensor([1, 0]))
    assert (cache.layers[0].key_buffer.data_ptr(), cache.layers[0].value_scale.data_ptr()) == places


def test_crop_to_nothing_begins_anew(model):
    cache = TBQ4Cache(model)
    logits(model, ids_of(5, 2), cache)
    cache.crop(-5)
    torch.testing.assert_close(logits(model, ids_of(4, 3), cache), logits(model, ids_of(4, 3)))
    assert (cache.get_seq_length(), cache.batch_size) == (4, 3)


def test_reset(model):
    cache = TBQ4Cache(model)
    logits(model, ids_of(5, 2), cache)
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size, cache.num_bytes) == (0, -1, 0)
    torch.testing.assert_close(logits(model, ids_of(4), cache), logits(model, ids_of(4)))


def test_growth(model, monkeypatch):
    """From 16 to 48 tokens and on; what is stored moves along."""
    monkeypatch.setattr(layers, "FIRST_CAPACITY", 16)
    caches, capacities = (TBQ4Cache(model), simulated_cache(model)), []
    for length in (15, 1, 1, 3, 40):
        torch.testing.assert_close(*(logits(model, ids_of(length), cache) for cache in caches))
        capacities.append(caches[0].layers[1].value_buffer.shape[2])
    assert capacities == [16, 16, 48, 48, 96]


def test_norms_of_a_block_lie_side_by_side(model_with, run, monkeypatch):
    """Also after what gives a cache other tensors: kernels then load them without waiting."""
    monkeypatch.setattr(layers, "FIRST_CAPACITY", 16)
    model = model_with(head_dim=24)  # blocks of 16 and 8
    cache = TBQ4Cache(model)
    first = torch.tensor([0])
    for change in (lambda: None, lambda: cache.batch_repeat_interleave(3), lambda: cache.batch_select_indices(first)):
        logits(model, ids_of(7, abs(cache.batch_size)), cache)
        change()
        for norms in (cache.layers[1].key_scale, cache.layers[1].value_scale):
            assert norms.shape[3] == 2
            assert (norms.stride(2), norms.stride(3)) == (1, norms.shape[2])
    assert cache.layers[0].key_buffer.shape[2] == 48
    assert torch.equal(run(model, TBQ4Cache(model)), run(model, simulated_cache(model)))


def test_max_cache_len(model):
    cache = TBQ4Cache(model, max_cache_len=7)
    logits(model, ids_of(5), cache)
    assert (cache.layers[0].key_buffer.shape[2], cache.get_max_length()) == (7, 7)
    with pytest.raises(ValueError, match="holds 5 tokens and was given 3 more; max_cache_len is 7"):
        logits(model, ids_of(3), cache)
    assert cache.get_seq_length() == 5
    logits(model, ids_of(2), cache)
    assert cache.get_seq_length() == 7


def test_a_deepcopy_is_another_cache(model):
    cache = TBQ4Cache(model)
    logits(model, [[3, 4, 5]], cache)
    other = copy.deepcopy(cache)
    expected = logits(model, [[6]], copy.deepcopy(cache))
    logits(model, [[9, 9]], cache)
    assert torch.equal(logits(model, [[6]], other), expected)
    assert (cache.get_seq_length(), other.get_seq_length()) == (5, 4)


def test_save_and_load(model, tmp_path):
    cache = TBQ4Cache(model, keys="int8", skip_layers=("first",))
    logits(model, ids_of(5), cache)
    torch.save(cache, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
    assert torch.equal(logits(model, [[6]], loaded), logits(model, [[6]], cache))
    assert (loaded.get_seq_length(), loaded.num_bytes) == (6, cache.num_bytes)


def tensors_of(cache):
    return [x for layer in cache.layers for x in tree_leaves(vars(layer)) if isinstance(x, Tensor)]


def test_moves_between_devices(model_with):
    """meta stands for another device: what stays behind would still be on the CPU."""
    model = model_with("Gemma2", sliding_window=4, layer_types=["full_attention", "sliding_attention"])
    cache = TBQ4Cache(model, centre_keys=True)
    logits(model, ids_of(5), cache)
    assert cache.move_to("meta") is cache
    assert {x.device.type for x in tensors_of(cache)} == {"meta"}
    assert len(tensors_of(cache)) == 5 + 3
    assert (cache.layers[0].device.type, cache.layers[1].device.type) == ("meta", "meta")


def test_offload_and_prefetch(model):
    cache = TBQ4Cache(model)
    logits(model, ids_of(5), cache)
    expected = logits(model, [[6]], copy.deepcopy(cache))
    cache.layers[0].device = torch.device("meta")  # as if it had come from there
    cache.layers[0].offload()
    assert {x.device.type for x in tensors_of(cache)} == {"cpu"}
    assert torch.equal(logits(model, [[6]], copy.deepcopy(cache)), expected)
    cache.layers[0].prefetch()
    assert {x.device.type for _, x in cache.layers[0]._tensors()} == {"meta"}


PUBLISHED = {
    "hidden_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 24, "num_key_value_heads": 4,
    "head_dim": 256, "dtype": "bfloat16",
}  # fmt: skip


def bytes_of(length, **choice):
    from transformers import LlamaConfig

    cache = TBQ4Cache(LlamaConfig(**PUBLISHED), max_cache_len=length, **choice)
    cache.early_initialization(1, 4, 256, torch.bfloat16, torch.device("meta"))
    return cache.num_bytes


def test_bytes_of_a_long_cache():
    """65,536 bytes per token in bfloat16; in 4 bits 128 bytes of codes and two norms per head, of K and of V."""
    assert bytes_of(262_144, keys="dense", values="dense") == 262_144 * 65_536
    assert round(bytes_of(262_144, keys="dense", values="dense") / 1e9, 2) == 17.18
    centres = 16 * 4 * 256 * 2  # of K, one per layer and head
    assert bytes_of(262_144) == 262_144 * 16 * 4 * 2 * (128 + 2 * 2) + centres
    assert round(bytes_of(262_144) / 1e9, 2) == 4.43
    assert bytes_of(1024, keys="int8") == 1024 * 16 * 4 * ((256 + 4) + (128 + 2 * 2)) + centres


def test_layers_with_a_window_stay_dense_and_bounded(model_with, run):
    model = model_with("Gemma2", sliding_window=4, layer_types=["full_attention", "sliding_attention"])
    cache = TBQ4Cache(model)
    options = {"length": 7, "pads": 2, "max_new_tokens": 9}
    assert torch.equal(run(model, cache, **options), run(model, simulated_cache(model), **options))
    assert (cache.layers[0].key_buffer.dtype, cache.layers[1].keys.dtype) == (torch.uint8, torch.float32)
    assert cache.layers[1].keys.shape[2] == 3


def test_a_window_in_the_first_layer_crops(model_with, run):
    model = model_with("Gemma2", sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    options = {"batch": 1, "prompt_lookup_num_tokens": 3, "max_new_tokens": 12}
    assert torch.equal(run(model, TBQ4Cache(model), **options), run(model, simulated_cache(model), **options))


def test_linear_attention_is_left_to_transformers(run):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3NextForCausalLM._from_config(config, attn_implementation="eager").eval()
    cache = TBQ4Cache(model)
    assert torch.equal(run(model, cache), run(model, simulated_cache(model)))
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == ["LinearAttentionLayer"] * 3 + ["BufferedLayer"]


def test_centred_keys_keep_what_a_constant_hides(model_with):
    """A bias makes one channel of K, whose position turns it least, far longer than the others."""
    model = model_with("Qwen2", num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias.zero_()[7] = 40.0
    dense, ids = DynamicCache(config=model.config), ids_of(40)
    caches = [TBQ4Cache(model, centre_keys=centred, values="dense") for centred in (False, True)]
    for cache in (dense, *caches):
        logits(model, ids, cache)
    exact, *got = (logits(model, [[6]], cache) for cache in (dense, *caches))
    plain, centred = ((x - exact).abs().max() for x in got)
    assert centred < plain / 3


def test_centred_keys_under_a_softcap(model_with):
    """Where a constant is not lost in the softmax: it is added back."""
    model = model_with("Gemma2", attn_logit_softcapping=0.5, layer_types=["full_attention"] * 2)
    caches = TBQ4Cache(model, centre_keys=True), simulated_cache(model, centre_keys=True)
    for ids in (ids_of(9), ids_of(2)):
        torch.testing.assert_close(*(logits(model, ids, cache) for cache in caches))


def test_a_head_dim_that_cannot_be_cut(model_with, run):
    model = model_with(head_dim=20)
    with pytest.raises(ValueError, match=r"layer 0 has heads of 20 channels; .* multiples of 8.*skip_layers=\(0,\)"):
        run(model, TBQ4Cache(model))
    expected = run(model, DynamicCache(config=model.config))
    assert torch.equal(run(model, TBQ4Cache(model, skip_layers=(0, 1))), expected)


def test_models_that_do_not_fit():
    from transformers import FalconH1Config, MistralConfig, T5Config

    with pytest.raises(ValueError, match="t5 has an encoder"):
        TBQ4Cache(T5Config())
    with pytest.raises(ValueError, match="TBQ4Cache has nothing to keep of mistral: its layers are sliding_attention"):
        TBQ4Cache(MistralConfig(sliding_window=8))
    with pytest.raises(ValueError, match="falcon_h1 has hybrid, whose caches hold something else"):
        TBQ4Cache(FalconH1Config())


BAD = {
    "keys": ({"keys": "int4"}, "keys='int4' is none of 'tbq4', 'int8', 'dense'"),
    "values": ({"values": "int8"}, "values='int8' is none of 'tbq4', 'dense'"),
    "layer": ({"skip_layers": (2,)}, "skip_layers names 2: the model has layers 0 to 1"),
    "name": ({"skip_layers": ("middle",)}, "skip_layers names 'middle'"),
    "length": ({"max_cache_len": 0}, "max_cache_len=0 is no number of tokens"),
    "centre": ({"keys": "dense", "centre_keys": True}, "centre_keys=True needs keys"),
}


@pytest.mark.parametrize(("choice", "message"), BAD.values(), ids=BAD)
def test_bad_choices(model, choice, message):
    with pytest.raises(ValueError, match=message):
        TBQ4Cache(model, **choice)


def test_another_batch_is_refused(model):
    cache = TBQ4Cache(model)
    logits(model, [[3, 4, 5]], cache)
    with pytest.raises(ValueError, match="holds 3 tokens of 1 sequences and was given 2"):
        logits(model, [[6], [7]], cache)


@pytest.mark.parametrize("stored", [0, 3])
def test_a_forward_that_failed_is_done_again(model, stored):
    """Of another batch too, where nothing was stored."""
    cache = TBQ4Cache(model)
    if stored:
        logits(model, ids_of(stored), cache)
    expected = logits(model, [[8, 9]], copy.deepcopy(cache))
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, ids_of(7, 1 if stored else 3), cache)
    handle.remove()
    assert cache.get_seq_length() == stored
    torch.testing.assert_close(logits(model, [[8, 9]], cache), expected)


@pytest.mark.parametrize("patched", [False, True])
def test_modes_of_autograd_mix(model, patched):
    expected = simulated_cache(model, centre_keys=True)
    for ids in ([[3, 4, 5]], [[6, 7]]):
        logits(model, ids, expected)
    expected = logits(model, [[8]], expected)
    if patched:
        attnpatch.patch(model)
    cache = TBQ4Cache(model, centre_keys=True)
    with torch.inference_mode():
        model(torch.tensor([[3, 4, 5]]), past_key_values=cache)
    logits(model, [[6, 7]], cache)
    cache.reorder_cache(torch.tensor([0]))  # in place
    with torch.inference_mode():
        got = model(torch.tensor([[8]]), past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(got.clone(), expected)
    assert not any(x.requires_grad or x.is_inference() for x in tensors_of(cache))


@pytest.mark.parametrize("patched", [False, True])
def test_gradients_reach_the_tokens_of_the_forward(model, patched):
    """As those of a cache that holds the past rounded, and not the tokens stored before."""

    def gradients(cache, raw):
        model.zero_grad()
        with torch.no_grad():
            model(ids_of(5), past_key_values=cache)
        for layer in cache.layers if raw else ():
            layer.formats = ("dense", "dense")
        model(torch.tensor([[8, 9]]), past_key_values=cache).logits.square().mean().backward()
        return [x.grad.clone() for x in model.parameters()]

    expected = gradients(simulated_cache(model), raw=True)
    if patched:
        attnpatch.patch(model)
    torch.testing.assert_close(gradients(TBQ4Cache(model), raw=False), expected)


def test_import_is_lazy():
    assert attnpatch.TBQ4Cache is TBQ4Cache
