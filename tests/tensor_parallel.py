"""Models in tensor parallel, of as many processes as asked for, on GPUs where there are enough, else on the CPU.

One fresh process imports everything and forks as many as compute together: imports take longer than the rest.

    python -m tests.tensor_parallel DIRECTORY RUNS    # RUNS: {"2": ["buffered", "replayed"]}, see :func:`patched`
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TIMEOUT = 240
"""Seconds after which processes that wait for each other are ended: on two busy cores they need about 40."""


def run(model, runs, directory):
    """What each process found with each cache, by the number of processes.

    Args:
        model: is written to ``directory`` and loaded from there.
        runs: how each number of processes caches, see :func:`patched`.
        directory: a Path.
    """
    model.save_pretrained(directory)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(directory), json.dumps(runs)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its session: the processes that it forked, too
    assert process.returncode == 0, output[-3000:]
    return {n: [json.loads((directory / f"{n}.{rank}.json").read_text()) for rank in range(n)] for n in runs}


def load(directory, device, **options):
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, **options).eval()
    return model if options else model.to(device)


def generate(model):
    import torch

    ids = torch.arange(3, 23, device=model.device).view(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return out.sequences, torch.stack(out.logits)


def patched(model, cache):
    """Tokens, logits and the report with a cache; ``replayed``: the buffered one, decode steps from CUDA graphs.

    On a CPU those are replayed by a recorder.
    """
    import attnpatch
    from attnpatch.replaying import Replays
    from tests.caches.recorder import Recorder

    graphs, cache = cache == "replayed", "buffered" if cache == "replayed" else cache
    with attnpatch.patched(model, strict=True, cache=cache, cuda_graphs=graphs):
        if graphs and model.device.type == "cpu":
            model._compiled_call_impl.collector.replays = Replays(Recorder(), "cpu")
        tokens, logits = generate(model)
        return tokens, logits, attnpatch.report(model).to_dict()


def work(rank, world, caches, directory):
    """One process of ``world``; what it found goes to a file."""
    import torch
    from transformers.distributed import DistributedConfig

    on_gpu = torch.cuda.device_count() >= world
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    store = f"file://{directory}/store{world}"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", init_method=store, rank=rank, world_size=world)
    tokens, logits = generate(load(directory, device))
    model = load(directory, device, distributed_config=DistributedConfig(tp_plan="auto"))
    found = []
    for cache in caches:
        ours, values, report = patched(model, cache)
        difference = (values - logits).abs().max().item()
        found.append({"tokens": torch.equal(ours, tokens), "difference": difference, "report": report})
    local = model.model.layers[0].self_attn.k_proj.weight.to_local()
    result = {"local": local.shape[0], "device": str(local.device), "runs": found}
    Path(directory, f"{world}.{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main():
    import torch

    torch.set_num_threads(1)
    import torch._dynamo
    import torch.distributed.tensor
    import transformers.distributed  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import attnpatch  # noqa: F401

    directory, runs = sys.argv[1], json.loads(sys.argv[2])
    fork = multiprocessing.get_context("fork")
    for world, caches in runs.items():
        processes = [fork.Process(target=work, args=(n, int(world), caches, directory)) for n in range(int(world))]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
            time.sleep(0.05)
        failed = [process.exitcode for process in processes if process.exitcode]
        for process in processes:
            process.terminate()  # those that wait for one that failed
        assert not failed


if __name__ == "__main__":
    main()
