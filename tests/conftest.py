"""Every test runs on a CPU: Triton kernels in its interpreter, which must be chosen before triton is imported."""

import gc
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

torch.set_num_threads(1)  # the tensors are tiny, and CI shares its cores
gc.set_threshold(50_000, 20, 20)  # Dynamo makes objects by the million: looking through them took a tenth of the time


@pytest.fixture(autouse=True)
def _clean_dynamo():
    """Compiled code and recompile counts of one test must not reach the next."""
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_environment_twins(monkeypatch):
    for name in ("ATTNPATCH_STRICT", "ATTNPATCH_BACKENDS", "ATTNPATCH_LOG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A saved Llama of two layers with random weights and a tokenizer of five words."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    words = {word: i for i, word in enumerate(["<unk>", "why", "the", "sky", "blue"])}
    words_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    words_only.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words_only, unk_token="<unk>", pad_token="<unk>"
    ).save_pretrained(path)
    return path


@pytest.fixture
def graphs(monkeypatch):
    """Every graph that a patched model compiles, as it is after its rewrite."""
    from attnpatch import patching

    seen: list[torch.fx.GraphModule] = []
    compile_graph = patching.compile_graph

    def spy(gm, *args):
        seen.append(gm)
        return compile_graph(gm, *args)

    monkeypatch.setattr(patching, "compile_graph", spy)
    return seen
