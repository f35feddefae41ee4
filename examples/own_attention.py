"""Attention written by hand, in a model that no library knows: the rewrite goes by what it computes."""

import torch
from rich.console import Console
from torch import Tensor, nn

import attnpatch


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


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = Attention().to(device), torch.randn(2, 300, 256, device=device)
    with torch.no_grad():
        expected = model(x)
        attnpatch.patch(model)
        error = (model(x) - expected).abs().max().item()
    console = Console()
    console.print(attnpatch.report(model))
    console.print(f"largest difference from the unpatched model: {error:.1e}")


if __name__ == "__main__":
    main()
