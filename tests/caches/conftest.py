"""A tiny Llama, prompts, and what generate() is asked for."""

import pytest
import torch

import attnpatch
from attnpatch.replaying import Replays
from tests.caches.recorder import Recorder


def make_model(family="Llama", attn_implementation="eager", **config):
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1,
        "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**{**sizes, **config})
    model = getattr(transformers, f"{family}ForCausalLM")
    return model._from_config(config, attn_implementation=attn_implementation).eval()


def make_prompt(length=9, batch=2, pads=0):
    ids = torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    ids[0, :pads], mask[0, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, cache, length=9, batch=2, pads=0, **kwargs):
    torch.manual_seed(3)
    options = {"max_new_tokens": 6, "do_sample": False, **kwargs}
    return model.generate(**make_prompt(length, batch, pads), past_key_values=cache, **options)


@pytest.fixture
def model_with():
    """Make a tiny decoder of transformers; takes its family, ``attn_implementation`` and fields of its config."""
    return make_model


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def prompt():
    return make_prompt


@pytest.fixture
def run():
    """``run(model, cache, length, batch, pads, **options of generate)``, seeded."""
    return generate


@pytest.fixture
def recorder():
    return Recorder()


def make_replayed(recorder, **config):
    model = attnpatch.patch(make_model(**{"num_hidden_layers": 1, **config}), strict=True, cuda_graphs=True)
    model._compiled_call_impl.collector.replays = Replays(recorder, "cpu")
    return model


@pytest.fixture
def patched(recorder):
    """Make a tiny Llama of one layer, patched and replayed; takes fields of its config."""
    return lambda **config: make_replayed(recorder, **config)


def calls(model, captured):
    """How often the model's one site ran, or was replayed, per phase."""
    (site,) = attnpatch.report(model).sites
    found = {}
    for d in site.dispatches:
        if d.captured is captured:
            found[d.phase] = found.get(d.phase, 0) + d.calls
    return found


MODES = {
    "greedy": {},
    "left padding": {"length": 12, "pads": 4},
    "sampling": {"do_sample": True, "top_k": 8},
    "beams": {"num_beams": 3, "max_new_tokens": 9},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "batch": 1, "max_new_tokens": 12},
    "chunked prefill": {"prefill_chunk_size": 4},
}


@pytest.fixture(params=MODES.values(), ids=MODES)
def mode(request):
    """Arguments of ``run``."""
    return request.param


LAYERS_AND_MODES = pytest.mark.parametrize(
    ("layers", "attn_implementation", "mode"),
    [
        *(pytest.param(1, "sdpa", mode, id=f"sdpa-{name}") for name, mode in MODES.items()),
        pytest.param(2, "eager", MODES["left padding"], id="2-eager-left padding"),
        pytest.param(1, "eager", MODES["chunked prefill"], id="eager-chunked prefill"),
    ],
)
"""The modes differ in what the host does with a cache; eager attention differs in the masks alone."""


def symbols(gm):
    """Inputs of a graph that are not tensors."""
    return [
        n for n in gm.graph.nodes if n.op == "placeholder" and not isinstance(n.meta["example_value"], torch.Tensor)
    ]


def fused(model):
    report = attnpatch.report(model)
    return report.summary["fused"], report.summary["refused"], report.gaps


def fill_behind(cache, *names):
    """Fill these buffers of the first layer with NaN behind what is stored, before each forward; what was filled."""
    before_forward, filled = cache.before_forward, []

    def poisoned(*args):
        arguments = before_forward(*args)
        buffers = [getattr(cache.layers[0], name) for name in names]
        filled.extend(x[:, :, cache.get_seq_length() :].fill_(float("nan")) for x in buffers if x is not None)
        return arguments

    cache.before_forward = poisoned
    return filled
