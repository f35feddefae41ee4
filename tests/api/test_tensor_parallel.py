"""Hugging Face's tensor parallel: every process fuses the heads that it has, and all give what one process gives."""

import pytest

pytest.importorskip("transformers.distributed")
from tests.api.conftest import make_llama
from tests.tensor_parallel import run

RUNS = {2: [None, "buffered", "replayed"], 4: ["buffered"]}
"""Which caches each number of processes runs with."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each process found, by their number."""
    model = make_llama(num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    return run(model, RUNS, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("world", RUNS)
def test_every_process_has_a_part_of_the_heads(results, world):
    """4 heads of K of 8 channels."""
    assert [found["local"] for found in results[world]] == [4 * 8 // world] * world


CASES = [(world, i) for world, caches in RUNS.items() for i in range(len(caches))]


@pytest.mark.parametrize(("world", "i"), CASES, ids=lambda x: str(x))
def test_tokens_and_logits_are_those_of_one_process(results, world, i):
    for found in results[world]:
        assert found["runs"][i]["tokens"]
        assert found["runs"][i]["difference"] < 1e-5


@pytest.mark.parametrize(("world", "i"), CASES, ids=lambda x: str(x))
def test_every_process_fuses_every_attention(results, world, i):
    for found in results[world]:
        report = found["runs"][i]["report"]
        assert [site["module"] for site in report["sites"]] == [f"model.layers.{n}.self_attn" for n in range(2)]
        for site in report["sites"]:
            assert (site["status"], site["num_heads"], site["num_kv_heads"]) == ("fused", 8 // world, 4 // world)
            assert {(d["phase"], d["captured"]): d["calls"] for d in site["dispatches"]} == (
                {("prefill", False): 1, ("decode", False): 2, ("decode", True): 3}
                if RUNS[world][i] == "replayed"
                else {("prefill", False): 1, ("decode", False): 5}
            )
            assert site["mask"].startswith("causal, padding")
        assert report["gaps"] == []
        assert report["summary"]["graphs"] <= 3
