"""The cases of suite ``masks``: one shape under masks that come as bounds, sinks and slopes; and the scan of a mask.

Sequences of 4,096 tokens, four of them. ``padding`` is on the left, a quarter of all tokens in unequal parts;
``opaque`` is that mask as a bool ``[batch, 1, seqlen, seqlen]``, of which the kernel gets the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import PAST_L2, Captured, interleave
from suites import Implementations, ours, sdpa
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnpatch import masking, ops
from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.reference import hidden_keys
from attnpatch.testing.inputs import key_bounds, random_call

BATCH, HEADS, KV_HEADS, SEQLEN, HEAD_DIM = 4, 32, 8, 4096, 128
BUFFERS = 2
CACHE, VALID, STEPS, STEP_BATCH = 32768, 2048, 8, 8
SHAPE = f"B{BATCH} H{HEADS}/{KV_HEADS} S{SEQLEN} D{HEAD_DIM}"
STEP = f"B{STEP_BATCH} H{HEADS}/{KV_HEADS} S{CACHE} D{HEAD_DIM}"

CUDA = torch.device("cuda")
CAUSAL = {"window_right": 0}


@cache
def _row() -> Tensor:
    return torch.arange(SEQLEN, device=CUDA)


def _paddings() -> Tensor:
    """Padding tokens of each sequence, ``[batch, 1, 1]``."""
    return torch.tensor([0, SEQLEN // 8, 3 * SEQLEN // 8, SEQLEN // 2], device=CUDA).view(-1, 1, 1)


def _documents() -> Tensor:
    """The document of each token, ``[batch, seqlen]``: eight per sequence, of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.stack([torch.randperm(SEQLEN - 1, generator=generator)[:7].sort()[0] + 1 for _ in range(BATCH)])
    return (_row() >= ends.to(CUDA)[..., None]).sum(dim=1)


def _first_of_document() -> Tensor:
    """The first token of each token's document, ``[batch, 1, seqlen]``."""
    documents = _documents()
    return torch.searchsorted(documents, documents, side="left")[:, None]


def _opaque() -> Tensor:
    return (_row() <= _row()[:, None]) & (_row() >= _paddings()[..., None])


def _padding() -> dict[str, Any]:
    real = _row() >= _paddings()[:, 0]
    return {**CAUSAL, "key_padding": real, "key_bounds": key_bounds(_paddings(), SEQLEN)}


def _opaque_terms() -> dict[str, Any]:
    mask = _opaque()
    return {"attn_mask": mask, "key_bounds": ops.key_bounds(mask)}


def _valid() -> dict[str, Any]:
    mask = (torch.arange(CACHE, device=CUDA) < VALID).expand(STEP_BATCH, 1, 1, CACHE).contiguous()
    return {"attn_mask": mask, "key_bounds": ops.key_bounds(mask)}


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    f"{SHAPE} causal": lambda: CAUSAL,
    f"{SHAPE} causal, padding": _padding,
    f"{SHAPE} opaque causal, padding": _opaque_terms,
    f"{SHAPE} causal, 8 documents": lambda: {**CAUSAL, "key_bounds": key_bounds(_first_of_document(), SEQLEN)},
    f"{SHAPE} prefix 1024": lambda: {"key_bounds": key_bounds(0, (_row() + 1).clamp(min=1024))},
    f"{SHAPE} causal, chunks of 1024": lambda: {**CAUSAL, "key_bounds": key_bounds(_row() // 1024 * 1024, SEQLEN)},
    f"{SHAPE} causal, sinks": lambda: {**CAUSAL, "sinks": torch.linspace(-1, 3, HEADS, device=CUDA)},
    f"{SHAPE} causal, alibi": lambda: {**CAUSAL, "alibi_slopes": torch.linspace(0.01, 0.5, HEADS, device=CUDA)},
    f"{STEP} opaque, {VALID} valid": _valid,
}
"""Terms of each case, by its name."""


def _flex_masks() -> dict[str, Callable[..., Tensor]]:
    """``mask_mod`` of the cases that FlexAttention runs too."""
    paddings, documents = _paddings().flatten(), _documents()
    return {
        f"{SHAPE} causal": lambda b, h, q, k: q >= k,
        f"{SHAPE} causal, padding": lambda b, h, q, k: (q >= k) & (k >= paddings[b]),
        f"{SHAPE} causal, 8 documents": lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k]),
        f"{SHAPE} prefix 1024": lambda b, h, q, k: (q >= k) | (k < 1024),
    }


class MaskCase(NamedTuple):
    """A case of ``MASKS``."""

    name: str
    suite: str = "masks"

    def calls(self) -> list[AttentionCall]:
        """Calls over different buffers, together larger than L2."""
        terms, step = MASKS[self.name](), self.name.startswith(STEP)
        sizes = (STEP_BATCH, HEADS, KV_HEADS, 1, CACHE) if step else (BATCH, HEADS, KV_HEADS, SEQLEN, SEQLEN)
        draw = partial(random_call, *sizes, HEAD_DIM, dtype=torch.bfloat16, device="cuda", **terms)
        return [draw(seed=seed) for seed in range(STEPS if step else BUFFERS)]

    def implementations(self, call: AttentionCall) -> Implementations:
        """Ours; with the scan where a mask is opaque; cuDNN and FlexAttention where they run the like."""
        found: Implementations = {"attnpatch.triton.decode" if call.seqlen_q == 1 else "attnpatch.triton.prefill": ours}
        if call.attn_mask is not None:
            found[f"{next(iter(found))}+scan"] = _scanned
        if call.seqlen_q == 1:
            found["cudnn"] = _cudnn_of_the_valid
        elif call.attn_mask is not None:
            bias = torch.zeros_like(call.attn_mask[:, :1], dtype=call.q.dtype).masked_fill_(
                ~call.attn_mask[:, :1], -1e9
            )
            found["cudnn"] = partial(sdpa, SDPBackend.CUDNN_ATTENTION, attn_mask=bias)
        elif self.name == f"{SHAPE} causal":
            found["cudnn"] = partial(sdpa, SDPBackend.CUDNN_ATTENTION, attn_mask=None)
        if self.name in _flex_masks():
            found["flex"] = _flex(_flex_masks()[self.name])
        return found

    def rate(self, ms: float) -> dict[str, float]:
        """Products of visible pairs, or bytes of visible keys and values, per second."""
        if self.name.startswith(STEP):
            return {"tbps": 4 * STEP_BATCH * KV_HEADS * VALID * HEAD_DIM / ms / 1e9}
        return {"tflops": 4 * HEADS * HEAD_DIM * _visible_pairs(self.name) / ms / 1e9}


@cache
def _visible_pairs(name: str) -> int:
    """Pairs that see each other, of one head and all sequences."""
    one_head = random_call(BATCH, 1, 1, SEQLEN, SEQLEN, 1, device="cuda", **_of_one_head(MASKS[name]()))
    return int((~hidden_keys(one_head)).sum())


def _of_one_head(terms: dict[str, Any]) -> dict[str, Any]:
    return {name: term for name, term in terms.items() if name not in ("sinks", "alibi_slopes")}


def _scanned(call: AttentionCall) -> Tensor:
    """The scan of the mask, and the attention."""
    assert call.attn_mask is not None
    return ours(call._replace(key_bounds=ops.key_bounds(call.attn_mask[:, :1]).expand(-1, call.num_heads, -1, -1)))


def _cudnn_of_the_valid(call: AttentionCall) -> Tensor:
    """cuDNN on a cache of the valid length."""
    k, v = (x[:, :, :VALID] for x in (call.k, call.v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        return F.scaled_dot_product_attention(call.q, k, v, enable_gqa=True)


def _flex(mask_mod: Callable[..., Tensor]) -> Callable[[AttentionCall], Tensor]:
    """FlexAttention, compiled, with its block mask made beforehand."""
    blocks = create_block_mask(mask_mod, BATCH, None, SEQLEN, SEQLEN, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda call: compiled(call.q, call.k, call.v, block_mask=blocks, enable_gqa=True)


SCANS: dict[str, Callable[[int], Tensor]] = {
    f"B{BATCH} S{SEQLEN} bool": lambda seed: _opaque(),
    f"B{BATCH} S{SEQLEN} bfloat16": lambda seed: torch.zeros(
        BATCH, 1, SEQLEN, SEQLEN, dtype=torch.bfloat16, device=CUDA
    ).masked_fill_(~_opaque(), -torch.inf),
    f"B{STEP_BATCH} S{CACHE} bool, one row": lambda seed: _valid()["attn_mask"],
}
"""Masks to scan, by the case's name."""


def measure_scan(name: str) -> Iterator[dict[str, Any]]:
    """Rows of the scan alone: ours and plain torch; both must give the same bounds.

    Raises:
        AssertionError: they do not.
    """
    make = SCANS[name]
    masks = [make(0)]
    num_bytes = masks[0].numel() * masks[0].element_size()
    masks += [masks[0].clone() for _ in range(min(63, PAST_L2 // num_bytes))]
    found = {"attnpatch.key_bounds": ops.key_bounds, "torch": masking.key_bounds}
    assert torch.equal(ops.key_bounds(masks[0]), masking.key_bounds(masks[0]))
    for impl, by_clock in interleave({impl: Captured(run, masks) for impl, run in found.items()}).items():
        for clock, ms in by_clock.items():
            row = {"suite": "masks", "case": f"scan {name}", "impl": impl, "ms": ms, "tbps": num_bytes / ms / 1e9}
            yield {**row, "rel_err": 0.0, "clock": clock}
