"""Suite ``generate``: time per token of ``model.generate()``, a process per model, length and implementation.

TRITON_INTERPRET=0 python benchmarks/generate.py [--cases "8B S2048 B1" ...] [--impls hf-sdpa ...] [--once]

A token's floor is the time to read all weights and the K and V of its context once, as fast as a plain read.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from bandwidth import CASES as READS
from bandwidth import measure_bandwidth
from harness import DEVICE, environment, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import attnpatch

MODELS = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    },
}
"""Llama shapes; head_dim is hidden_size / num_attention_heads."""

CASES = [
    *(f"8B S{length} B1" for length in (2048, 16384, 65536)),
    *(f"1B S{length} B1" for length in (1024, 8192, 32768)),
    "8B S4096 B32",
]
NEW_TOKENS, STEPS = 256, 32
COLUMNS = {"ms": 2, "floor_ms": 2, "step_ms": 2, "loop_ms": 2, "first_token_s": 1, "fourth_token_s": 1, "peak_gb": 1}
"""Of a row, what is shown, and with how many digits."""
READ_TBPS = 4.3
"""Of a plain read on an H200; measured again in a run on a GPU."""


class Implementation(NamedTuple):
    """One way to generate.

    Args:
        attention: transformers' name of the attention that is loaded.
        patch: options of ``attnpatch.patch``, or None.
        generate: arguments of ``generate()``.
        gpus: how many hold the model, by transformers' tensor parallel.
    """

    attention: str
    patch: dict[str, Any] | None = None
    generate: Mapping[str, Any] = MappingProxyType({})
    gpus: int = 1


BUFFERED = {"cache": "buffered", "cuda_graphs": True, "strict": True}
IMPLEMENTATIONS = {
    "attnpatch.eager-rest": Implementation("sdpa", BUFFERED),
    "attnpatch.inductor-rest": Implementation("sdpa", {**BUFFERED, "rest": "inductor"}),
    "attnpatch.eager-rest in chunks": Implementation("sdpa", BUFFERED, {"prefill_chunk_size": 8192}),
    "attnpatch.inductor-rest tbq4": Implementation("sdpa", {**BUFFERED, "rest": "inductor", "cache": "tbq4"}),
    "attnpatch.eager-rest 2 GPUs": Implementation("sdpa", BUFFERED, gpus=2),
    "attnpatch.inductor-rest 2 GPUs": Implementation("sdpa", {**BUFFERED, "rest": "inductor"}, gpus=2),
    "hf-sdpa 2 GPUs": Implementation("sdpa", gpus=2),
    "hf-eager": Implementation("eager"),
    "hf-sdpa": Implementation("sdpa"),
    "hf-sdpa-static-compiled": Implementation("sdpa", None, {"cache_implementation": "static"}),
}


class Case(NamedTuple):
    """A model, the tokens of its prompts, and how many prompts: ``8B S2048 B1``."""

    name: str
    sizes: dict[str, Any]
    seqlen: int
    batch: int

    @classmethod
    def parse(cls, name: str) -> Case:
        """Read a case's name.

        Raises:
            ValueError: it is no such name.
        """
        found = re.fullmatch(rf"({'|'.join(MODELS)}) S(\d+) B(\d+)", name)
        if found is None:
            raise ValueError(f"case {name!r} is none like '8B S2048 B1'; models are {', '.join(MODELS)}")
        return cls(name, MODELS[found[1]], int(found[2]), int(found[3]))


def make_model(case: Case, attention: str, gpus: int) -> Any:
    """A Llama of random weights, in bfloat16 on the device, float32 on a CPU; of several GPUs, this process's part."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**case.sizes, max_position_embeddings=1 << 18, bos_token_id=1, eos_token_id=None)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(DEVICE if gpus == 1 else "meta"):
        model = LlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=dtype).eval()
    return model if gpus == 1 else in_parallel(model, gpus)


def in_parallel(model: Any, gpus: int) -> Any:
    """The part of a model without weights that this process of ``torchrun`` computes, with random ones."""
    from transformers.distributed import DistributedConfig

    config, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_size=gpus, tp_plan="auto"))
    model = model.maybe_distribute_model(model, config, mesh).to_empty(device=DEVICE)
    with torch.device(DEVICE):  # its frequencies are no weights
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with torch.no_grad():
        for name, x in model.named_parameters():
            local = x.to_local() if hasattr(x, "to_local") else x
            local.fill_(1.0) if "norm" in name else local.normal_(std=model.config.initializer_range)
    return model


class Marks:
    """A stopping criterion that stops nothing and notes the time after each token, for which it waits."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.times.append(now())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def now() -> float:
    """Seconds, when the device has done all it was given."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run(model: Any, ids: Tensor, new_tokens: int, **options: Any) -> tuple[float, Any]:
    """Generate greedily; seconds, and what ``generate()`` returned."""
    start = now()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        **options,
    )
    return now() - start, output


def ms_per_token(model: Any, ids: Tensor, new_tokens: int, **options: Any) -> tuple[float, Any]:
    """What each token after the first adds to ``generate()``, and what that returned: nothing waits in between."""
    first = min(run(model, ids, 1, **options)[0] for _ in range(2))
    whole, output = run(model, ids, new_tokens, **options)  # the last, whose cache is the only one
    return (whole - first) / (new_tokens - 1) * 1e3, output


def step_ms(model: Any, cache: Any, batch: int) -> float:
    """Time of a forward of one token after ``generate()``, without its loop."""
    token = torch.full((batch, 1), 5, device=DEVICE)

    def forward() -> None:
        model(token, past_key_values=cache, logits_to_keep=1)

    with torch.inference_mode():
        return _ms_of(forward)


def loop_ms(model: Any, ids: Tensor, new_tokens: int) -> float:
    """Time per token of ``generate()`` around a forward that computes nothing."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    logits = torch.zeros(ids.shape[0], 1, model.config.vocab_size, device=DEVICE, dtype=model.dtype)
    installed = model.__dict__.get("_compiled_call_impl")
    model._compiled_call_impl = lambda *_, **given: CausalLMOutputWithPast(
        logits=logits, past_key_values=given.get("past_key_values")
    )
    try:
        return ms_per_token(model, ids[:, -8:], new_tokens)[0]
    finally:
        del model._compiled_call_impl
        if installed is not None:
            model._compiled_call_impl = installed


def _ms_of(function: Callable[[], None]) -> float:
    for _ in range(4):  # a captured step runs twice before it is replayed
        function()
    start = now()
    for _ in range(STEPS):
        function()
    return (now() - start) / STEPS * 1e3


def floor_ms(model: nn.Module, case: Case, tbps: float, gpus: int) -> float:
    """Time to read the weights, and K and V of the prompts, once; on several GPUs, as much by each."""
    sizes = case.sizes
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    rows = 2 * case.batch * case.seqlen * sizes["num_hidden_layers"] * sizes["num_key_value_heads"]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return (weights + rows * head_dim * next(model.parameters()).element_size()) / tbps / 1e9 / gpus


def measure_generate(case: Case, impl: str, tbps: float = READ_TBPS, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """The row of a case and an implementation, in a process that did nothing before."""
    chosen = IMPLEMENTATIONS[impl]
    model = make_model(case, chosen.attention, chosen.gpus)
    ids = torch.randint(3, case.sizes["vocab_size"], (case.batch, case.seqlen), device=DEVICE)
    start = now()
    if chosen.patch is not None:
        attnpatch.patch(model, **chosen.patch)
    marks = Marks()
    run(model, ids, 6, stopping_criteria=[marks], **chosen.generate)  # its cache is let go of
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms, output = ms_per_token(model, ids, new_tokens, **chosen.generate)
    peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else None
    row = {
        "suite": "generate",
        "case": case.name,
        "impl": impl,
        "ms": ms,
        "floor_ms": floor_ms(model, case, tbps, chosen.gpus),
        "step_ms": None
        if "cache_implementation" in chosen.generate
        else step_ms(model, output.past_key_values, case.batch),
        "first_token_s": marks.times[0] - start,
        "fourth_token_s": marks.times[3] - start,
        "peak_gb": peak,
    }
    del output
    return {**row, "loop_ms": loop_ms(model, ids, new_tokens)}


def in_child(case: str, impl: str, tbps: float, new_tokens: int) -> dict[str, Any] | None:
    """:func:`measure_generate` in a process of its own; None, and the end of what it said, when that fails.

    Prints what it found at once: a run that is cut off has then shown what it measured.
    """
    gpus = IMPLEMENTATIONS[impl].gpus
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"] if gpus > 1 else []
    command = [sys.executable, *torchrun, __file__, "--worker", case, impl, str(tbps), str(new_tokens)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        print(f"FAILED generate: {case} {impl}\n{child.stderr[-1500:]}", flush=True)
        return None
    row: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    print(", ".join([case, impl, *(f"{name} {text}" for name, text in cells_of(row).items() if text)]), flush=True)
    return row


def cells_of(row: Mapping[str, Any]) -> dict[str, str]:
    """What is shown of a row, by column; empty where nothing was measured."""
    cells = {name: "" if row[name] is None else f"{row[name]:.{digits}f}" for name, digits in COLUMNS.items()}
    return {**cells, "x floor": f"{row['ms'] / row['floor_ms']:.2f}"}


def table(rows: list[dict[str, Any]]) -> Table:
    """A line per case and implementation."""
    shown = Table(title="generate")
    for column in ("case", "impl"):
        shown.add_column(column)
    for column in (*COLUMNS, "x floor"):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(row["case"], row["impl"], *cells_of(row).values())
    return shown


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--impls", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--once", action="store_true", help="measure nothing: a few tokens of each, to fill caches")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", help="default: what git says")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        case, impl, tbps, new_tokens = options.worker
        row = measure_generate(Case.parse(case), impl, float(tbps), int(new_tokens))
        if os.environ.get("RANK", "0") == "0":  # of several processes, one speaks
            print(json.dumps(row))
        return
    if not torch.cuda.is_available():
        parser.exit(1, "no CUDA device: nothing to measure\n")
    tbps = max(row["tbps"] for row in measure_bandwidth(READS[0], 1))
    gc.collect()
    torch.cuda.empty_cache()  # the children need the memory
    measure_one = partial(in_child, tbps=tbps, new_tokens=6 if options.once else NEW_TOKENS)
    impls = [impl for impl in options.impls if IMPLEMENTATIONS[impl].gpus <= torch.cuda.device_count()]
    found = [measure_one(case, impl) for case in options.cases for impl in impls]
    rows = [row for row in found if row is not None]
    if not options.once:
        path = write_results(options.results, environment(options.commit), rows)
        Console(width=150).print(table(rows), f"written to {path}")
    sys.exit(len(rows) < len(found))


if __name__ == "__main__":
    main()
