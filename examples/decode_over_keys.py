"""One query on a long cache: a program per K/V head leaves most of a GPU idle, so the keys are split, too.

Each split attends on its own keys and keeps the logarithm of its softmax's denominator, the lse. Two lines merge them:

    lse = log sum_i exp(lse_i);   o = sum_i exp(lse_i - lse) o_i

On a CPU one backend takes such a call and nothing is spread over programs, so only this arithmetic is shown. On a GPU
every number of splits is timed beside the one that the package chooses.
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import shared
import torch
from torch import Tensor

from attnpatch import ops
from attnpatch.attention_call import AttentionCall
from attnpatch.testing.tolerance import allowed_error, run_float64


class Row(NamedTuple):
    """One number of splits. ``waves``: how often every multiprocessor is filled; ``ms`` is None on a CPU."""

    splits: int
    keys: int
    programs: int
    waves: float
    error: float
    ms: float | None = None
    chosen: bool = False


def attend_in_splits(q: Tensor, k: Tensor, v: Tensor, splits: int) -> Tensor:
    """Partial results by the operator that also returns the lse, merged in torch."""
    keys = -(-k.shape[2] // splits)
    pairs = zip(k.split(keys, dim=2), v.split(keys, dim=2), strict=True)
    outputs, lses = zip(*(ops.attention_lse(q, *pair, q.shape[-1] ** -0.5) for pair in pairs), strict=True)
    partial = torch.stack(lses)
    weights = (partial - partial.logsumexp(dim=0)).exp()[..., None]
    return (weights * torch.stack(outputs)).sum(dim=0).to(q.dtype)


def on_cpu(inputs: list[Tensor], args: Namespace) -> tuple[list[Row], float]:
    """A row per number of splits, for a GPU of that many multiprocessors, and the error allowed."""
    q, k, v = inputs
    original, exact = shared.naive(q, k, v), run_float64(shared.naive, q, k, v)
    rows = []
    for splits in args.splits:
        error = shared.errors({"": attend_in_splits(q, k, v, splits)}, original, exact)[""]
        keys = -(-args.seqlen // splits)
        programs = args.kv_heads * -(-args.seqlen // keys)
        rows.append(Row(programs // args.kv_heads, keys, programs, programs / args.multiprocessors, error))
    return rows, allowed_error(original, exact, original.dtype)


def by_kernel(inputs: list[Tensor], args: Namespace) -> tuple[list[Row], float]:
    """A row per number of splits, and for the chosen one, by the kernel that dispatch takes."""
    from attnpatch.kernels.decode.configs import choose_config, choose_plan, multiprocessors
    from attnpatch.kernels.decode.launch import decode

    q, k, v = inputs
    call = AttentionCall(q, k, v, args.head_dim**-0.5)
    config = choose_config(call)
    plans = {n: choose_plan(call, config, n) for n in (*args.splits, 0)}  # 0: the package chooses
    runs: shared.Runs = {str(n): partial(decode, call, num_splits=n) for n in plans}
    original, exact = shared.naive(q, k, v), run_float64(shared.naive, q, k, v)
    errors = shared.errors({name: run() for name, run in runs.items()}, original, exact)
    ms, at_once = shared.times(runs, q.device), config.programs_per_sm * multiprocessors(q.device)
    rows = [
        Row(
            *(plan.num_splits, -(-args.seqlen // plan.num_splits), plan.programs, plan.programs / at_once),
            *(errors[str(n)], ms[str(n)], n == 0),
        )
        for n, plan in plans.items()
    ]
    return rows, allowed_error(original, exact, original.dtype)


def show(rows: list[Row], title: str) -> None:
    headers = ("splits", "keys\neach", "programs", "waves", "error", "ms", "")
    cells = [
        (
            *(f"{row.splits:,}", f"{row.keys:,}", f"{row.programs:,}", f"{row.waves:.2f}", f"{row.error:.1e}"),
            *("" if row.ms is None else f"{row.ms:.4f}", "chosen" if row.chosen else ""),
        )
        for row in rows
    ]
    shared.print_table(title, headers, cells)


def plot(rows: list[Row], allowed: float, title: str, path: str) -> None:
    figure, (left, right) = shared.panels(2, title)
    tried = [row for row in rows if not row.chosen]
    splits = [row.splits for row in tried]
    _left(left, splits, tried, next((row for row in rows if row.chosen), None))
    found = {"split and merged": [row.error for row in tried], "allowed": [allowed] * len(tried)}
    shared.lines(right, splits, found, "splits of the keys", "largest error against float64")
    figure.savefig(path, dpi=120)


def _left(axes: Any, splits: list[int], rows: list[Row], chosen: Row | None) -> None:
    """Times, or on a CPU how many programs there would be."""
    if chosen is None:
        shared.lines(
            axes, splits, {"programs": [row.waves for row in rows]}, "splits of the keys", "programs per multiprocessor"
        )
        axes.axhline(1, color="grey", linestyle=":", label="every multiprocessor has one")
    else:
        shared.lines(axes, splits, {"tried": [row.ms or 0 for row in rows]}, "splits of the keys", "ms")
        axes.plot(chosen.splits, chosen.ms, "*", markersize=14, label=f"chosen: {chosen.splits}")
    axes.legend(frameon=False)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = shared.parser(__doc__.partition("\n")[0])
    parser.add_argument(
        "--splits", type=shared.count, nargs="+", default=(1, 2, 4, 8, 16, 32), metavar="N", help="default: 1 to 32"
    )
    parser.add_argument("--seqlen", type=shared.count, metavar="S", help="keys; default 32768, on a GPU 131072")
    parser.add_argument(
        "--multiprocessors",
        type=shared.count,
        default=132,
        metavar="N",
        help="on a CPU, to count for; default: an H200's",
    )
    for name, default in (("kv-heads", 8), ("group-size", 4), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=shared.count, default=default, metavar="N", help="default %(default)s")
    args = parser.parse_args(argv)
    on_gpu = args.device.type == "cuda"
    args.seqlen = args.seqlen or (131072 if on_gpu else 32768)
    if max(args.splits) > args.seqlen:
        parser.error(f"{args.seqlen} keys cannot be cut into {max(args.splits)} splits")
    kv = 1, args.kv_heads, args.seqlen, args.head_dim
    inputs = shared.draw((1, args.kv_heads * args.group_size, 1, args.head_dim), kv, kv, device=args.device)
    rows, allowed = (by_kernel if on_gpu else on_cpu)(inputs, args)
    heads = f"{args.kv_heads * args.group_size} / {args.kv_heads} heads of {args.head_dim}"
    where = "" if on_gpu else f", counted for a GPU of {args.multiprocessors} multiprocessors"
    title = f"one query of {heads} on {args.seqlen:,} keys{where}\n{shared.machine(args.device)}"
    waves = "all programs over those that run at once" if on_gpu else "programs over multiprocessors"
    show(rows, f"{title}\nwaves: {waves}; error: the largest against float64, of {allowed:.1e} allowed")
    if args.plot:
        plot(rows, allowed, title, args.plot)
    return rows


if __name__ == "__main__":
    main()
