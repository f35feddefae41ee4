"""A cache in 4 bits: K and V multiplied out first and attention over them, against attention over the codes."""

from argparse import Namespace
from collections.abc import Sequence
from typing import NamedTuple

import shared
import torch
from torch import Tensor

import attnpatch
from attnpatch import tbq4
from attnpatch.dispatch import recording
from attnpatch.testing.tolerance import run_float64

DENSE = "dense: K and V in bfloat16"


class Row(NamedTuple):
    """One length. Bytes of K and V moved, beside what a cache in bfloat16 would be, ``dense``."""

    seqlen: int
    backend: str
    moved: dict[str, int]
    dense: int
    ms: dict[str, float]
    error: dict[str, float]


def measure(seqlen: int, args: Namespace) -> Row:
    kv = args.batch, args.kv_heads, seqlen, args.head_dim
    query = args.batch, args.kv_heads * args.group_size, 1, args.head_dim
    q, k, v = shared.draw(query, kv, kv, device=args.device, dtype=torch.bfloat16)
    (k_codes, k_norms), (v_codes, v_norms) = tbq4.encode(k), tbq4.encode(v)
    sm_scale = args.head_dim**-0.5

    def decoded(dtype: torch.dtype) -> list[Tensor]:
        pairs = (k_codes, k_norms), (v_codes, v_norms)
        return [tbq4.decode(codes, norms, args.head_dim, dtype) for codes, norms in pairs]

    def apart() -> Tensor:
        dense_k, dense_v = decoded(q.dtype)
        return attnpatch.attention(q, dense_k, dense_v, sm_scale)

    def fused() -> Tensor:
        return attnpatch.attention(q, k_codes, v_codes, sm_scale, k_scale=k_norms, v_scale=v_norms)

    runs: shared.Runs = {"apart": apart, "fused": fused}
    with recording() as seen:
        outputs = {name: run() for name, run in runs.items()}
    exact = run_float64(shared.naive, q, *decoded(torch.float32))
    error = shared.errors(outputs, shared.naive(q, *decoded(q.dtype)), exact)
    codes, dense = shared.nbytes(k_codes, k_norms, v_codes, v_norms), shared.nbytes(k, v)
    moved = {"apart": codes + 2 * dense, "fused": codes}
    return Row(seqlen, seen.dispatches[-1].backend, moved, dense, shared.times(runs, args.device), error)


def show(rows: list[Row], title: str) -> None:
    headers = (
        *("keys", "dense\nMiB", "moved, MiB\napart", "moved, MiB\nfused", "apart /\nfused", "ms\napart", "ms\nfused"),
        *("error\nfused", "runs on"),
    )
    cells = [
        (
            *(f"{row.seqlen:,}", f"{row.dense / 2**20:,.1f}"),
            *(f"{size / 2**20:,.2f}" for size in row.moved.values()),
            f"{row.moved['apart'] / row.moved['fused']:.2f}",
            *(f"{ms:,.2f}" for ms in row.ms.values()),
            *(f"{row.error['fused']:.1e}", row.backend),
        )
        for row in rows
    ]
    shared.print_table(title, headers, cells)


def plot(rows: list[Row], title: str, path: str) -> None:
    figure, (size, time) = shared.panels(2, title)
    keys = [row.seqlen for row in rows]
    moved = shared.series([row.moved for row in rows], 2**20)
    dense = {"bfloat16, never in 4 bits": [row.dense / 2**20 for row in rows]}
    shared.lines(size, keys, moved | dense, "keys", "K and V moved by a step, MiB")
    shared.lines(time, keys, shared.series([row.ms for row in rows]), "keys", "ms")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = shared.parser(__doc__)
    keys = "keys; default 2048 to 8192, on a GPU to 32768"
    shared.sizes(parser, keys, batch=1, kv_heads=8, group_size=4, head_dim=128)
    args = parser.parse_args(argv)
    try:
        tbq4.blocks_of(args.head_dim)
    except ValueError as error:
        parser.error(str(error))
    seqlens = args.seqlens or (2048, 4096, 8192, 16384, 32768)[: 5 if args.device.type == "cuda" else 3]
    rows = [measure(seqlen, args) for seqlen in seqlens]
    heads = f"{args.kv_heads * args.group_size} / {args.kv_heads} heads of {args.head_dim}"
    title = f"one query of {heads}, sequences: {args.batch}\n{shared.machine(args.device)}"
    show(rows, f"{title}\nmoved: codes and norms read; apart, K and V in bfloat16 written and read, too. {DENSE}")
    if args.plot:
        plot(rows, title, args.plot)
    return rows


if __name__ == "__main__":
    main()
