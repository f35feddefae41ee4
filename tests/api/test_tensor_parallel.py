"""Hugging Face's tensor parallel: every process fuses the heads that it has, and all give what one process gives.

One fresh process imports everything and forks as many as compute together: imports take longer than the rest.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("transformers.distributed")
from tests.api.conftest import make_llama

TIMEOUT = 240
"""Seconds after which processes that wait for each other are ended: on two busy cores they need about 40."""

SCRIPT = """
import json, multiprocessing, os, sys, time
import torch
torch.set_num_threads(1)
import torch._dynamo, torch.distributed.tensor
import attnpatch
from transformers.distributed import DistributedConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

directory, runs = sys.argv[1], json.loads(sys.argv[2])

def load(**options):
    return LlamaForCausalLM.from_pretrained(directory, **options).eval()

def generate(model):
    ids = torch.arange(3, 23).view(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return out.sequences, torch.stack(out.logits)

def patched(model, cache):
    with attnpatch.patched(model, strict=True, cache=cache):
        tokens, logits = generate(model)
        report = attnpatch.report(model)
    return tokens, logits, report

def work(rank, world, caches, store):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    tokens, logits = generate(load())
    model = load(distributed_config=DistributedConfig(tp_plan="auto"))
    found = []
    for cache in caches:
        ours, values, report = patched(model, cache)
        found.append({
            "tokens": torch.equal(ours, tokens),
            "difference": (values - logits).abs().max().item(),
            "report": report.to_dict(),
        })
    with open(f"{store}.{rank}.json", "w") as file:
        json.dump({"local": model.model.layers[0].self_attn.k_proj.weight.to_local().shape[0], "runs": found}, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

fork = multiprocessing.get_context("fork")
for world, caches in runs:
    store = os.path.join(directory, f"store{world}")
    processes = [fork.Process(target=work, args=(rank, world, caches, store)) for rank in range(world)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
        time.sleep(0.05)
    failed = [process.exitcode for process in processes if process.exitcode]
    for process in processes:
        process.terminate()  # those that wait for one that failed
    assert not failed
"""

RUNS = {2: [None, "buffered"], 4: ["buffered"]}
"""Which caches each number of processes runs with."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each process found, by their number."""
    directory = tmp_path_factory.mktemp("model")
    make_llama(num_attention_heads=8, num_key_value_heads=4, hidden_size=64).save_pretrained(directory)
    command = [sys.executable, "-c", SCRIPT, str(directory), json.dumps(list(RUNS.items()))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its session: the processes that it forked, too
    assert process.returncode == 0, output[-3000:]
    return {
        world: [json.loads((directory / f"store{world}.{rank}.json").read_text()) for rank in range(world)]
        for world in RUNS
    }


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
            assert {d["phase"]: d["calls"] for d in site["dispatches"]} == {"prefill": 1, "decode": 3}
            assert site["mask"].startswith("causal, padding")
        assert report["gaps"] == []
        assert report["summary"]["graphs"] <= 3
