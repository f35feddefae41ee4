"""Hand-written attention with shared heads, softmaxes of one's own, sinks and scales; see ``handwritten.py``."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .handwritten import KV, B, Block, D, H, S, Style, merge, split, tokens


class GroupedBlock(Block):
    kv_heads = KV


class LlamaReference(GroupedBlock):
    """Heads repeated before the transpose."""

    @staticmethod
    def repeat_kv(x, n_rep):
        bs, slen, n_kv_heads, head_dim = x.shape
        wide = x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim)
        return wide.reshape(bs, slen, n_kv_heads * n_rep, head_dim)

    def forward(self, x):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.project(x)
        xq, xk, xv = (t.view(bsz, seqlen, -1, D) for t in (xq, xk, xv))
        keys, values = self.repeat_kv(xk, H // KV), self.repeat_kv(xv, H // KV)
        xq, keys, values = (t.transpose(1, 2) for t in (xq, keys, values))
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(D)
        scores = scores + torch.triu(torch.full((seqlen, seqlen), float("-inf")), diagonal=1).type_as(x)
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        return self.to_out(torch.matmul(scores, values).transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class MistralReference(GroupedBlock):
    """repeat_interleave along the heads of [B, S, H, D]."""

    def forward(self, x):
        q, k, v = (t.view(B, S, -1, D) for t in self.project(x))
        k, v = (torch.repeat_interleave(t, repeats=H // KV, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.to_out(merge(torch.matmul((q @ k.mT * D**-0.5).softmax(-1), v)))


class RepeatInterleave(GroupedBlock):
    def attend(self, q, k, v):
        k, v = (t.repeat_interleave(H // KV, dim=1) for t in (k, v))
        return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v


class StackedHeads(GroupedBlock):
    """Every head twice in a row, by stack."""

    def attend(self, q, k, v):
        k, v = (torch.stack([t] * (H // KV), dim=2).flatten(1, 2) for t in (k, v))
        return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v


class HeadsByCat(GroupedBlock):
    """k0 k1 k0 k1: the query heads are put in another order instead."""

    def attend(self, q, k, v):
        k, v = (torch.cat([t] * (H // KV), dim=1) for t in (k, v))
        return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v


class GroupsByEinsum(GroupedBlock):
    def attend(self, q, k, v):
        q = q.view(B, KV, H // KV, -1, D) * D**-0.5
        attn = torch.einsum("b g n i d, b g j d -> b g n i j", q, k).softmax(dim=-1)
        return torch.einsum("b g n i j, b g j d -> b g n i d", attn, v).flatten(1, 2)


class GroupsByBroadcast(GroupedBlock):
    def attend(self, q, k, v):
        q = q.unflatten(1, (KV, H // KV))
        scores = torch.matmul(q, k.unsqueeze(2).transpose(-1, -2)) / D**0.5
        return torch.matmul(scores.softmax(-1), v.unsqueeze(2)).reshape(B, H, -1, D)


class GroupsAsRows(GroupedBlock):
    """The queries of a group as rows of one head."""

    def attend(self, q, k, v):
        q = q.reshape(B, KV, -1, D)
        return ((q @ k.transpose(-1, -2) / D**0.5).softmax(-1) @ v).view(B, H, -1, D)


class OneHeadBlock(Block):
    kv_heads = 1


class PalmEinsum(OneHeadBlock):
    def forward(self, x):
        q, k, v = self.project(x)
        sim = torch.einsum("b h i d, b j d -> b h i j", split(q) * D**-0.5, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        return self.to_out(merge(torch.einsum("b h i j, b j d -> b h i d", sim.softmax(dim=-1), v)))


class BigCode(OneHeadBlock):
    """Rows and heads merged for the product, apart for the softmax."""

    def forward(self, x):
        q, k, v = self.project(x)
        scores = torch.bmm(q.reshape(B, S * H, D), k.transpose(1, 2)) * D**-0.5
        attn = scores.view(B, S, H, S).softmax(dim=-1)
        return self.to_out(torch.bmm(attn.view(B, S * H, S), v).view(x.shape))


class BroadcastHead(OneHeadBlock):
    """One head of k and v, broadcast by matmul itself."""

    def attend(self, q, k, v):
        return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D), dim=-1), v)


class ManualSoftmax(Block):
    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        e = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
        return (e / e.sum(dim=-1, keepdim=True)) @ v


class ManualSoftmaxAmax(Block):
    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        scores = scores - scores.amax(dim=-1, keepdim=True)
        p = scores.exp()
        return p.div(p.sum(-1, keepdim=True)) @ v


class ExpOverSum(Block):
    def attend(self, q, k, v):
        weights = torch.exp(q @ k.transpose(-1, -2) / math.sqrt(D))
        return (weights / torch.sum(weights, dim=-1, keepdim=True)) @ v


class ExpOfLogSoftmax(Block):
    def attend(self, q, k, v):
        return F.log_softmax(q @ k.transpose(-1, -2) / math.sqrt(D), dim=-1).exp() @ v


class ExpOfLogsumexp(Block):
    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        return torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True)) @ v


class SinkByCat(Block):
    """GPT-OSS: a learned logit per head, one more column that is cut off."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(H))

    def attend(self, q, k, v):
        qk = q @ k.transpose(-1, -2) * D**-0.5
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        w = torch.softmax(torch.cat([qk, sinks], dim=-1), dim=-1)
        return w[..., :-1] @ v


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


class CosineAttention(Block):
    """Swin v2: normalised q and k, a learned scale per head."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.log(10 * torch.rand(H, 1, 1) + 1))

    def attend(self, q, k, v):
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
        return attn.softmax(dim=-1) @ v


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


class Swapped(Block):
    """k q^T, transposed."""

    def attend(self, q, k, v):
        return (k @ q.transpose(-1, -2)).transpose(-1, -2).mul(D**-0.5).softmax(-1) @ v


class ChannelAttention(Block):
    """XCiT, Restormer: channels attend to channels, over the tokens; a learned temperature per head."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(H, 1, 1) + 0.5)

    def attend(self, q, k, v):
        q, k, v = (t.transpose(-2, -1) for t in (q, k, v))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        attn = (q @ k.transpose(-2, -1)) * self.temperature
        return (attn.softmax(dim=-1) @ v).transpose(-2, -1)


STYLES = {
    "llama_reference": Style(LlamaReference, tokens, "causal", KV),
    "llama_reference_bfloat16": Style(LlamaReference, lambda: tokens(torch.bfloat16), "causal", KV),
    "mistral_reference": Style(MistralReference, tokens, kv_heads=KV),
    "repeat_interleave": Style(RepeatInterleave, tokens, kv_heads=KV),
    "stacked_heads": Style(StackedHeads, tokens, kv_heads=KV),
    "heads_by_cat": Style(HeadsByCat, tokens, kv_heads=KV),
    "groups_by_einsum": Style(GroupsByEinsum, tokens, kv_heads=KV),
    "groups_by_broadcast": Style(GroupsByBroadcast, tokens, kv_heads=KV),
    "groups_as_rows": Style(GroupsAsRows, tokens, kv_heads=KV),
    "palm_einsum": Style(PalmEinsum, tokens, kv_heads=1),
    "bigcode": Style(BigCode, tokens, kv_heads=1),
    "broadcast_head": Style(BroadcastHead, tokens, kv_heads=1),
    "manual_softmax": Style(ManualSoftmax, tokens),
    "manual_softmax_amax": Style(ManualSoftmaxAmax, tokens),
    "exp_over_sum": Style(ExpOverSum, tokens),
    "exp_of_log_softmax": Style(ExpOfLogSoftmax, tokens),
    "exp_of_logsumexp": Style(ExpOfLogsumexp, tokens),
    "sink_by_cat": Style(SinkByCat, tokens, None),
    "zero_key": Style(ZeroKey, tokens),
    "learned_temperature": Style(LearnedTemperature, tokens),
    "cosine_attention": Style(CosineAttention, tokens),
    "scale_in_a_buffer": Style(ScaleInABuffer, tokens),
    "sqrt_of_a_tensor": Style(SqrtOfATensor, tokens),
    "rsqrt_method": Style(RsqrtMethod, tokens),
    "swapped": Style(Swapped, tokens),
    "channel_attention": Style(ChannelAttention, tokens),
}
