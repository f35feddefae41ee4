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


def bias_4d():
    return torch.randn(B, S, E), torch.randn(1, H, S, S)


STYLES = {
    "add_in_place": Style(AddInPlace, bias_4d, "streamed bias [1, 4, 10, 10]"),
    "t5": Style(T5, tokens, "streamed bias [1, 4, 10, 10]"),
    "alibi": Style(Alibi, tokens, None),
    "alibi_both_sides": Style(AlibiBothSides, tokens, None),
    "transformer_xl": Style(TransformerXL, tokens, "streamed bias [2, 4, 10, 10]"),
}
