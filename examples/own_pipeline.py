"""The pass alone: rewrite a graph of your own pipeline and look at it before and after."""

import torch
from rich.console import Console
from torch import Tensor

import attnpatch


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two query heads per key and value head, full attention."""
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1) @ v


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(1, 8, 128, 64), torch.randn(1, 4, 128, 64), torch.randn(1, 4, 128, 64)
    graph = torch.fx.symbolic_trace(attention)
    rewritten, report = attnpatch.rewrite(graph, inputs)

    console = Console()
    console.print(f"before\n{graph.code}\nafter\n{rewritten.code}", markup=False, soft_wrap=True)
    console.print(report)
    error = (rewritten(*inputs) - attention(*inputs)).abs().max().item()
    console.print(f"largest difference: {error:.1e}")


if __name__ == "__main__":
    main()
