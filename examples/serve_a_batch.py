"""Prompts of different lengths in one batch, padded on the left: each gets the text that it gets alone, sooner."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import shared
import torch
from torch import Tensor

import attnpatch
from attnpatch.cli.checkpoint import load_checkpoint

PROMPTS = (
    "Water boils at",
    "The capital of France is",
    "The three primary colours are red, yellow and",
    "Once upon a time a fox lived at the edge of a wood with her two friends, an owl and a hare. One day",
)


class Row(NamedTuple):
    """All prompts, so many at a time: tokens read in the prefills, how many of them are padding, and seconds."""

    batch: int
    read: int
    padding: int
    seconds: float
    tokens_per_s: float


class Served(NamedTuple):
    """New tokens ``[prompts, new]``, and of the prompts' own those read and those that are padding."""

    tokens: Tensor
    read: int
    padding: int


def serve(model: Any, tokenizer: Any, batch: int, new_tokens: int) -> Served:
    """Greedy text after every prompt, ``batch`` prompts at a time."""
    tokens, masks = [], []
    for start in range(0, len(PROMPTS), batch):
        inputs = tokenizer(list(PROMPTS[start : start + batch]), return_tensors="pt", padding=True).to(model.device)
        asked = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False}
        tokens.append(model.generate(**inputs, **asked)[:, -new_tokens:])
        masks.append(inputs["attention_mask"])
    read = sum(mask.numel() for mask in masks)
    return Served(torch.cat(tokens), read, read - sum(int(mask.sum()) for mask in masks))


def check(together: Tensor, alone: Tensor) -> None:
    for prompt, found, expected in zip(PROMPTS, together.tolist(), alone.tolist(), strict=True):
        assert found == expected, f"{prompt!r} goes on with {found}, alone with {expected}"


def measure(model: Any, tokenizer: Any, new_tokens: int) -> tuple[list[Row], Tensor]:
    """A row for one by one and one for all together, and the new tokens, the same for both."""
    runs: shared.Runs = {
        str(batch): lambda batch=batch: serve(model, tokenizer, batch, new_tokens) for batch in (1, len(PROMPTS))
    }
    served = {batch: run() for batch, run in runs.items()}
    together, alone = served[str(len(PROMPTS))].tokens, served["1"].tokens
    check(together, alone)
    ms = shared.times_as_called(runs, model.device)
    rows = [
        Row(int(batch), found.read, found.padding, ms[batch] / 1e3, found.tokens.numel() / ms[batch] * 1e3)
        for batch, found in served.items()
    ]
    return rows, together


def show(rows: list[Row], title: str) -> None:
    headers = ("prompts\nat a time", "tokens\nread", "of them\npadding", "s", "new\ntokens/s", "this / one\nby one")
    cells = [
        (
            *(f"{row.batch}", f"{row.read:,}", f"{row.padding / row.read:.0%}", f"{row.seconds:,.2f}"),
            *(f"{row.tokens_per_s:,.1f}", f"{row.tokens_per_s / rows[0].tokens_per_s:.2f}"),
        )
        for row in rows
    ]
    shared.print_table(title, headers, cells)


def plot(rows: list[Row], title: str, path: str) -> None:
    figure, (speed, padding) = shared.panels(2, title)
    groups = [f"{row.batch} at a time" for row in rows]
    shares = [100 * row.padding / row.read for row in rows]
    shared.bars(speed, groups, {"": [row.tokens_per_s for row in rows]}, "new tokens/s", "{:,.1f}")
    shared.bars(padding, groups, {"": shares}, "padding, % of the tokens read", "{:,.0f} %")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = shared.parser(__doc__)
    parser.add_argument("--model", metavar="DIR", help=shared.MODEL)
    parser.add_argument("--new-tokens", type=shared.count, metavar="N", help="default: 8, on a GPU 64")
    args = parser.parse_args(argv)
    shared.needs(parser, "transformers")
    with shared.loading(parser):  # in float32, so that the text is the same to the last token
        model, tokenizer = load_checkpoint(args.model, torch.float32, "eager", args.device)
    tokenizer.padding_side = "left"
    attnpatch.patch(model, strict=True, cache="buffered")
    new_tokens = args.new_tokens or (64 if args.device.type == "cuda" else 8)
    rows, tokens = measure(model, tokenizer, new_tokens)
    title = f"{len(PROMPTS)} prompts, {new_tokens} new tokens each, float32\n{shared.machine(args.device)}"
    show(rows, title)
    console = shared.console()
    for prompt, new in zip(PROMPTS, tokens, strict=True):
        console.print(prompt + tokenizer.decode(new, skip_special_tokens=True), markup=False, highlight=False)
    console.print(attnpatch.report(model))
    if args.plot:
        plot(rows, title, args.plot)
    return rows


if __name__ == "__main__":
    main()
