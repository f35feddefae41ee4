"""Models over two GPUs: layers on different ones, and every layer on both. Text is that of one GPU."""

import copy

import pytest
import torch

import attnpatch
from tests.api.conftest import make_llama
from tests.gpu.test_generate_gpu import left_padded, tiny_llama
from tests.tensor_parallel import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

RUNS = {2: [None, "buffered", "replayed"]}


def generate(model):
    torch.manual_seed(3)
    return model.generate(**left_padded(37, 3), max_new_tokens=12, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("cache", [None, "buffered"])
def test_layers_on_different_gpus(cache):
    accelerate = pytest.importorskip("accelerate")
    model = tiny_llama(torch.float32)
    expected = generate(model)
    last = model.config.num_hidden_layers - 1
    places = {f"model.layers.{n}": 0 for n in range(last)} | {f"model.layers.{last}": 1}
    places |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    spread = accelerate.dispatch_model(copy.deepcopy(model), places)
    assert {str(x.device) for x in spread.parameters()} == {"cuda:0", "cuda:1"}
    with attnpatch.patched(spread, strict=True, cache=cache):
        assert torch.equal(generate(spread), expected)
        report = attnpatch.report(spread)
    assert [site.status for site in report.sites] == ["fused"] * (last + 1)
    for site in report.sites:
        assert {d.phase: d.calls for d in site.dispatches} == {"prefill": 1, "decode": 11}
    assert report.gaps == []


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each process of a model in tensor parallel found."""
    model = make_llama(num_attention_heads=8, num_key_value_heads=4, hidden_size=512)
    return run(model, RUNS, tmp_path_factory.mktemp("model"))[2]


@pytest.mark.parametrize("i", range(len(RUNS[2])), ids=RUNS[2])
def test_heads_on_both_gpus(results, i):
    assert [found["device"] for found in results] == ["cuda:0", "cuda:1"]
    for found in results:
        report = found["runs"][i]["report"]
        assert found["runs"][i]["tokens"]
        assert found["runs"][i]["difference"] < 1e-4
        assert report["gaps"] == []
        for site in report["sites"]:
            assert (site["status"], site["num_heads"], site["num_kv_heads"]) == ("fused", 4, 2)
            calls = {(d["phase"], d["captured"]): d["calls"] for d in site["dispatches"]}
            assert calls.pop(("prefill", False)) == 1
            assert sum(calls.values()) == 5
            assert (calls.get(("decode", True)) == 3) == (RUNS[2][i] == "replayed")
            assert {d["backend"] for d in site["dispatches"] if d["phase"] == "decode"} == {"triton.decode"}
