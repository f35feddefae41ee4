"""A two-layer decoder that compiles in a fraction of a second, and a tiny Llama for what needs Hugging Face."""

import pytest
import torch
from torch import nn


class Attention(nn.Module):
    """Grouped-query attention written out, with an optional mask, dropout and return of the probabilities."""

    def __init__(self, width=32, heads=4, kv_heads=2, dropout=0.0):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * kv_heads * self.dim)
        self.dropout = nn.Dropout(dropout)
        self.returns_probabilities = False

    def forward(self, x, mask):
        batch, seqlen, _ = x.shape
        q = self.q(x).view(batch, seqlen, self.heads, self.dim).transpose(1, 2)
        k, v = self.kv(x).view(batch, seqlen, 2 * self.kv_heads, self.dim).transpose(1, 2).chunk(2, dim=1)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        p = self.dropout(((q @ k.transpose(-1, -2)) * self.dim**-0.5 + mask).softmax(dim=-1))
        o = self.o((p @ v).transpose(1, 2).reshape(batch, seqlen, -1))
        return (o, p) if self.returns_probabilities else (o, None)


class Tiny(nn.Module):
    """``forward(ids, padding=None)`` gives logits, causal."""

    def __init__(self, layers=2, vocabulary=50, width=32, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Attention(width, dropout=dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        self.breaks = False

    def forward(self, ids, padding=None):
        seqlen = ids.shape[1]
        keep = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()[None, None]
        if padding is not None:
            keep = keep & padding[:, None, None, :].to(torch.bool)
        mask = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
        x, probabilities = self.embed(ids), []
        for layer in self.layers:
            if self.breaks:
                torch._dynamo.graph_break()
            o, p = layer(x, mask)
            x = x + o
            probabilities.append(p)
        logits = self.head(x)
        return (logits, probabilities) if p is not None else logits


def make_tiny(**kwargs):
    torch.manual_seed(0)
    return Tiny(**kwargs).eval()


def make_llama(layers=2, attn_implementation="eager", **config):
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = LlamaConfig(num_hidden_layers=layers, **{**sizes, **config})
    return LlamaForCausalLM._from_config(config, attn_implementation=attn_implementation).eval()


@pytest.fixture
def tiny():
    return make_tiny()


@pytest.fixture
def tiny_with():
    """Make a Tiny with other arguments."""
    return make_tiny


@pytest.fixture
def llama_with():
    """Make a tiny Llama; takes ``layers``, ``attn_implementation`` and fields of its config."""
    return make_llama


@pytest.fixture
def ids():
    return torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(1))
