"""The shapes that are measured, and the implementations that are measured on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from harness import PAST_L2, Captured, interleave
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnpatch.attention_call import AttentionCall
from attnpatch.dispatch import load_backend
from attnpatch.masking import band
from attnpatch.testing.inputs import random_call
from attnpatch.testing.samples import check_samples, relative_error

SUITES = {
    "prefill": [
        "B4 H32/8 S4096 D128 causal",
        "B4 H32/32 S4096 D64 causal",
        "B2 H16/8 S8192 D256 causal",
        "B4 H32/8 S4096 D128 full",
        "B4 H32/8 S4096 D128 window 1024",
        "B1 H9/3 S4096 D64 causal",
    ],
    "decode": [
        "B8 H32/8 S32768 D128",
        "B1 H32/8 S4096 D128",
        "B1 H32/8 S32768 D128",
        "B1 H9/3 S4096 D64",
    ],
}
"""Cases by suite; H is query heads / key and value heads. A decode step sees all S keys."""

Implementations = dict[str, Callable[[AttentionCall], Tensor]]
"""What can run a call, by the name it has in the results."""

MOST_BUFFERS = 64
LEAST_STEPS = 8


class Measured(Protocol):
    """What :func:`measure` needs to know of a case."""

    @property
    def suite(self) -> str:
        """The suite's name."""
        ...

    @property
    def name(self) -> str:
        """The case's name."""
        ...

    def calls(self) -> list[AttentionCall]:
        """Calls over different buffers, together larger than L2."""
        ...

    def implementations(self, call: AttentionCall) -> Implementations:
        """Ours, the first, and its peers."""
        ...

    def rate(self, ms: float) -> dict[str, float]:
        """Useful work per second, by unit."""
        ...


class Case(NamedTuple):
    """A case's name taken apart."""

    suite: str
    name: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen: int
    head_dim: int
    window: int | None
    causal: bool

    @classmethod
    def parse(cls, suite: str, name: str) -> Case:
        """Read ``name``."""
        match = re.fullmatch(r"B(\d+) H(\d+)/(\d+) S(\d+) D(\d+)(?: (causal|full|window (\d+)))?", name)
        assert match, name
        sizes = [int(group) for group in match.groups()[:5]]
        window = match[7] and int(match[7])
        return cls(suite, name, *sizes, window=window, causal=match[6] != "full")

    def calls(self) -> list[AttentionCall]:
        """Calls over different buffers, together larger than L2."""
        rows = 1 if self.suite == "decode" else self.seqlen
        vectors = 2 * self.batch * (rows * self.num_heads + self.seqlen * self.num_kv_heads)  # q, o and k, v
        count = min(MOST_BUFFERS, -(-PAST_L2 // (2 * vectors * self.head_dim)))
        calls = [self._call(seed) for seed in range(count)]
        # A decode step is short beside the gap between two graphs.
        return calls * (-(-LEAST_STEPS // count) if self.suite == "decode" else 1)

    def _call(self, seed: int) -> AttentionCall:
        rows = 1 if self.suite == "decode" else self.seqlen
        terms: dict[str, Any] = {"window_right": 0} if self.causal else {}
        if self.window:
            terms["window_left"] = self.window - 1
        if self.suite == "decode":
            terms["q_offset"] = torch.tensor(self.seqlen - 1, device="cuda")
        sizes = (self.batch, self.num_heads, self.num_kv_heads, rows, self.seqlen, self.head_dim)
        return random_call(*sizes, dtype=torch.bfloat16, device="cuda", seed=seed, **terms)

    def implementations(self, call: AttentionCall) -> Implementations:
        """Ours, cuDNN, FlashAttention where it can, and Hugging Face's eager attention."""
        return implementations(call)

    def rate(self, ms: float) -> dict[str, float]:
        """Useful work per second: bytes of K and V for decode, products of visible pairs for prefill."""
        if self.suite == "decode":
            elements = 2 * self.batch * self.num_kv_heads * self.seqlen * self.head_dim
            return {"tbps": 2 * elements / ms / 1e9}
        pairs = self.seqlen**2 / (2 if self.causal else 1)
        if self.window:
            pairs = self.seqlen * self.window - self.window**2 / 2
        return {"tflops": 4 * self.batch * self.num_heads * self.head_dim * pairs / ms / 1e9}


def ours(call: AttentionCall) -> Tensor:
    """The kernel that dispatch would take."""
    return load_backend(_backend(call)).run(call)


def _backend(call: AttentionCall) -> str:
    return "triton.decode" if call.seqlen_q == 1 else "triton.prefill"


def sdpa(backend: SDPBackend, call: AttentionCall, attn_mask: Tensor | None) -> Tensor:
    """torch's scaled_dot_product_attention on one backend."""
    causal = call.is_banded and call.seqlen_q > 1 and attn_mask is None
    with sdpa_kernel([backend]):
        return F.scaled_dot_product_attention(
            call.q, call.k, call.v, attn_mask, is_causal=causal, enable_gqa=call.group_size > 1
        )


def hf_eager(call: AttentionCall, attn_mask: Tensor | None) -> Tensor:
    """The ``eager_attention_forward`` of Hugging Face's Llama, mask included."""
    k, v = (_repeat_kv(x, call.group_size) for x in (call.k, call.v))
    scores = call.q @ k.transpose(2, 3) * call.sm_scale
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(dim=-1, dtype=torch.float32).to(call.q.dtype) @ v


def _repeat_kv(x: Tensor, n: int) -> Tensor:
    batch, heads, seqlen, head_dim = x.shape
    return x[:, :, None].expand(batch, heads, n, seqlen, head_dim).reshape(batch, heads * n, seqlen, head_dim)


def implementations(call: AttentionCall) -> Implementations:
    """What can run ``call`` of a band alone."""
    needs_mask = call.window_left is not None
    additive = _additive_mask(call) if call.seqlen_q > 1 and call.is_banded else None
    cudnn_mask = additive if needs_mask else None
    found: Implementations = {
        f"attnpatch.{_backend(call)}": ours,
        "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION, attn_mask=cudnn_mask),
        "hf-eager": partial(hf_eager, attn_mask=additive),
    }
    if not needs_mask:  # FlashAttention in torch takes no mask
        found["sdpa-flash"] = partial(sdpa, SDPBackend.FLASH_ATTENTION, attn_mask=None)
    return found


def _additive_mask(call: AttentionCall) -> Tensor:
    """The N x N mask that a model builds, ``[1, 1, seqlen_q, seqlen_k]``."""
    rows, keys = (torch.arange(n, device=call.q.device) for n in (call.seqlen_q, call.seqlen_k))
    hidden = ~band(call, rows, keys)[:, None]
    return call.q.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(call.q.dtype).min)


def measure(case: Measured) -> Iterator[dict[str, Any]]:
    """Rows of one case: every implementation, both clocks. Ours must be right before anything is timed.

    Raises:
        AssertionError: our output is outside the tolerance against float64.
    """
    calls = case.calls()
    found = case.implementations(calls[0])
    check_samples(next(iter(found.values()))(calls[0]), calls[0])
    errors = {name: relative_error(run(calls[0]), calls[0]) for name, run in found.items()}
    captured = {name: Captured(run, calls) for name, run in found.items()}
    for name, by_clock in interleave(captured).items():
        for clock, ms in by_clock.items():
            row = {"suite": case.suite, "case": case.name, "impl": name, "ms": ms}
            yield {**row, **case.rate(ms), "rel_err": errors[name], "clock": clock}
