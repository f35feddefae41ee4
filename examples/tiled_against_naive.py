"""softmax(q k^T) v written naively, against attention a tile at a time: the scores are never all there."""

from collections.abc import Sequence
from typing import NamedTuple

import shared
import torch

import attnpatch
from attnpatch.cli.measure import peak_growth
from attnpatch.dispatch import recording
from attnpatch.testing.tolerance import run_float64


class Row(NamedTuple):
    """One length. Scores are the bytes of one S x S matrix of every head; None is a peak that nobody knows."""

    seqlen: int
    backend: str
    score_bytes: int
    peak: dict[str, int | None]
    ms: dict[str, float]
    error: dict[str, float]


def measure(seqlen: int, heads: int, head_dim: int, device: torch.device) -> Row:
    q, k, v = shared.draw(*[(1, heads, seqlen, head_dim)] * 3, device=device)
    runs: shared.Runs = {
        "naive": lambda: shared.naive(q, k, v),
        "attnpatch": lambda: attnpatch.attention(q, k, v, head_dim**-0.5),
    }
    with recording() as seen:
        outputs = {name: run() for name, run in runs.items()}
    error = shared.errors(outputs, outputs["naive"], run_float64(shared.naive, q, k, v))
    del outputs
    peak = {name: peak_growth(run, device) for name, run in runs.items()}
    score_bytes = heads * seqlen**2 * q.element_size()
    return Row(seqlen, seen.dispatches[0].backend, score_bytes, peak, shared.times(runs, device), error)


def show(rows: list[Row], title: str) -> None:
    headers = (
        *("S", "scores\nMiB", "peak MiB\nnaive", "peak MiB\nattnpatch", "ms\nnaive", "ms\nattnpatch"),
        *("error\nnaive", "error\nattnpatch", "runs on"),
    )
    cells = [
        (
            *(f"{row.seqlen:,}", f"{row.score_bytes / 2**20:,.0f}"),
            *("?" if peak is None else f"{peak / 2**20:,.1f}" for peak in row.peak.values()),
            *(f"{ms:,.2f}" for ms in row.ms.values()),
            *(f"{error:.1e}" for error in row.error.values()),
            row.backend,
        )
        for row in rows
    ]
    shared.print_table(title, headers, cells)


def plot(rows: list[Row], title: str, path: str) -> None:
    figure, (memory, time) = shared.panels(2, title)
    seqlens = [row.seqlen for row in rows]
    peaks = {name: [(row.peak[name] or 0) / 2**20 for row in rows] for name in rows[0].peak}
    one = {"one S x S matrix of scores": [row.score_bytes / 2**20 for row in rows]}
    shared.lines(memory, seqlens, peaks | one, "S, queries and keys", "peak memory above q, k and v, MiB")
    shared.lines(time, seqlens, shared.series([row.ms for row in rows]), "S, queries and keys", "ms")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = shared.parser(__doc__)
    shared.sizes(parser, "default: 512 to 2048, on a GPU to 4096", heads=8, head_dim=64)
    args = parser.parse_args(argv)
    seqlens = args.seqlens or (512, 1024, 2048, 4096)[: 4 if args.device.type == "cuda" else 3]
    rows = [measure(seqlen, args.heads, args.head_dim, args.device) for seqlen in seqlens]
    title = f"{args.heads} heads of {args.head_dim}, full attention\n{shared.machine(args.device)}"
    counted = "torch's CUDA allocator" if args.device.type == "cuda" else "the process's resident set"
    show(
        rows, f"{title}\npeak: how far {counted} grows above q, k and v in one call; error: the largest against float64"
    )
    if args.plot:
        plot(rows, title, args.plot)
    return rows


if __name__ == "__main__":
    main()
