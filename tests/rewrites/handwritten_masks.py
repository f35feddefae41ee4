"""Masks, biases and caches of hand-written attention, in the styles of known code; see ``handwritten.py``."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .handwritten import CONTEXT, B, Block, D, E, H, S, Style, merge, scaled, split, tokens

WINDOW = 4


def holes(length=S):
    """Bool [B, length]: padding on the right and in between; the first key is real, and every causal row has one."""
    keep = torch.rand(B, length) > 0.3
    keep[0, -2:], keep[:, 0] = False, True
    return keep


def tokens_and_keep():
    return torch.randn(B, S, E), holes()


class NanoGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.attn_dropout = nn.Dropout(0.0)
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(E, dim=2)
        q, k, v = (z.view(b, t, H, c // H).transpose(1, 2) for z in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class GPT2(Block):
    """where with a 0-d tensor of the lowest value."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.ones(16, 16, dtype=torch.bool).tril().view(1, 1, 16, 16))

    def attend(self, q, k, v):
        w = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], D**0.5, dtype=v.dtype)
        mask = self.bias[:, :, k.size(-2) - q.size(-2) : k.size(-2), : k.size(-2)]
        w = torch.where(mask, w.to(w.dtype), torch.full([], torch.finfo(w.dtype).min, dtype=w.dtype))
        return torch.matmul(F.softmax(w, dim=-1).type(v.dtype), v)


class GPT1(Block):
    """The TensorFlow port: scores times a mask, minus a large constant where the mask is zero."""

    def attend(self, q, k, v):
        w = scaled(q, k)
        b = torch.tril(torch.ones(S, S)).view(1, 1, S, S)
        return (w * b + -1e9 * (1 - b)).softmax(-1) @ v


class XTransformers(Block):
    def attend(self, q, k, v):
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * D**-0.5
        i, j = dots.shape[-2:]
        mask = torch.ones((i, j), dtype=torch.bool).triu_(j - i + 1)
        dots.masked_fill_(mask, -torch.finfo(dots.dtype).max)
        attn = dots.softmax(dim=-1, dtype=torch.float32).type(dots.dtype)
        return torch.einsum("b h i j, b h j d -> b h i d", attn, v)


class TriuOfInf(Block):
    def attend(self, q, k, v):
        mask = torch.triu(torch.full((S, S), float("-inf")), diagonal=1)
        return F.softmax(scaled(q, k) + mask, dim=-1) @ v


class TrilIsZero(Block):
    def attend(self, q, k, v):
        mask = torch.tril(torch.ones(S, S, device=q.device)).unsqueeze(0).unsqueeze(0)
        return scaled(q, k).masked_fill(mask == 0, -torch.inf).softmax(-1) @ v


class OnesLike(Block):
    """The scores give the mask its shape, no more."""

    def attend(self, q, k, v):
        scores = scaled(q, k)
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


class InPlace(Block):
    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2)
        scores.mul_(D**-0.5)
        scores.masked_fill_(torch.arange(S)[None, :] > torch.arange(S)[:, None], -torch.inf)
        return scores.softmax(dim=-1) @ v


class MaskedBlock(Block):
    """A second input: which tokens are real."""

    def forward(self, x, keep):
        return self.to_out(merge(self.attend(*map(split, self.project(x)), keep)))


class AnnotatedTransformer(MaskedBlock):
    """Padding and future in one int mask, made outside the attention."""

    def attend(self, q, k, v, keep):
        subsequent = torch.triu(torch.ones((1, S, S)), diagonal=1).type(torch.uint8) == 0
        mask = (keep.unsqueeze(-2) & subsequent).unsqueeze(1)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        return torch.matmul(scores.masked_fill(mask == 0, -1e9).softmax(dim=-1), v)


class Bert(MaskedBlock):
    """Minus 10000 does not exclude: a bias."""

    def attend(self, q, k, v, keep):
        mask = (1.0 - keep[:, None, None, :].to(q.dtype)) * -10000.0
        return nn.functional.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D) + mask, dim=-1) @ v


class BertMin(MaskedBlock):
    def attend(self, q, k, v, keep):
        mask = (1.0 - keep[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
        return (scaled(q, k) + mask).softmax(dim=-1) @ v


class DistilBert(MaskedBlock):
    def attend(self, q, k, v, keep):
        scores = torch.matmul(q / math.sqrt(D), k.transpose(2, 3))
        mask = (keep == 0).view(B, 1, 1, S).expand_as(scores)
        scores = scores.masked_fill(mask, torch.tensor(torch.finfo(scores.dtype).min))
        return torch.matmul(nn.functional.softmax(scores, dim=-1), v)


class EspNet(MaskedBlock):
    """Filled before the softmax and again after it."""

    def attend(self, q, k, v, keep):
        mask = keep.unsqueeze(1).unsqueeze(2).eq(0)
        scores = scaled(q, k).masked_fill(mask, torch.finfo(q.dtype).min)
        return torch.matmul(torch.softmax(scores, dim=-1).masked_fill(mask, 0.0), v)


class NanToNum(MaskedBlock):
    def attend(self, q, k, v, keep):
        p = scaled(q, k).masked_fill(~keep[:, None, None], -torch.inf).softmax(-1)
        return torch.nan_to_num(p) @ v


class FairSeq(nn.Module):
    """[S, B, E], heads in the batch, the padding filled on a 4-D view."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x, keep):
        query = x.transpose(0, 1)
        tgt, bsz, _ = query.size()
        q = self.q_proj(query) * D**-0.5
        q, k, v = (
            t.contiguous().view(-1, bsz * H, D).transpose(0, 1) for t in (q, self.k_proj(query), self.v_proj(query))
        )
        weights = torch.bmm(q, k.transpose(1, 2))
        weights = weights.view(bsz, H, tgt, tgt)
        weights = weights.masked_fill((~keep).unsqueeze(1).unsqueeze(2).to(torch.bool), float("-inf"))
        weights = weights.view(bsz * H, tgt, tgt)
        probs = F.softmax(weights, dim=-1, dtype=torch.float32).type_as(weights)
        attn = torch.bmm(probs, v)
        return self.out_proj(attn.transpose(0, 1).contiguous().view(tgt, bsz, E))


class Opt(MaskedBlock):
    """Heads in the batch, a 4-D additive mask, and a floor under the sum."""

    def attend(self, q, k, v, keep):
        future = torch.triu(torch.ones(S, S, dtype=torch.bool), 1)
        hidden = future[None, None] | ~keep[:, None, None, :]
        mask = torch.zeros(B, 1, S, S).masked_fill(hidden, torch.finfo(q.dtype).min)
        q, k, v = (t.reshape(B * H, -1, D) for t in (q * D**-0.5, k, v))
        w = torch.bmm(q, k.transpose(1, 2)).view(B, H, S, S) + mask
        w = torch.max(w, torch.tensor(torch.finfo(w.dtype).min))
        w = w.view(B * H, S, S).softmax(dim=-1)
        return torch.bmm(w, v).view(B, H, S, D)


class ClipText(Block):
    def attend(self, q, k, v):
        mask = torch.empty(S, S).fill_(float("-inf")).triu_(1)
        q, k, v = (t.reshape(B * H, -1, D) for t in (q * D**-0.5, k, v))
        weights = torch.bmm(q, k.transpose(1, 2))
        weights = (weights.view(B, H, S, S) + mask).view(B * H, S, S)
        return torch.bmm(weights.softmax(-1), v).view(B, H, S, D)


class BaddbmmWithMask(Block):
    """diffusers: the mask as baddbmm's input."""

    def attend(self, q, k, v, mask):
        q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
        scores = torch.baddbmm(mask, q, k.transpose(-1, -2), beta=1, alpha=D**-0.5)
        return torch.bmm(scores.softmax(dim=-1), v).view(B, H, -1, D)

    def forward(self, x, mask):
        return merge(self.attend(*map(split, self.project(x)), mask))


class CrossAttention(Block):
    """Stable Diffusion with a key mask, heads in the batch, the mask repeated for them."""

    def forward(self, x, context, keep):
        q, k, v = (split(t).reshape(B * H, -1, D) for t in self.project(x, context))
        sim = torch.einsum("b i d, b j d -> b i j", q, k) * D**-0.5
        mask = keep[:, None].repeat_interleave(H, dim=0)
        sim.masked_fill_(~mask, -torch.finfo(sim.dtype).max)
        out = torch.einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)
        return self.to_out(merge(out.reshape(B, H, -1, D)))


class CrossAttention4D(Block):
    def forward(self, x, context, keep):
        q, k, v = map(split, self.project(x, context))
        scores = scaled(q, k) + torch.where(keep[:, None, None, :], 0.0, torch.finfo(torch.float32).min)
        return self.to_out(merge(scores.softmax(-1) @ v))


class TwoFills(MaskedBlock):
    """One fill for the keys, one for the future."""

    def attend(self, q, k, v, keep):
        scores = torch.einsum("bhid,bhjd->bhij", q * D**-0.5, k)
        scores = scores.masked_fill(~keep[:, None, None, :], -1e9)
        i = torch.arange(S)
        scores = scores.masked_fill(i[:, None] < i[None, :], -1e9)
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


class BoolTimesConstant(MaskedBlock):
    def attend(self, q, k, v, keep):
        return (scaled(q, k) + ~keep[:, None, None, :] * -1e9).softmax(-1) @ v


class PrefixLM(Block):
    def attend(self, q, k, v):
        rows, keys = torch.arange(S)[:, None], torch.arange(S)[None, :]
        visible = (keys <= rows) | (keys < 3)
        return scaled(q, k).masked_fill(~visible, -torch.inf).softmax(-1) @ v


class Documents(Block):
    def forward(self, x, ids):
        q, k, v = map(split, self.project(x))
        same = ids[:, None, :, None] == ids[:, None, None, :]
        causal = torch.tril(torch.ones(S, S, dtype=torch.bool))
        return merge(torch.where(same & causal, scaled(q, k), -torch.inf).softmax(-1) @ v)


class TriuOfTril(Block):
    def attend(self, q, k, v):
        band = torch.triu(torch.tril(torch.ones(S, S, dtype=torch.bool), 2), -2)
        return scaled(q, k).masked_fill(band.logical_not(), float("-inf")).softmax(-1) @ v


class Chunks(Block):
    """Llama 4: only keys of the row's own chunk, causal."""

    def attend(self, q, k, v):
        i = torch.arange(S)
        visible = (i[:, None] // WINDOW == i[None, :] // WINDOW) & (i[None, :] <= i[:, None])
        return torch.where(visible, scaled(q, k), torch.finfo(q.dtype).min).softmax(-1) @ v


class NotItself(Block):
    """ViT for small datasets: no token sees itself."""

    def attend(self, q, k, v):
        dots = torch.matmul(q, k.transpose(-1, -2)) * D**-0.5
        dots = dots.masked_fill(torch.eye(S, dtype=torch.bool), -torch.finfo(dots.dtype).max)
        return torch.matmul(dots.softmax(dim=-1), v)


def context_and_keep():
    return torch.randn(B, S, E), torch.randn(B, CONTEXT, E), holes(CONTEXT)


def document_ids():
    return torch.randn(B, S, E), torch.arange(B * S).view(B, S) // 4


STYLES = {
    "nano_gpt": Style(NanoGPT, tokens, "streamed mask [1, 1, 10, 10]"),
    "gpt2": Style(GPT2, tokens, "streamed mask [1, 1, 10, 10]"),
    "gpt1": Style(GPT1, tokens, "causal"),
    "x_transformers": Style(XTransformers, tokens, "causal"),
    "triu_of_inf": Style(TriuOfInf, tokens, "causal"),
    "tril_is_zero": Style(TrilIsZero, tokens, "causal"),
    "ones_like": Style(OnesLike, tokens, "causal"),
    "in_place": Style(InPlace, tokens, "causal"),
    "annotated_transformer": Style(AnnotatedTransformer, tokens_and_keep, "causal, padding"),
    "bert": Style(Bert, tokens_and_keep, "streamed bias [2, 1, 1, 10]"),
    "bert_min": Style(BertMin, tokens_and_keep, "padding"),
    "distilbert": Style(DistilBert, tokens_and_keep, "padding"),
    "espnet": Style(EspNet, tokens_and_keep, "padding"),
    "nan_to_num": Style(NanToNum, tokens_and_keep, "padding"),
    "bool_times_constant": Style(BoolTimesConstant, tokens_and_keep, "padding"),
    "fairseq": Style(FairSeq, tokens_and_keep, "padding"),
    "opt": Style(Opt, tokens_and_keep, "causal, padding"),
    "clip_text": Style(ClipText, tokens, "causal"),
    "baddbmm_with_mask": Style(
        BaddbmmWithMask, lambda: (torch.randn(B, S, E), torch.randn(B * H, S, S)), None, kv_heads=None
    ),
    "cross_attention": Style(CrossAttention, context_and_keep, None, kv_heads=None),
    "cross_attention_4d": Style(CrossAttention4D, context_and_keep, "padding"),
    "two_fills": Style(TwoFills, tokens_and_keep, "causal, padding"),
    "prefix_lm": Style(PrefixLM, tokens, None),
    "documents": Style(Documents, document_ids, None),
    "triu_of_tril": Style(TriuOfTril, tokens, "window 2 left, 2 right"),
    "chunks": Style(Chunks, tokens, None),
    "not_itself": Style(NotItself, tokens, None),
}
