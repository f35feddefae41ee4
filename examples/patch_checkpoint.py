"""Patch a Hugging Face checkpoint in one line: times before and after, what is no longer moved, and the report."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, NamedTuple

import shared
from torch import Tensor

import attnpatch
from attnpatch.cli.checkpoint import load_checkpoint
from attnpatch.cli.measure import load
from attnpatch.testing.tolerance import run_float64

PROMPT = "The capital of France is"


class Row(NamedTuple):
    """One length of the prompt: errors by attention, bytes not moved in one prefill, and how fast each is."""

    seqlen: int
    error: dict[str, float]
    kv_bytes: int
    score_bytes: int
    speed: dict[str, shared.Speed]


def model_and_tokenizer(parser: ArgumentParser, args: Namespace) -> tuple[Any, Any]:
    """With the eager attention of transformers; random weights read no text."""
    dtype = shared.dtype_on(args.device)
    with shared.loading(parser):
        if args.config:
            return load(None, args.config, dtype, "eager", args.device), None
        return load_checkpoint(args.model, dtype, "eager", args.device)


def first_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of the first new token, from a prefill as ``generate()`` does it."""
    output = shared.generate(model, ids, 1, output_logits=True, return_dict_in_generate=True)
    return output.logits[0].to(model.dtype)


def exact_logits(model: Any, ids: Tensor) -> Tensor:
    """Those in float64: one weight at a time, for a copy of the whole model might not fit."""
    return run_float64(model.forward, ids, logits_to_keep=1).logits[:, -1]


def check(model: Any, ids: Tensor, original: Tensor, exact: Tensor) -> tuple[dict[str, float], int, int]:
    """Errors of the unpatched and of the patched model, and what a prefill of the latter does not move."""
    before = shared.not_moved(attnpatch.report(model))
    error = shared.errors({"eager": original, "attnpatch": first_logits(model, ids)}, original, exact)
    after = shared.not_moved(attnpatch.report(model))
    return error, after[0] - before[0], after[1] - before[1]


def write(model: Any, tokenizer: Any, new_tokens: int) -> str:
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(model.device)
    return tokenizer.decode(shared.generate(model, ids, new_tokens)[0], skip_special_tokens=True)


def measure(model: Any, tokenizer: Any, prompts: list[Tensor], new_tokens: int) -> tuple[list[Row], str, Any]:
    """A row per prompt; the text and the report of the model while it was patched. It is left as it was."""
    original = [(first_logits(model, ids), exact_logits(model, ids)) for ids in prompts]

    attnpatch.patch(model, strict=True)

    checked = [check(model, ids, *pair) for ids, pair in zip(prompts, original, strict=True)]
    patched = [shared.speed(model, ids, new_tokens) for ids in prompts]
    text = write(model, tokenizer, new_tokens) if tokenizer else ""
    report = attnpatch.report(model)
    attnpatch.unpatch(model)
    rows = [
        Row(ids.shape[1], *found, {"eager": shared.speed(model, ids, new_tokens), "attnpatch": speed})
        for ids, found, speed in zip(prompts, checked, patched, strict=True)
    ]
    return rows, text, report


def show(rows: list[Row], title: str) -> None:
    headers = (
        *("S", "first token, ms\neager", "first token, ms\nattnpatch", "tokens/s\neager", "tokens/s\nattnpatch"),
        *("K/V copies\nMiB", "scores\nMiB", "error\neager", "error\nattnpatch"),
    )
    cells = [
        (
            f"{row.seqlen:,}",
            *(f"{speed.first_ms:,.1f}" for speed in row.speed.values()),
            *(f"{speed.tokens_per_s:,.1f}" for speed in row.speed.values()),
            *(f"{size / 2**20:,.1f}" for size in (row.kv_bytes, row.score_bytes)),
            *(f"{error:.1e}" for error in row.error.values()),
        )
        for row in rows
    ]
    shared.print_table(title, headers, cells)


def plot(rows: list[Row], title: str, path: str) -> None:
    figure, (first, after, moved) = shared.panels(3, title)
    groups = [f"S = {row.seqlen:,}" for row in rows]
    ms = [{name: speed.first_ms for name, speed in row.speed.items()} for row in rows]
    per_s = [{name: speed.tokens_per_s for name, speed in row.speed.items()} for row in rows]
    sizes = [{"K/V copies": row.kv_bytes, "scores": row.score_bytes} for row in rows]
    shared.bars(first, groups, shared.series(ms), "ms to the first token", "{:,.0f}")
    shared.bars(after, groups, shared.series(per_s), "tokens/s after it", "{:,.1f}")
    shared.bars(moved, groups, shared.series(sizes, 2**20), "not moved in one prefill, MiB", "{:,.0f}")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = shared.parser(__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help=shared.MODEL)
    source.add_argument("--config", metavar="FILE", help=f"{shared.CONFIG}, such as examples/llama-8b.json")
    shared.sizes(parser, "tokens of the prompt; default: 128 and 256, on a GPU 512, 2048 and 4096")
    parser.add_argument("--new-tokens", type=shared.several, metavar="N", help="default: 8, on a GPU 32")
    args = parser.parse_args(argv)
    on_gpu = args.device.type == "cuda"
    shared.needs(parser, "transformers")
    model, tokenizer = model_and_tokenizer(parser, args)
    seqlens = args.seqlens or ((512, 2048, 4096) if on_gpu else (128, 256))
    prompts = [shared.draw_ids(model, seqlen, args.device) for seqlen in seqlens]
    rows, text, report = measure(model, tokenizer, prompts, args.new_tokens or (32 if on_gpu else 8))
    size = f"{model.num_parameters() / 1e6:,.0f} million parameters"
    title = f"{type(model).__name__}, {size}, {shared.named(model.dtype)}\n{shared.machine(args.device)}"
    show(rows, f"{title}\nK/V copies, scores: not moved in one prefill; error: the largest of logits against float64")
    console = shared.console()
    console.print(text, markup=False, highlight=False)
    console.print(report)
    if args.plot:
        plot(rows, title, args.plot)
    return rows


if __name__ == "__main__":
    main()
