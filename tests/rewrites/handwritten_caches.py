"""Hand-written attention that reads a cache, or hands out its logsumexp; see ``handwritten.py``."""

import math

import torch
import torch.nn.functional as F

from .handwritten import KV, B, Block, D, E, H, S, Style, merge, scaled, split, tokens
from .handwritten_heads import GroupedBlock


class LogsumexpBeside(Block):
    def attend(self, q, k, v):
        scores = scaled(q, k)
        return scores.softmax(dim=-1) @ v, torch.logsumexp(scores, dim=-1)

    def forward(self, x):
        o, lse = self.attend(*map(split, self.project(x)))
        return self.to_out(merge(o)), lse


class CacheByCat(Block):
    """One new token after the cache; the cache is returned."""

    def forward(self, x, past_k, past_v):
        q, k, v = map(split, self.project(x))
        k, v = torch.cat((past_k, k), dim=-2), torch.cat((past_v, v), dim=-2)
        return self.to_out(merge((q @ k.transpose(-2, -1) * D**-0.5).softmax(-1) @ v)), k, v


class CacheByCatCausal(Block):
    """Several new tokens: the causal mask ends at the bottom right."""

    def forward(self, x, past_k, past_v):
        q, k, v = map(split, self.project(x))
        k, v = torch.cat((past_k, k), dim=-2), torch.cat((past_v, v), dim=-2)
        n, total = q.size(-2), k.size(-2)
        mask = torch.full((n, total), float("-inf")).triu(diagonal=total - n + 1)
        return self.to_out(merge((scaled(q, k) + mask).softmax(-1) @ v))


class LlamaCache(GroupedBlock):
    """Written into by a slice assignment, read by a slice, masked from the start position on."""

    start = 3

    def __init__(self):
        super().__init__()
        self.register_buffer("cache_k", torch.randn(4, 16, KV, D))
        self.register_buffer("cache_v", torch.randn(4, 16, KV, D))

    def forward(self, x):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = (t.view(bsz, seqlen, -1, D) for t in self.project(x))
        end = self.start + seqlen
        self.cache_k[:bsz, self.start : end] = xk
        self.cache_v[:bsz, self.start : end] = xv
        keys, values = self.cache_k[:bsz, :end], self.cache_v[:bsz, :end]
        keys, values = (torch.repeat_interleave(t, H // KV, 2).transpose(1, 2) for t in (keys, values))
        mask = torch.triu(torch.full((seqlen, seqlen), float("-inf")), diagonal=1)
        mask = torch.hstack([torch.zeros((seqlen, self.start)), mask]).type_as(x)
        scores = torch.matmul(xq.transpose(1, 2), keys.transpose(2, 3)) / math.sqrt(D) + mask
        return self.to_out(merge(torch.matmul(F.softmax(scores.float(), dim=-1).type_as(xq), values)))


class StaticCache(Block):
    """gpt-fast: index_copy_ into a fixed length, rows of a causal buffer by position."""

    def __init__(self):
        super().__init__()
        self.register_buffer("k_cache", torch.randn(B, H, 16, D))
        self.register_buffer("v_cache", torch.randn(B, H, 16, D))
        self.register_buffer("causal_mask", torch.tril(torch.ones(16, 16, dtype=torch.bool)))

    def forward(self, x, input_pos):
        q, k, v = map(split, self.project(x))
        k, v = self.k_cache.index_copy_(2, input_pos, k), self.v_cache.index_copy_(2, input_pos, v)
        mask = self.causal_mask[None, None, input_pos]
        return self.to_out(merge(scaled(q, k).masked_fill(~mask, -torch.inf).softmax(-1) @ v))


class StaticCacheByArange(StaticCache):
    def forward(self, x, input_pos):
        q, k, v = map(split, self.project(x))
        self.k_cache[:, :, input_pos] = k
        self.v_cache[:, :, input_pos] = v
        visible = torch.arange(16) <= input_pos[:, None]
        scores = torch.where(visible, scaled(q, self.k_cache), -torch.inf)
        return self.to_out(merge(scores.softmax(-1) @ self.v_cache))


class DecodeWithoutRows(Block):
    """One token per sequence: no dimension of queries, padding by lengths."""

    def forward(self, x, k, v, lengths):
        q = self.to_q(x).view(B, H, D)
        scores = torch.einsum("bhd,bshd->bhs", q, k) * D**-0.5
        hidden = torch.arange(k.shape[1])[None, :] >= lengths[:, None]
        p = scores.masked_fill(hidden[:, None, :], -torch.inf).softmax(-1)
        return self.to_out(torch.einsum("bhs,bshd->bhd", p, v).flatten(1))


def past(tokens=1):
    return torch.randn(B, tokens, E), torch.randn(B, H, 5, D), torch.randn(B, H, 5, D)


def positions():
    return torch.randn(B, 3, E), torch.tensor([4, 5, 6])


def one_token():
    return (
        torch.randn(B, E),
        torch.randn(B, S, H, D),
        torch.randn(B, S, H, D),
        torch.arange(B) * 3 % S + 1,
    )


STYLES = {
    "logsumexp_beside": Style(LogsumexpBeside, tokens),
    "cache_by_cat": Style(CacheByCat, past),
    "cache_by_cat_causal": Style(CacheByCatCausal, lambda: past(3), "causal"),
    "llama_cache": Style(LlamaCache, lambda: (torch.randn(B, 3, E),), None, kv_heads=None),
    "static_cache": Style(StaticCache, positions, None),
    "static_cache_by_arange": Style(StaticCacheByArange, positions, None),
    "decode_without_rows": Style(DecodeWithoutRows, one_token, "prefix per sequence"),
}
