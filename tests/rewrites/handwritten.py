"""Attention as people write it by hand: products, layouts, repeats of heads and softmaxes in the styles of known code.

One entry of ``STYLES`` is one module with its inputs; the files beside this one hold further styles.
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


def image():
    return (torch.randn(B, E, 3, 4),)


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


class Einsum(Block):
    def attend(self, q, k, v):
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * D**-0.5
        return torch.einsum("b h i j, b h j d -> b h i d", dots.softmax(dim=-1), v)


class EinsumEllipsis(Block):
    def attend(self, q, k, v):
        attn = torch.einsum("...id,...jd->...ij", q * D**-0.5, k).softmax(-1)
        return torch.einsum("...ij,...jd->...id", attn, v)


class EinsumOverTokensThenHeads(Block):
    """[B, S, H, D] all the way: JAX ports, Perceiver, MaskFormer."""

    def forward(self, x):
        q, k, v = (t.view(B, -1, H, D) for t in self.project(x))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
        o = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, dim=-1), v)
        return self.to_out(o.reshape(x.shape))


class EinsumScaledOperand(Block):
    """Scores by einsum, output by matmul."""

    def attend(self, q, k, v):
        return F.softmax(torch.einsum("nhld,nhsd->nhls", q, k / D**0.5), dim=3) @ v


class EinsumHeadsInBatch(Block):
    """Stable Diffusion's first CrossAttention."""

    def forward(self, x, context):
        q, k, v = (split(t).reshape(B * H, -1, D) for t in self.project(x, context))
        sim = torch.einsum("b i d, b j d -> b i j", q, k) * D**-0.5
        out = torch.einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)
        return self.to_out(merge(out.reshape(B, H, -1, D)))


class BaddbmmOfNothing(Block):
    """diffusers: beta=0 and an empty tensor, for the scale inside the product."""

    def forward(self, x, context):
        q, k, v = (split(t).reshape(B * H, -1, D) for t in self.project(x, context))
        nothing = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(nothing, q, k.transpose(-1, -2), beta=0, alpha=D**-0.5)
        return self.to_out(merge(torch.bmm(scores.softmax(dim=-1), v).view(B, H, -1, D)))


class GuidedDiffusion(nn.Module):
    """Channels before tokens, the scale on both operands, softmax in float32."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Conv1d(E, 3 * E, 1)

    def forward(self, x):
        qkv = self.qkv(x.flatten(2))
        bs, width, length = qkv.shape
        ch = width // (3 * H)
        q, k, v = qkv.reshape(bs * H, ch * 3, length).split(ch, dim=1)
        scale = 1 / math.sqrt(math.sqrt(ch))
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        return torch.einsum("bts,bcs->bct", weight, v).reshape(bs, -1, length)


class DenoisingDiffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_qkv, self.to_out = nn.Conv2d(E, 3 * E, 1, bias=False), nn.Conv2d(E, E, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (t.view(b, H, D, h * w) for t in self.to_qkv(x).chunk(3, dim=1))
        sim = torch.einsum("b h d i, b h d j -> b h i j", q * D**-0.5, k)
        out = torch.einsum("b h i j, b h d j -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(out.permute(0, 1, 3, 2).reshape(b, c, h, w))


class ValuesOnTheLeft(nn.Module):
    """The latent diffusion AttnBlock, SAGAN, non-local blocks: out = v @ p^T."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(E, E, 1) for _ in range(3))

    def forward(self, x):
        b, c, h, w = x.shape
        q = self.q(x).reshape(b, c, h * w).permute(0, 2, 1)
        k, v = self.k(x).reshape(b, c, h * w), self.v(x).reshape(b, c, h * w)
        w_ = torch.nn.functional.softmax(torch.bmm(q, k) * (int(c) ** (-0.5)), dim=2)
        return x + torch.bmm(v, w_.permute(0, 2, 1)).reshape(b, c, h, w)


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


class AlphaFoldRows(Block):
    """[batch, sequences, heads, residues, head_dim] with a pair bias shared by the sequences."""

    def forward(self, x, pair):
        q, k, v = (t.view(*t.shape[:3], H, D).transpose(-2, -3) for t in self.project(x))
        a = torch.matmul(q * D**-0.5, k.transpose(-1, -2))
        a += pair
        return self.to_out(torch.matmul(a.softmax(-1), v).transpose(-2, -3).reshape(x.shape))


class Whisper(Block):
    """The scale's root on q and on k; the scores are handed out and dropped by the caller."""

    def qkv_attention(self, q, k, v):
        scale = D**-0.25
        q = q.view(*q.shape[:2], H, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], H, -1).permute(0, 2, 3, 1) * scale
        qk = (q @ k).float()
        w = F.softmax(qk, dim=-1).to(q.dtype)
        o = w @ v.view(*v.shape[:2], H, -1).permute(0, 2, 1, 3)
        return o.permute(0, 2, 1, 3).flatten(start_dim=2), qk.detach()

    def forward(self, x):
        return self.to_out(self.qkv_attention(*self.project(x))[0])


class KeysInTheMiddle(Block):
    """Transformer-XL's scores [query, key, batch, head]: the softmax is over dim 1."""

    def forward(self, x):
        q, k, v = (t.transpose(0, 1).reshape(S, B, H, D) for t in self.project(x))
        scores = torch.einsum("ibnd,jbnd->ijbn", q, k).mul_(D**-0.5)
        hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
        p = F.softmax(scores.masked_fill(hidden[:, :, None, None], -float("inf")), dim=1)
        return self.to_out(torch.einsum("ijbn,jbnd->ibnd", p, v).reshape(S, B, E)).transpose(0, 1)


class DeepSeek(Block):
    """Scores [batch, query, head, key]; the mask gets its head in the middle."""

    def forward(self, x):
        q, k, v = (t.view(B, S, H, D) for t in self.project(x))
        scores = torch.einsum("bshd,bthd->bsht", q, k) * D**-0.5
        scores += torch.full((S, S), float("-inf")).triu_(1).unsqueeze(1)
        scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        return self.to_out(torch.einsum("bsht,bthd->bshd", scores, v).flatten(2))


class LatentAttention(Block):
    """DeepSeek's absorbed form: one latent per token for all heads, and a second product for the positions."""

    def __init__(self):
        super().__init__()
        self.to_latent, self.q_pe, self.k_pe = nn.Linear(E, D), nn.Linear(E, H * 4), nn.Linear(E, 4)

    def forward(self, x):
        q, latent = self.to_q(x).view(B, S, H, D), self.to_latent(x)
        content = torch.einsum("bshc,btc->bsht", q, latent)
        position = torch.einsum("bshr,btr->bsht", self.q_pe(x).view(B, S, H, 4), self.k_pe(x))
        p = ((content + position) * (D + 4) ** -0.5).softmax(-1)
        return self.to_out(torch.einsum("bsht,btc->bshc", p, latent).flatten(2))


class BaddbmmOfZeros(Block):
    """GPT-NeoX."""

    def attend(self, q, k, v):
        q, k = q.reshape(B * H, S, D), k.reshape(B * H, S, D)
        scores = torch.zeros(B * H, S, S, dtype=q.dtype)
        scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=1.0, alpha=D**-0.5).view(B, H, S, S)
        return torch.matmul(nn.functional.softmax(scores, dim=-1).to(v.dtype), v)


class SlicedOverHeads(Block):
    """Stable Diffusion for small GPUs: one slice at a time, written into the output."""

    def attend(self, q, k, v):
        out = torch.zeros_like(q)
        for i in range(0, H, 2):
            s = slice(i, i + 2)
            out[:, s] = (q[:, s] @ k[:, s].transpose(-1, -2) * D**-0.5).softmax(-1) @ v[:, s]
        return out


STYLES = {
    "timm_vit": Style(TimmViT, tokens),
    "vit_pytorch": Style(VitPytorch, tokens),
    "einsum": Style(Einsum, tokens),
    "einsum_ellipsis": Style(EinsumEllipsis, tokens),
    "einsum_tokens_then_heads": Style(EinsumOverTokensThenHeads, tokens),
    "einsum_scaled_operand": Style(EinsumScaledOperand, tokens),
    "einsum_heads_in_batch": Style(EinsumHeadsInBatch, with_context, kv_heads=None),
    "baddbmm_of_nothing": Style(BaddbmmOfNothing, with_context, kv_heads=None),
    "guided_diffusion": Style(GuidedDiffusion, image, kv_heads=None),
    "denoising_diffusion": Style(DenoisingDiffusion, image),
    "values_on_the_left": Style(ValuesOnTheLeft, image, kv_heads=1),
    "set_transformer": Style(SetTransformer, with_context, kv_heads=None),
    "learned_query": Style(LearnedQuery, tokens),
    "luong_dot": Style(LuongDot, lambda: (torch.randn(B, E), torch.randn(B, S, E)), kv_heads=1),
    "head_by_head": Style(HeadByHead, tokens, "streamed mask [10, 10]", kv_heads=1, sites=H),
    "alphafold_rows": Style(AlphaFoldRows, lambda: (torch.randn(B, 3, S, E), torch.randn(B, 1, H, S, S)), None, None),
    "whisper": Style(Whisper, tokens),
    "keys_in_the_middle": Style(KeysInTheMiddle, tokens, "causal"),
    "deepseek": Style(DeepSeek, tokens, "causal"),
    "latent_attention": Style(LatentAttention, tokens, None, None),
    "baddbmm_of_zeros": Style(BaddbmmOfZeros, tokens, kv_heads=None),
    "sliced_over_heads": Style(SlicedOverHeads, tokens, kv_heads=2, sites=2),
}
