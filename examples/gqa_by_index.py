"""Query heads that share keys and values: K and V repeated for each of them, against K and V read by index."""

from argparse import Namespace
from collections.abc import Sequence
from typing import NamedTuple

import shared
from torch import Tensor

import attnpatch
from attnpatch.testing.tolerance import run_float64


class Row(NamedTuple):
    """One group size. ``read``: bytes of K and V that attention reads; ``copied``: what the repeat reads and writes."""

    group_size: int
    num_kv_heads: int
    read: dict[str, int]
    copied: int
    ms: dict[str, float]
    error: dict[str, float]


def repeat_kv(x: Tensor, group_size: int) -> Tensor:
    """As Hugging Face models do it: expand, and a reshape that has to copy."""
    return x[:, :, None].expand(-1, -1, group_size, -1, -1).flatten(1, 2)


def measure(group_size: int, args: Namespace) -> Row:
    kv_heads = args.heads // group_size
    kv = 1, kv_heads, args.seqlen, args.head_dim
    q, k, v = shared.draw((1, args.heads, args.rows, args.head_dim), kv, kv, device=args.device)
    sm_scale = args.head_dim**-0.5

    def repeated() -> Tensor:
        return attnpatch.attention(q, repeat_kv(k, group_size), repeat_kv(v, group_size), sm_scale)

    def by_index() -> Tensor:
        return attnpatch.attention(q, k, v, sm_scale)

    runs: shared.Runs = {"repeated": repeated, "by index": by_index}
    exact = run_float64(shared.naive, q, k, v)
    error = shared.errors({name: run() for name, run in runs.items()}, shared.naive(q, k, v), exact)
    once, copies = shared.nbytes(k, v), shared.nbytes(repeat_kv(k, group_size), repeat_kv(v, group_size))
    copied = 0 if group_size == 1 else once + copies
    return Row(
        group_size,
        kv_heads,
        {"repeated": copies, "by index": once},
        copied,
        shared.times(runs, args.device),
        error,
    )


def show(rows: list[Row], title: str) -> None:
    headers = (
        *("heads per\nK/V head", "K/V\nheads", "read, MiB\nrepeated", "read, MiB\nby index", "copied\nMiB"),
        *("ms\nrepeated", "ms\nby index", "error\nby index"),
    )
    cells = [
        (
            *(str(row.group_size), str(row.num_kv_heads)),
            *(f"{size / 2**20:,.1f}" for size in (*row.read.values(), row.copied)),
            *(f"{ms:,.3f}" for ms in row.ms.values()),
            f"{row.error['by index']:.1e}",
        )
        for row in rows
    ]
    shared.print_table(title, headers, cells)


def plot(rows: list[Row], title: str, path: str) -> None:
    figure, (size, time) = shared.panels(2, title)
    groups = [row.group_size for row in rows]
    read = {f"read, {name}": [row.read[name] / 2**20 for row in rows] for name in rows[0].read}
    moved = {"read, repeated, and copied before": [(row.read["repeated"] + row.copied) / 2**20 for row in rows]}
    shared.lines(size, groups, read | moved, "query heads per K/V head", "K and V moved, MiB")
    shared.lines(time, groups, shared.series([row.ms for row in rows]), "query heads per K/V head", "ms")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = shared.parser(__doc__)
    parser.add_argument("--heads", type=shared.count, default=16, metavar="N", help="of q; default %(default)s")
    parser.add_argument(
        "--group-sizes", type=shared.count, nargs="+", default=(1, 2, 4, 8), metavar="G", help="default: 1 2 4 8"
    )
    parser.add_argument("--seqlen", type=shared.count, metavar="S", help="keys; default 8192, on a GPU 65536")
    parser.add_argument("--rows", type=shared.count, default=1, metavar="N", help="queries; default 1, a decode step")
    shared.sizes(parser, head_dim=64)
    args = parser.parse_args(argv)
    args.seqlen = args.seqlen or (65536 if args.device.type == "cuda" else 8192)
    for group_size in args.group_sizes:
        if args.heads % group_size:
            parser.error(f"{args.heads} heads cannot be in groups of {group_size}: give --heads a multiple of it")
    rows = [measure(group_size, args) for group_size in args.group_sizes]
    shape = f"{args.heads} query heads of {args.head_dim}, queries: {args.rows}, keys: {args.seqlen:,}"
    title = f"{shape}\n{shared.machine(args.device)}"
    show(rows, f"{title}\nread: K and V by attention; copied: read and written by the repeat before it")
    if args.plot:
        plot(rows, title, args.plot)
    return rows


if __name__ == "__main__":
    main()
