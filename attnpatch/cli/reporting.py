"""Patch a model, run a prefill and a few decode steps, and print which kernel each attention got."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import attnpatch
from attnpatch.cli.checkpoint import NAME
from attnpatch.cli.measure import IMPLEMENTATIONS, Measurement, load, measure_in_child
from attnpatch.reporting import timed

OURS = "attnpatch"
OTHERS = tuple(name for name in IMPLEMENTATIONS if name != OURS)

SEED = 0
"""Of the token ids: a report needs no tokenizer, and says the same of every run."""

EXPECTED = (OSError, RuntimeError, ValueError)
"""What a wrong argument or a missing file raises: a sentence is enough. Anything else keeps its traceback."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``attnpatch report``."""
    source = parser.add_mutually_exclusive_group()
    # SUPPRESS: a positional that is not given would otherwise set what --model gave back to None.
    source.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model")
    source.add_argument("--model", help=f"path of a causal language model; default {NAME}")
    source.add_argument("--config", metavar="PATH", help="a config.json or its folder: run it with random weights")
    parser.add_argument("--attn", choices=OTHERS, default="eager", help="Hugging Face's implementation")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default float32, bfloat16 on a GPU"
    )
    parser.add_argument("--device", default=default_device(), help="default %(default)s")
    parser.add_argument("--prompt-tokens", type=at_least(1), default=64, help="default %(default)s")
    parser.add_argument(
        "--new-tokens", type=at_least(2), default=4, help="the first is the prefill's; default %(default)s"
    )
    parser.add_argument("--time", action="store_true", help="run it twice, and time attention in the second run")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when any attention stays unfused")
    parser.add_argument("--backends", nargs="+", default=[], metavar="NAME", help="only these backends, in order")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON, too")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page, too")
    parser.add_argument(
        "--compare", type=implementations, default=(), metavar="NAMES", help="measure beside it: eager,sdpa"
    )
    parser.add_argument(
        "--diff", nargs=2, metavar=("OLD", "NEW"), help="run nothing: compare two reports written with --json"
    )


def at_least(least: int) -> Callable[[str], int]:
    """An argument that is a whole number from ``least`` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return number


def implementations(text: str) -> tuple[str, ...]:
    """An argument that names some of OTHERS, separated by commas."""
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in OTHERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(OTHERS)}")
    return names


def run(args: argparse.Namespace) -> int:
    """Print the report of the patched model.

    1 when it, or what it is compared with, does not run; under strict, when anything ran unfused; with --diff, when a
    site lost its kernel.
    """
    console = Console()
    if args.diff:
        return print_difference(console, *args.diff)
    try:
        report = report_of_run(args)
        console.print(report)
        console.print(how_it_ran(args))
        if args.json:
            report.to_json(args.json)
        if args.html:
            report.to_html(args.html)
        if args.compare:
            console.print(comparison_table(compare(args)))
    except EXPECTED as error:
        console.print(f"[red]{type(error).__name__}[/]: ", end="")
        console.print(str(error), markup=False, highlight=False)
        return 1
    return strict_code(console, report) if args.strict else 0


def report_of_run(args: argparse.Namespace) -> attnpatch.Report:
    """Load the model, patch it, run it, and return its report."""
    dtype = getattr(torch, args.dtype) if args.dtype else default_dtype(args.device)
    model = load(args.model, args.config, dtype, args.attn, args.device)
    attnpatch.patch(model, **({"backends": args.backends} if args.backends else {}))
    with Console(stderr=True).status("compiling and running"):
        generate_from_random(model, args.prompt_tokens, args.new_tokens)
        if args.time:
            with timed():
                generate_from_random(model, args.prompt_tokens, args.new_tokens)
    return attnpatch.report(model)


def how_it_ran(args: argparse.Namespace) -> str:
    """What the model was given."""
    given = f"{args.prompt_tokens:,} token ids drawn with seed {SEED}, no tokenizer needed"
    return f"ran{' twice' if args.time else ''} on {given}; then {args.new_tokens:,} new tokens"


def strict_code(console: Console, report: attnpatch.Report) -> int:
    """1, and how much ran unfused, when anything did; ``patch(strict=True)`` would end at the first, unreported."""
    refused, gaps = report.summary["refused"], len(report.gaps)
    if refused or gaps:
        console.print(f"[red]strict[/]: {refused} sites refused, {gaps} gaps")
    return 1 if refused or gaps else 0


def print_difference(console: Console, old: str, new: str) -> int:
    """Print what changed between two reports; 1 when a site lost its kernel or a file is no report."""
    try:
        found = attnpatch.Report.from_json(old).diff(attnpatch.Report.from_json(new))
    except (OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    console.print(found)
    return 1 if found.lost else 0


def generate_from_random(model: Any, prompt_tokens: int, new_tokens: int) -> None:
    """Greedy ``generate()`` of exactly ``new_tokens`` after a prompt of random tokens, always the same."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, model.config.vocab_size, (1, prompt_tokens), generator=generator).to(model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )


def compare(args: argparse.Namespace) -> list[Measurement]:
    """Measure the patched model and the implementations named, each in a fresh process, ours last.

    Raises:
        ValueError: the backends are limited, which a fresh process would not know.
    """
    if args.backends:
        raise ValueError("--compare measures in fresh processes: set ATTNPATCH_BACKENDS instead of --backends")
    dtype = args.dtype or str(default_dtype(args.device)).removeprefix("torch.")
    results = []
    for name in (*args.compare, OURS):
        with Console(stderr=True).status(f"measuring {name}"):
            case = name, args.prompt_tokens, dtype, args.device, args.new_tokens
            results.append(measure_in_child(*case, args.model, args.config))
    return results


def comparison_table(results: Sequence[Measurement]) -> Table:
    """Prefill, its memory and decode side by side, and the last one's as a multiple of each of the others'."""
    *others, ours = results
    table = Table(title="batch 1, medians; memory is the peak above the loaded model", title_justify="left")
    table.add_column("")
    for header in (*(r.implementation for r in results), *(f"vs {r.implementation}" for r in others)):
        table.add_column(header, justify="right")
    for title, unit, value in _rows(ours):
        values = [value(r) for r in results]
        cells = [f"{v:,.{1 if v < 100 else 0}f} {unit}" if v else "?" for v in values]
        ratios = [f"{values[-1] / v:.2f}x" if v and values[-1] else "" for v in values[:-1]]
        table.add_row(title, *cells, *ratios)
    return table


def _rows(ours: Measurement) -> Iterator[tuple[str, str, Callable[[Measurement], float | None]]]:
    yield f"prefill {ours.seqlen:,}", "ms", lambda r: r.prefill_ms
    yield f"memory {ours.seqlen:,}", "MiB", lambda r: r.peak_bytes and r.peak_bytes / 2**20
    yield "decode", "tok/s", lambda r: r.decode_tokens_per_s


def default_device() -> str:
    """The GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> torch.dtype:
    """What models run in: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32
