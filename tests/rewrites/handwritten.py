"""Attention as people write it by hand: products, layouts, repeats of heads and softmaxes in the styles of known code.

One entry of ``STYLES`` is one module with its inputs; ``handwritten_masks.py`` holds the styles of masks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

B, S, E, H, D = 2, 10, 32, 4, 8
KV = 2
CONTEXT = 7


@dataclass(frozen=True)
class Style:
    """A module and what its report must say.

    Args:
        module: made anew for the test.
        inputs: makes its inputs.
        mask: in words; None where the spelling leaves it open.
        kv_heads: heads of K and V that the operator reads.
        sites: how many attentions.
    """

    module: type[nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    mask: str | None = "none"
    kv_heads: int | None = H
    sites: int = 1


def tokens(dtype=torch.float32):
    return (torch.randn(B, S, E, dtype=dtype),)


def with_context():
    return torch.randn(B, S, E), torch.randn(B, CONTEXT, E)


def split(x, heads=H):
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def scaled(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(D)


def merge(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


class Block(nn.Module):
    """The projections; a subclass attends."""

    kv_heads = H

    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(E, E, bias=False)
        self.to_kv = nn.Linear(E, 2 * self.kv_heads * D, bias=False)
        self.to_out = nn.Linear(E, E)

    def project(self, x, context=None):
        return self.to_q(x), *self.to_kv(x if context is None else context).chunk(2, dim=-1)

    def forward(self, x, context=None):
        q, k, v = self.project(x, context)
        q, k, v = split(q), split(k, self.kv_heads), split(v, self.kv_heads)
        return self.to_out(merge(self.attend(q, k, v)))


class TimmViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.q_norm, self.k_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q) * D**-0.5, self.k_norm(k)
        attn = self.attn_drop((q @ k.transpose(-2, -1)).softmax(dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class VitPytorch(Block):
    def __init__(self):
        super().__init__()
        self.attend_softmax = nn.Softmax(dim=-1)

    def attend(self, q, k, v):
        dots = torch.matmul(q, k.transpose(-1, -2)) * D**-0.5
        return torch.matmul(self.attend_softmax(dots), v)


class SetTransformer(Block):
    """Heads stacked along the batch by cat of splits."""

    def forward(self, x, context):
        q, k, v = (torch.cat(t.split(D, 2), 0) for t in self.project(x, context))
        a = torch.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(E), 2)
        return self.to_out(torch.cat((q + a.bmm(v)).split(x.size(0), 0), 2))


class LearnedQuery(Block):
    """Pooling by a latent: one row of queries for every sequence."""

    def __init__(self):
        super().__init__()
        self.latent = nn.Parameter(torch.randn(1, 1, E))

    def forward(self, x):
        q, k, v = map(split, self.project(self.latent.expand(B, -1, -1), x))
        return self.to_out(merge((q * D**-0.5 @ k.transpose(-1, -2)).softmax(-1) @ v))


class LuongDot(nn.Module):
    """One decoder state over the states of the encoder."""

    def forward(self, hidden, encoded):
        weights = F.softmax(torch.bmm(hidden.unsqueeze(1), encoded.transpose(1, 2)), dim=-1)
        return torch.bmm(weights, encoded)


class Head(nn.Module):
    """One head of a lecture's GPT; the buffer is sliced to the length."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(E, D, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(16, 16)))

    def forward(self, x):
        _, t, c = x.shape
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * c**-0.5
        wei = wei.masked_fill(self.tril[:t, :t] == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ self.value(x)


class HeadByHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([Head() for _ in range(H)])

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)


class SlicedOverHeads(Block):
    """Stable Diffusion for small GPUs: one slice at a time, written into the output."""

    def attend(self, q, k, v):
        out = torch.zeros_like(q)
        for i in range(0, H, 2):
            s = slice(i, i + 2)
            out[:, s] = (q[:, s] @ k[:, s].transpose(-1, -2) * D**-0.5).softmax(-1) @ v[:, s]
        return out


class TorchDocs(Block):
    """What the documentation of scaled_dot_product_attention says it computes."""

    kv_heads = KV

    def attend(self, query, key, value):
        length, total = query.size(-2), key.size(-2)
        attn_bias = torch.zeros(length, total, dtype=query.dtype, device=query.device)
        temp_mask = torch.ones(length, total, dtype=torch.bool, device=query.device).tril(diagonal=0)
        attn_bias.masked_fill_(temp_mask.logical_not(), float("-inf"))
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        attn_weight = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)))
        attn_weight += attn_bias
        attn_weight = torch.softmax(attn_weight, dim=-1)
        attn_weight = torch.dropout(attn_weight, 0.0, train=True)
        return attn_weight @ value


class Autocast(Block):
    """Mixed precision inside the module."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)

    def attend(self, q, k, v):
        return (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


STYLES = {
    "timm_vit": Style(TimmViT, tokens),
    "vit_pytorch": Style(VitPytorch, tokens),
    "set_transformer": Style(SetTransformer, with_context, kv_heads=None),
    "learned_query": Style(LearnedQuery, tokens),
    "luong_dot": Style(LuongDot, lambda: (torch.randn(B, E), torch.randn(B, S, E)), kv_heads=1),
    "head_by_head": Style(HeadByHead, tokens, "streamed mask [10, 10]", kv_heads=1, sites=H),
    "sliced_over_heads": Style(SlicedOverHeads, tokens, kv_heads=2, sites=2),
    "torch_docs": Style(TorchDocs, tokens, None, KV),
    "autocast": Style(Autocast, tokens),
}
