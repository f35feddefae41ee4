"""Biases of hand-written attention: relative positions, slopes, windows; see ``handwritten.py``."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .handwritten import B, Block, D, E, H, S, Style, merge, scaled, split, tokens


class AddInPlace(Block):
    def attend(self, q, k, v, bias):
        scores = (q @ k.transpose(-1, -2)).div_(D**0.5).add_(bias)
        return scores.softmax(dim=-1).matmul(v)

    def forward(self, x, bias):
        return merge(self.attend(*map(split, self.project(x)), bias))


class T5(Block):
    """Unscaled, with a learned bias per head from buckets."""

    def __init__(self):
        super().__init__()
        self.relative_attention_bias = nn.Embedding(2 * S, H)

    def attend(self, q, k, v):
        scores = torch.matmul(q, k.transpose(3, 2))
        distance = torch.arange(S)[None, :] - torch.arange(S)[:, None]
        scores += self.relative_attention_bias(distance + S).permute([2, 0, 1]).unsqueeze(0)
        return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)


class Alibi(Block):
    """Slopes times (k - q), causal."""

    def attend(self, q, k, v):
        slopes = torch.tensor([2.0 ** -(i + 1) for i in range(H)])
        distance = torch.arange(S)[None, :] - torch.arange(S)[:, None]
        scores = scaled(q, k) + slopes[:, None, None] * distance
        return scores.masked_fill(distance > 0, -torch.inf).softmax(-1) @ v


class AlibiBothSides(Block):
    """Slopes in a buffer times -|k - q|."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, H + 1).view(H, 1, 1))

    def attend(self, q, k, v):
        i = torch.arange(S)
        bias = self.slopes * -torch.abs(i[None, :] - i[:, None])
        return (scaled(q, k) + bias).softmax(-1) @ v


class Swin(nn.Module):
    """Windows in the batch; the shift's mask is added on a view [B, windows, H, N, N]."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.table = nn.Parameter(torch.randn(S * S, H))
        self.register_buffer("index", torch.randint(0, S * S, (S, S)))

    def forward(self, x, mask):
        b_, n, c = x.shape
        qkv = self.qkv(x).reshape(b_, n, 3, H, c // H).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * D**-0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        attn = attn + bias.unsqueeze(0)
        nw = mask.shape[0]
        attn = attn.view(b_ // nw, nw, H, n, n) + mask.unsqueeze(1).unsqueeze(0)
        attn = attn.view(-1, H, n, n).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b_, n, c))


class TransformerXL(Block):
    """Content plus position scores, the position's shifted by a view."""

    def __init__(self):
        super().__init__()
        self.u, self.w = (nn.Parameter(torch.randn(H, 1, D)) for _ in range(2))
        self.position = nn.Parameter(torch.randn(H, D, S))

    @staticmethod
    def rel_shift(x):
        padded = F.pad(x, (1, 0)).view(B, H, S + 1, S)
        return padded[:, :, 1:].view_as(x)

    def attend(self, q, k, v):
        content = torch.matmul(q + self.u, k.transpose(-2, -1))
        position = self.rel_shift(torch.matmul(q + self.w, self.position))
        return torch.matmul(((content + position) / math.sqrt(D)).softmax(-1), v)


class SegmentAnything(nn.Module):
    """Relative positions of rows and columns, added on a view of the scores with the image's sides apart."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.rel_h, self.rel_w = nn.Parameter(torch.randn(3, 3, D)), nn.Parameter(torch.randn(4, 4, D))

    def forward(self, x):
        b, h, w, _ = x.shape
        qkv = self.qkv(x).reshape(b, h * w, 3, H, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, b * H, h * w, -1).unbind(0)
        attn = (q * D**-0.5) @ k.transpose(-2, -1)
        r_q = q.reshape(b * H, h, w, D)
        rel_h = torch.einsum("bhwc,hkc->bhwk", r_q, self.rel_h)
        rel_w = torch.einsum("bhwc,wkc->bhwk", r_q, self.rel_w)
        attn = attn.view(b * H, h, w, h, w) + rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]
        attn = attn.view(b * H, h * w, h * w).softmax(dim=-1)
        return (attn @ v).view(b, H, h, w, -1).permute(0, 2, 3, 1, 4).reshape(b, h, w, -1)


def bias_4d():
    return torch.randn(B, S, E), torch.randn(1, H, S, S)


def shifted_windows():
    mask = torch.where(torch.rand(3, S, S) > 0.5, 0.0, -100.0)
    return torch.randn(B * 3, S, E), mask


STYLES = {
    "add_in_place": Style(AddInPlace, bias_4d, "streamed bias [1, 4, 10, 10]"),
    "t5": Style(T5, tokens, "streamed bias [1, 4, 10, 10]"),
    "alibi": Style(Alibi, tokens, None),
    "alibi_both_sides": Style(AlibiBothSides, tokens, None),
    "swin": Style(Swin, shifted_windows, None),
    "transformer_xl": Style(TransformerXL, tokens, "streamed bias [2, 4, 10, 10]"),
    "segment_anything": Style(SegmentAnything, lambda: (torch.randn(B, 3, 4, E),), None, kv_heads=None),
}
