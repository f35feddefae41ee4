"""Suite ``varlen``: prompts of very different lengths in one packed call, beside as much work in equal ones."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from harness import DEVICE
from measure import Implementation, Implementations, our_name, ours
from peers import fa3_prefill, fa3_varlen

from attnpatch.attention_call import AttentionCall
from attnpatch.dispatch import load_backend
from attnpatch.testing.inputs import packed, random_call


class VarlenCase(NamedTuple):
    """``batch`` prompts of ``shortest`` to ``longest`` tokens, log-uniform, causal."""

    batch: int = 64
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    shortest: int = 16
    longest: int = 4096
    suite: str = "varlen"
    short: bool = False
    buffers: int = 1

    @property
    def name(self) -> str:
        """Sizes as in suites.py."""
        lengths = f"S{self.shortest} to {self.longest}"
        return f"B{self.batch} H{self.num_heads}/{self.num_kv_heads} {lengths} D{self.head_dim} causal"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        steps = torch.rand(self.batch, generator=torch.Generator().manual_seed(0)).tolist()
        return [round(self.shortest * (self.longest / self.shortest) ** step) for step in steps]

    @property
    def equal_length(self) -> int:
        """That of as many prompts of one length that have as many pairs of a row and a key."""
        return round(math.sqrt(sum(n * n for n in self.lengths) / self.batch))

    def call(self, seed: int) -> AttentionCall:
        """All prompts one behind the other."""
        return packed([self._dense(1, n, seed + i) for i, n in enumerate(self.lengths)])

    def _dense(self, batch: int, seqlen: int, seed: int) -> AttentionCall:
        sizes = (batch, self.num_heads, self.num_kv_heads, seqlen, seqlen, self.head_dim)
        return random_call(*sizes, dtype=torch.bfloat16, device=DEVICE, seed=seed, window_right=0)

    def implementations(self, call: AttentionCall) -> Implementations:
        """Ours, FlashAttention-3, both at equal lengths, and the kernel of any mix of packed sequences."""
        equal = self._dense(self.batch, self.equal_length, 0)
        found = {our_name(call): Implementation(ours), **fa3_varlen(num_splits=1)}
        found[f"{our_name(equal)}+equal"] = Implementation(ours, lambda call: equal)
        found |= {f"{name}+equal": Implementation(one.run, lambda call: equal) for name, one in fa3_prefill().items()}
        return found | _append()

    def rate(self, ms: float, form: Any) -> dict[str, float]:
        """Products of visible pairs per second."""
        is_equal = isinstance(form, AttentionCall) and form.cu_seqlens_q is None
        lengths = [self.equal_length] * self.batch if is_equal else self.lengths
        return {"tflops": 2 * self.num_heads * self.head_dim * sum(n * n for n in lengths) / ms / 1e9}


def _append() -> Implementations:
    """Not in Triton's interpreter, which computes bfloat16 products wrongly."""
    return {"attnpatch.triton.append": Implementation(load_backend("triton.append").run)} if DEVICE == "cuda" else {}
