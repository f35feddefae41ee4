"""Attention in torch's own words: its modules, its documentation, its mixed precision; see ``handwritten.py``."""

import math

import torch
from torch import nn

from .handwritten import KV, Block, D, E, H, S, Style, tokens, with_context
from .handwritten_masks import tokens_and_keep


class TorchMultihead(nn.Module):
    """torch's own module asked for weights that nobody reads."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x)[0]


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


class TorchMultiheadMasked(TorchMultihead):
    """With torch's two masks: True hides."""

    def forward(self, x, keep):
        future = torch.ones(S, S, dtype=torch.bool).triu(1)
        return self.attn(x, x, x, key_padding_mask=~keep, attn_mask=future, need_weights=False)[0]


class TorchMultiheadCross(TorchMultihead):
    def forward(self, x, context):
        return self.attn(x, context, context, need_weights=False)[0]


class TorchEncoderLayer(nn.Module):
    """The layer as training sees it, without torch's packed kernel."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(E, H, E, dropout=0.0, batch_first=True)

    def forward(self, x):
        self.layer.train()
        mask = nn.Transformer.generate_square_subsequent_mask(S)
        return self.layer(x, src_mask=mask, is_causal=True)


class TorchDecoderLayer(nn.Module):
    """Tokens first; one attention is causal, one crosses."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(E, H, E, dropout=0.0)

    def forward(self, x, memory):
        mask = torch.triu(torch.full((S, S), float("-inf")), diagonal=1)
        return self.layer(x.transpose(0, 1), memory.transpose(0, 1), tgt_mask=mask)


STYLES = {
    "torch_multihead": Style(TorchMultihead, tokens, kv_heads=None),
    "torch_docs": Style(TorchDocs, tokens, None, KV),
    "autocast": Style(Autocast, tokens),
    "torch_multihead_masked": Style(TorchMultiheadMasked, tokens_and_keep, None, kv_heads=None),
    "torch_multihead_cross": Style(TorchMultiheadCross, with_context, kv_heads=None),
    "torch_encoder_layer": Style(TorchEncoderLayer, tokens, "causal", kv_heads=None),
    "torch_decoder_layer": Style(TorchDecoderLayer, with_context, None, kv_heads=None, sites=2),
}
