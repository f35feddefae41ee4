"""Patch a model, run a prefill and a few decode steps, and print which kernel each attention got."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console

import attnpatch
from attnpatch.cli.checkpoint import NAME, CheckpointMissing, load_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``attnpatch report``."""
    parser.add_argument("--model", help=f"path of a causal language model; default {NAME}")
    parser.add_argument("--attn", choices=("eager", "sdpa"), default="eager", help="Hugging Face's implementation")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default float32, bfloat16 on a GPU"
    )
    parser.add_argument("--device", default=default_device(), help="default %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="default %(default)s")
    parser.add_argument("--new-tokens", type=int, default=4, help="default %(default)s")
    parser.add_argument("--strict", action="store_true", help="fail when any attention stays unfused")
    parser.add_argument("--backends", nargs="+", default=[], metavar="NAME", help="only these backends, in order")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON, too")
    parser.add_argument(
        "--diff", nargs=2, metavar=("OLD", "NEW"), help="run nothing: compare two reports written with --json"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report of the patched model; 1 when strict refuses it or the checkpoint is missing."""
    console = Console()
    if args.diff:
        return print_difference(console, *args.diff)
    dtype = getattr(torch, args.dtype) if args.dtype else default_dtype(args.device)
    try:
        model, _ = load_checkpoint(args.model, dtype, args.attn, args.device)
        attnpatch.patch(model, strict=args.strict, **({"backends": args.backends} if args.backends else {}))
        with Console(stderr=True).status("compiling and running"):
            generate_from_random(model, args.prompt_tokens, args.new_tokens)
    except (CheckpointMissing, attnpatch.AttentionNotPatched, attnpatch.NoBackend, ValueError) as error:
        console.print(f"[red]{type(error).__name__}[/]: ", end="")
        console.print(str(error), markup=False, highlight=False)
        return 1
    report = attnpatch.report(model)
    console.print(report)
    if args.json:
        report.to_json(args.json)
    return 0


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
    """Greedy ``generate()`` of exactly ``new_tokens`` after a prompt of random tokens."""
    ids = torch.randint(0, model.config.vocab_size, (1, prompt_tokens), device=model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )


def default_device() -> str:
    """The GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> torch.dtype:
    """What models run in: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32
