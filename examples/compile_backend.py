"""attnpatch as a backend of torch.compile: times and logits beside the original's, and the report."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import shared
import torch
from torch import Tensor

import attnpatch
from attnpatch.cli.measure import load
from attnpatch.testing.tolerance import max_error, run_float64


class Row(NamedTuple):
    """One way to run the model: seconds of the first call, which compiles, milliseconds of the next, and errors."""

    way: str
    first_s: float
    ms: float
    error: float
    difference: float


def ways(model: Any, inductor: bool) -> dict[str, Callable[..., Any]]:
    compiled = {"eager": model, "attnpatch": torch.compile(model, backend="attnpatch", options={"strict": True})}
    if inductor:
        options = {"strict": True, "rest": "inductor"}
        compiled["inductor"] = torch.compile(model, backend="inductor")
        compiled["attnpatch,\nrest inductor"] = torch.compile(model, backend="attnpatch", options=options)
    return compiled


def first_call(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Its logits, and seconds until they are there."""
    start = time.perf_counter()
    logits = run()
    logits[0, -1, 0].item()
    return logits, time.perf_counter() - start


def measure(model: Any, ids: Tensor, inductor: bool) -> list[Row]:
    runs: shared.Runs = {
        way: lambda compiled=compiled: compiled(ids).logits for way, compiled in ways(model, inductor).items()
    }
    first = {way: first_call(run) for way, run in runs.items()}
    logits = {way: found for way, (found, _) in first.items()}
    error = shared.errors(logits, logits["eager"], run_float64(model.forward, ids).logits)
    ms = shared.times_as_called(runs, ids.device)
    return [
        Row(way, seconds, ms[way], error[way], max_error(found, logits["eager"]))
        for way, (found, seconds) in first.items()
    ]


def show(rows: list[Row], title: str) -> None:
    headers = ("", "first call\ns", "ms", "eager /\nthis", "error", "logits' difference\nfrom eager")
    cells = [
        (
            *(row.way.replace("\n", " "), f"{row.first_s:,.1f}", f"{row.ms:,.1f}", f"{rows[0].ms / row.ms:.2f}"),
            *(f"{row.error:.1e}", f"{row.difference:.1e}"),
        )
        for row in rows
    ]
    shared.print_table(title, headers, cells)


def plot(rows: list[Row], title: str, path: str) -> None:
    figure, (first, after) = shared.panels(2, title)
    names = [row.way for row in rows]
    shared.bars(first, names, {"": [row.first_s for row in rows]}, "first call, which compiles, s", "{:,.1f}")
    shared.bars(after, names, {"": [row.ms for row in rows]}, "next calls, ms", "{:,.1f}")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = shared.parser(__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help=shared.MODEL)
    source.add_argument("--config", metavar="FILE", help=shared.CONFIG)
    parser.add_argument("--seqlen", type=shared.count, metavar="S", help="tokens; default 128, on a GPU 2048")
    parser.add_argument("--inductor", action="store_true", help="compile by Inductor, too: minutes on a CPU")
    args = parser.parse_args(argv)
    shared.needs(parser, "transformers")
    with shared.loading(parser):
        model = load(args.model, args.config, shared.dtype_on(args.device), "eager", args.device)
    ids = shared.draw_ids(model, args.seqlen or (2048 if args.device.type == "cuda" else 128), args.device)
    with torch.no_grad():
        rows = measure(model, ids, args.inductor)
    title = (
        f"{type(model).__name__}, {shared.named(model.dtype)}, {ids.shape[1]:,} tokens\n{shared.machine(args.device)}"
    )
    show(rows, f"{title}\nerror: the largest of all logits against float64")
    shared.console().print(attnpatch.report(model))
    if args.plot:
        plot(rows, title, args.plot)
    return rows


if __name__ == "__main__":
    main()
