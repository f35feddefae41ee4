"""Hand-written attention with shared heads, softmaxes of one's own, sinks and scales; see ``handwritten.py``."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .handwritten import KV, B, Block, D, H, Style, tokens


class GroupedBlock(Block):
    kv_heads = KV


class RepeatInterleave(GroupedBlock):
    def attend(self, q, k, v):
        k, v = (t.repeat_interleave(H // KV, dim=1) for t in (k, v))
        return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v


class HeadsByCat(GroupedBlock):
    """k0 k1 k0 k1: no kernel indexes heads so, and the repeat stays."""

    def attend(self, q, k, v):
        k, v = (torch.cat([t] * (H // KV), dim=1) for t in (k, v))
        return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v


class OneHeadBlock(Block):
    kv_heads = 1


class BroadcastHead(OneHeadBlock):
    """One head of k and v, broadcast by matmul itself."""

    def attend(self, q, k, v):
        return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D), dim=-1), v)


class ZeroKey(Block):
    """add_zero_attn: softmax off by one, by a key and a value of zeros."""

    def attend(self, q, k, v):
        k, v = (torch.cat([t, t.new_zeros(B, H, 1, D)], dim=2) for t in (k, v))
        return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v


class LearnedTemperature(Block):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.log(torch.tensor(D**-0.5)))

    def attend(self, q, k, v):
        return (torch.matmul(q, k.transpose(-1, -2)) * self.temperature.exp()).softmax(-1) @ v


class ScaleInABuffer(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.sqrt(torch.tensor(float(D))))

    def attend(self, q, k, v):
        return nn.functional.softmax((q / self.scale) @ k.transpose(-1, -2), -1) @ v


class SqrtOfATensor(Block):
    def attend(self, q, k, v):
        scores = torch.matmul(q, k.transpose(-2, -1)) / torch.sqrt(torch.tensor(k.size(-1), dtype=torch.float32))
        return torch.matmul(F.softmax(scores, dim=-1), v)


class RsqrtMethod(Block):
    def attend(self, q, k, v):
        dk = torch.tensor(k.shape[-1], dtype=q.dtype)
        return torch.matmul(torch.matmul(q, k.transpose(-2, -1)).mul(dk.rsqrt()).softmax(-1), v)


STYLES = {
    "repeat_interleave": Style(RepeatInterleave, tokens, kv_heads=KV),
    "heads_by_cat": Style(HeadsByCat, tokens),
    "broadcast_head": Style(BroadcastHead, tokens, kv_heads=1),
    "zero_key": Style(ZeroKey, tokens),
    "learned_temperature": Style(LearnedTemperature, tokens),
    "scale_in_a_buffer": Style(ScaleInABuffer, tokens),
    "sqrt_of_a_tensor": Style(SqrtOfATensor, tokens),
    "rsqrt_method": Style(RsqrtMethod, tokens),
}
