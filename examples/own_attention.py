"""Attention written by hand, in a model that no library knows: the rewrite goes by what it computes."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import shared
import torch
from torch import Tensor, nn

import attnpatch
from attnpatch.testing.tolerance import run_float64


class Row(NamedTuple):
    """One length; errors and times of "by hand" and "patched", bytes not moved in one call."""

    seqlen: int
    error: dict[str, float]
    kv_bytes: int
    score_bytes: int
    ms: dict[str, float]


class Attention(nn.Module):
    """Causal attention with four query heads per key and value head, spelled out."""

    def __init__(self, width: int = 256, num_heads: int = 8, num_kv_heads: int = 2) -> None:
        super().__init__()
        self.head_dim, self.group_size = width // num_heads, num_heads // num_kv_heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seqlen, _ = x.shape
        q = self.q(x).view(batch, seqlen, -1, self.head_dim).transpose(1, 2)
        k, v = self.kv(x).view(batch, seqlen, -1, 2, self.head_dim).permute(3, 0, 2, 1, 4)
        k, v = (t.repeat_interleave(self.group_size, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        hidden = torch.ones(seqlen, seqlen, dtype=torch.bool, device=x.device).triu(1)
        o = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v
        return self.out(o.transpose(1, 2).reshape(batch, seqlen, -1))


def measure(model: Attention, patched: Attention, batch: int, seqlen: int) -> Row:
    weight = next(model.parameters())
    (x,) = shared.draw((batch, seqlen, weight.shape[1]), device=weight.device)
    runs: shared.Runs = {"by hand": lambda: model(x), "patched": lambda: patched(x)}
    before = shared.not_moved(attnpatch.report(patched))
    outputs = {name: run() for name, run in runs.items()}
    after = shared.not_moved(attnpatch.report(patched))
    error = shared.errors(outputs, outputs["by hand"], run_float64(model, x))
    return Row(seqlen, error, after[0] - before[0], after[1] - before[1], shared.times(runs, x.device))


def show(rows: list[Row], title: str) -> None:
    headers = (
        *("S", "ms\nby hand", "ms\npatched", "by hand /\npatched", "K/V copies\nMiB", "scores\nMiB"),
        *("error\nby hand", "error\npatched"),
    )
    cells = [
        (
            *(f"{row.seqlen:,}", *(f"{ms:,.2f}" for ms in row.ms.values())),
            f"{row.ms['by hand'] / row.ms['patched']:.2f}",
            *(f"{size / 2**20:,.1f}" for size in (row.kv_bytes, row.score_bytes)),
            *(f"{error:.1e}" for error in row.error.values()),
        )
        for row in rows
    ]
    shared.print_table(title, headers, cells)


def plot(rows: list[Row], title: str, path: str) -> None:
    figure, (time, moved) = shared.panels(2, title)
    seqlens = [row.seqlen for row in rows]
    sizes = [{"K/V copies": row.kv_bytes, "scores": row.score_bytes} for row in rows]
    shared.lines(time, seqlens, shared.series([row.ms for row in rows]), "S, tokens", "ms")
    shared.lines(moved, seqlens, shared.series(sizes, 2**20), "S, tokens", "not moved, MiB")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = shared.parser(__doc__)
    shared.sizes(parser, "default: 256 to 1024, on a GPU to 4096", batch=2)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model = Attention().to(args.device, shared.dtype_on(args.device))
    patched = attnpatch.patch(copy.deepcopy(model), strict=True)
    seqlens = args.seqlens or (256, 512, 1024, 2048, 4096)[: 5 if args.device.type == "cuda" else 3]
    with torch.no_grad():
        rows = [measure(model, patched, args.batch, seqlen) for seqlen in seqlens]
    title = f"8 heads of 32 on 2 K/V heads, causal, batch {args.batch}\n{shared.machine(args.device)}"
    show(rows, f"{title}\nK/V copies, scores: not moved in one call; error: the largest against float64")
    shared.console().print(attnpatch.report(patched))
    if args.plot:
        plot(rows, title, args.plot)
    return rows


if __name__ == "__main__":
    main()
