"""Patch a real checkpoint: same text, every site named, time and memory before and after, measured there."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import attnpatch
from attnpatch.cli.checkpoint import NAME, CheckpointMissing, load_checkpoint
from attnpatch.cli.measure import IMPLEMENTATIONS, Measurement, measure_in_child
from attnpatch.cli.reporting import default_device, default_dtype

LENGTHS, QUICK_LENGTHS = (512, 2048, 4096), (512, 1024)
PROMPT = "Explain in two sentences why the sky is blue."
TITLES = {"eager": "HF eager", "sdpa": "HF sdpa", "attnpatch": "attnpatch"}
DECODE_TOKENS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``attnpatch demo``."""
    parser.add_argument("--model", help=f"path of a causal language model; default {NAME}")
    parser.add_argument("--device", default=default_device(), help="default %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of text to compare; default %(default)s")
    parser.add_argument("--quick", action="store_true", help="measure at fewer, shorter lengths")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when the text is the same and every attention site is fused, else 1."""
    console = Console()
    console.print(environment(args.device))
    try:
        model, tokenizer = load_checkpoint(args.model, torch.float32, "eager", args.device)
    except CheckpointMissing as missing:
        console.print(f"[red]{escape(str(missing))}[/]")
        return 1
    same = compare_texts(console, model, tokenizer, args.tokens)
    report = attnpatch.report(model)
    console.print(report)
    del model
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    console.print(results_table(measure_all(console, lengths, args.device, args.model), args.device))
    return 0 if same and all(site.status == "fused" for site in report.sites) else 1


def environment(device: str) -> str:
    """One line: the versions and the machine."""
    import transformers

    if device.startswith("cuda"):
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return f"[bold]attnpatch[/] on {where}: torch {torch.__version__}, transformers {transformers.__version__}"


def compare_texts(console: Console, model: Any, tokenizer: Any, new_tokens: int) -> bool:
    """Print the greedy text before and after patching ``model`` in place, and whether they are the same."""
    inputs = prompt_inputs(tokenizer, model.device)
    status = Console(stderr=True).status
    with status("Hugging Face eager writes"):
        before = greedy(model, inputs, new_tokens)
    attnpatch.patch(model)
    with status("attnpatch compiles and writes the same"):
        after = greedy(model, inputs, new_tokens)
    same = before == after
    verdict = "[green]identical[/]" if same else f"[red]they differ from token {first_difference(before, after)} on[/]"
    titled = (
        [("Hugging Face eager and attnpatch", before)]
        if same
        else [("Hugging Face eager", before), ("attnpatch", after)]
    )
    for title, tokens in titled:
        text = escape(tokenizer.decode(tokens, skip_special_tokens=True).strip())
        console.print(Panel(text, title=title, title_align="left"))
    console.print(f"greedy text of {len(before)} tokens, float32, before and after the patch: {verdict}\n")
    return same


def prompt_inputs(tokenizer: Any, device: torch.device) -> Any:
    """The demo's question as the model's chat, or as plain text where it has no chat."""
    if tokenizer.chat_template is None:
        return tokenizer(PROMPT, return_tensors="pt").to(device)
    chat = [{"role": "user", "content": PROMPT}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt").to(
        device
    )


def greedy(model: Any, inputs: Any, new_tokens: int) -> list[int]:
    """Token ids of the greedy answer."""
    output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def first_difference(before: Sequence[int], after: Sequence[int]) -> int:
    """Index of the first token that differs."""
    pairs = enumerate(zip(before, after, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))


def measure_all(
    console: Console, lengths: Sequence[int], device: str, model: str | None
) -> dict[tuple[str, int], Measurement]:
    """Measure every implementation at every length, each in a fresh process."""
    cases = [(implementation, length) for length in lengths for implementation in IMPLEMENTATIONS]
    dtype = str(default_dtype(device)).removeprefix("torch.")
    results = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for implementation, length in cases:
            progress.update(task, description=f"measuring {TITLES[implementation]} at {length:,} tokens")
            new_tokens = DECODE_TOKENS if length == lengths[0] else 0
            results[implementation, length] = measure_in_child(implementation, length, dtype, device, new_tokens, model)
            progress.advance(task)
    return results


def results_table(results: dict[tuple[str, int], Measurement], device: str) -> Table:
    """What was measured, and attnpatch as a multiple of Hugging Face's two."""
    dtype = str(default_dtype(device)).removeprefix("torch.")
    title = f"measured here: batch 1, {dtype}; memory is the peak above the loaded model"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for header in (*TITLES.values(), "vs eager", "vs sdpa"):
        table.add_column(header, justify="right")
    for title, unit, values in _rows(results):
        eager, sdpa, ours = values
        ratios = [f"{ours / other:.2f}x" if ours and other else "" for other in (eager, sdpa)]
        table.add_row(
            title, *[f"{value:,.{1 if value < 100 else 0}f} {unit}" if value else "?" for value in values], *ratios
        )
    return table


def _rows(results: dict[tuple[str, int], Measurement]) -> Iterator[tuple[str, str, list[float | None]]]:
    """Title, unit and one value per implementation: times, then memory, then decode."""
    lengths = sorted({length for _, length in results})

    def row(length: int, value: Callable[[Measurement], float | None]) -> list[float | None]:
        return [value(results[implementation, length]) for implementation in IMPLEMENTATIONS]

    for length in lengths:
        yield f"prefill {length:,}", "ms", row(length, lambda m: m.prefill_ms)
    for length in lengths:
        yield f"memory {length:,}", "MiB", row(length, lambda m: m.peak_bytes and m.peak_bytes / 2**20)
    yield "decode", "tok/s", row(lengths[0], lambda m: m.decode_tokens_per_s)
