"""Causal against full attention: its time is a little above one half, and how much is arithmetic.

The scores are computed in blocks. Of n x n blocks a causal mask leaves those below the diagonal and the n that it
crosses, which are computed whole: n (n + 1) / 2 of n^2, a share of (n + 1) / (2 n). What a call costs besides, and what
masking the crossed blocks costs, comes on top.
"""

from collections.abc import Sequence
from typing import NamedTuple

import shared
import torch
from torch import Tensor

import attnpatch
from attnpatch import dispatch
from attnpatch.attention_call import AttentionCall
from attnpatch.testing.tolerance import run_float64

TORCH_ROWS = {768: 256, 192: 64, 1: 32}
"""On a CPU attention is torch's SDPA: from so many rows on its blocks have so many, and end at their last row's key
(aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""


class Row(NamedTuple):
    """One length: blocks of ``block_m`` rows and ``block_n`` keys, how many of them causal attention computes."""

    seqlen: int
    block_m: int
    block_n: int
    blocks: int
    causal_blocks: int
    ms: dict[str, float]
    error: dict[str, float]

    @property
    def share_of_blocks(self) -> float:
        return self.causal_blocks / self.blocks

    @property
    def share_of_time(self) -> float:
        return self.ms["causal"] / self.ms["full"]

    @property
    def rest_ms(self) -> float:
        """What causal attention takes beyond its share of the blocks."""
        return self.ms["causal"] - self.share_of_blocks * self.ms["full"]


def naive_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def block_of(q: Tensor) -> tuple[int, int]:
    """Rows and keys of the blocks that causal attention of q is computed in."""
    if q.device.type == "cuda":
        return block_on_gpu(AttentionCall(q, q, q, q.shape[-1] ** -0.5, window_right=0))
    rows = next(rows for least, rows in TORCH_ROWS.items() if q.shape[2] >= least)
    return rows, rows


def block_on_gpu(call: AttentionCall) -> tuple[int, int]:
    if dispatch.choose(call)[0].name == "triton.prefill_hopper":
        from attnpatch.kernels.prefill_hopper import launch as hopper

        return hopper.BLOCK_M, hopper.choose_config(call).BLOCK_N
    from attnpatch.kernels.prefill import configs, launch

    config = configs.choose_config(call, launch.uses_descriptors(call))
    return config.BLOCK_M, config.BLOCK_N


def count_blocks(seqlen: int, block_m: int, block_n: int) -> tuple[int, int]:
    """Blocks of all scores, and of those that a row sees some key of, the last row of a block most."""
    starts = range(0, seqlen, block_m)
    seen = sum(-(-min(start + block_m, seqlen) // block_n) for start in starts)
    return len(starts) * -(-seqlen // block_n), seen


def measure(seqlen: int, heads: int, head_dim: int, device: torch.device) -> Row:
    q, k, v = shared.draw(*[(1, heads, seqlen, head_dim)] * 3, device=device)
    runs: shared.Runs = {
        "full": lambda: attnpatch.attention(q, k, v, head_dim**-0.5),
        "causal": lambda: attnpatch.attention(q, k, v, head_dim**-0.5, window_right=0),
    }
    error: dict[str, float] = {}
    for (name, run), plain in zip(runs.items(), (shared.naive, naive_causal), strict=True):
        error |= shared.errors({name: run()}, plain(q, k, v), run_float64(plain, q, k, v))
    block = block_of(q)
    return Row(seqlen, *block, *count_blocks(seqlen, *block), shared.times(runs, device), error)


def show(rows: list[Row], title: str) -> None:
    headers = (
        *("S", "block", "blocks\nfull", "blocks\ncausal", "share of\nblocks", "share of\ntime", "ms\nfull"),
        *("ms\ncausal", "rest\nms", "error\ncausal"),
    )
    cells = [
        (
            *(f"{row.seqlen:,}", f"{row.block_m} x {row.block_n}", f"{row.blocks:,}", f"{row.causal_blocks:,}"),
            *(f"{row.share_of_blocks:.3f}", f"{row.share_of_time:.3f}"),
            *(f"{ms:,.2f}" for ms in (*row.ms.values(), row.rest_ms)),
            f"{row.error['causal']:.1e}",
        )
        for row in rows
    ]
    shared.print_table(title, headers, cells)


def plot(rows: list[Row], title: str, path: str) -> None:
    figure, (axes,) = shared.panels(1, title)
    shares = {
        "time, measured": [row.share_of_time for row in rows],
        "blocks computed, counted": [row.share_of_blocks for row in rows],
    }
    shared.lines(axes, [row.seqlen for row in rows], shares, "S, queries and keys", "causal / full")
    axes.axhline(0.5, color="grey", linestyle=":")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = shared.parser(__doc__)
    shared.sizes(parser, "default: 512 to 2048, on a GPU to 8192", heads=8, head_dim=64)
    args = parser.parse_args(argv)
    seqlens = args.seqlens or (512, 1024, 2048, 4096, 8192)[: 5 if args.device.type == "cuda" else 3]
    rows = [measure(seqlen, args.heads, args.head_dim, args.device) for seqlen in seqlens]
    title = f"causal over full, {args.heads} heads of {args.head_dim}\n{shared.machine(args.device)}"
    show(
        rows, f"{title}\nblocks: of the scores, those computed; rest: causal time less full time by its share of blocks"
    )
    if args.plot:
        plot(rows, title, args.plot)
    return rows


if __name__ == "__main__":
    main()
