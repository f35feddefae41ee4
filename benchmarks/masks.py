"""The cases of suite ``masks``: one shape under masks and other terms of the scores; and the scan of a mask.

Sequences of 4,096 tokens, four of them. ``padding`` is on the left, a quarter of all tokens in unequal parts;
``opaque`` is that mask as a bool ``[batch, 1, seqlen, seqlen]``, of which the kernel gets the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from harness import DEVICE, PAST_L2, ROUNDS, Captured, interleave
from measure import Implementation, Implementations, our_name, ours
from peers import cudnn
from torch import Tensor
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

CAUSAL = {"window_right": 0}
SOFTCAP = 50.0


@cache
def _row() -> Tensor:
    return torch.arange(SEQLEN, device=DEVICE)


def _paddings() -> Tensor:
    """Padding tokens of each sequence, ``[batch, 1, 1]``."""
    return torch.tensor([0, SEQLEN // 8, 3 * SEQLEN // 8, SEQLEN // 2], device=DEVICE).view(-1, 1, 1)


def _documents() -> Tensor:
    """The document of each token, ``[batch, seqlen]``: eight per sequence, of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.stack([torch.randperm(SEQLEN - 1, generator=generator)[:7].sort()[0] + 1 for _ in range(BATCH)])
    return (_row() >= ends.to(DEVICE)[..., None]).sum(dim=1)


def _slopes() -> Tensor:
    return torch.linspace(0.01, 0.5, HEADS, device=DEVICE)


def _sinks() -> Tensor:
    return torch.linspace(-1, 3, HEADS, device=DEVICE)


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
    mask = (torch.arange(CACHE, device=DEVICE) < VALID).expand(STEP_BATCH, 1, 1, CACHE).contiguous()
    return {"attn_mask": mask, "key_bounds": ops.key_bounds(mask)}


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    f"{SHAPE} causal": lambda: CAUSAL,
    f"{SHAPE} causal, padding": _padding,
    f"{SHAPE} opaque causal, padding": _opaque_terms,
    f"{SHAPE} causal, 8 documents": lambda: {**CAUSAL, "key_bounds": key_bounds(_first_of_document(), SEQLEN)},
    f"{SHAPE} prefix 1024": lambda: {"key_bounds": key_bounds(0, (_row() + 1).clamp(min=1024))},
    f"{SHAPE} causal, chunks of 1024": lambda: {**CAUSAL, "key_bounds": key_bounds(_row() // 1024 * 1024, SEQLEN)},
    f"{SHAPE} causal, sinks": lambda: {**CAUSAL, "sinks": _sinks()},
    f"{SHAPE} causal, alibi": lambda: {**CAUSAL, "alibi_slopes": _slopes()},
    f"{SHAPE} causal, window 1024": lambda: {**CAUSAL, "window_left": 1023},
    f"{SHAPE} causal, softcap 50": lambda: {**CAUSAL, "softcap": SOFTCAP},
    f"{STEP} opaque, {VALID} valid": _valid,
}
"""Terms of each case, by its name."""


class Flex(NamedTuple):
    """What FlexAttention is given: a mask, a change of scores, and sinks, which come to the sum after it."""

    mask_mod: Callable[..., Tensor]
    score_mod: Callable[..., Tensor] | None = None
    sinks: Tensor | None = None


def _flex_masks() -> dict[str, Flex]:
    """Of the cases that FlexAttention runs too."""
    paddings, documents, slopes = _paddings().flatten(), _documents(), _slopes()

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    return {
        f"{SHAPE} causal": Flex(causal),
        f"{SHAPE} causal, padding": Flex(lambda b, h, q, k: (q >= k) & (k >= paddings[b])),
        f"{SHAPE} causal, 8 documents": Flex(lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k])),
        f"{SHAPE} prefix 1024": Flex(lambda b, h, q, k: (q >= k) | (k < 1024)),
        f"{SHAPE} causal, chunks of 1024": Flex(lambda b, h, q, k: (q >= k) & (q // 1024 == k // 1024)),
        f"{SHAPE} causal, sinks": Flex(causal, sinks=_sinks()),
        f"{SHAPE} causal, alibi": Flex(causal, lambda s, b, h, q, k: s - slopes[h] * (q - k)),
        f"{SHAPE} causal, window 1024": Flex(lambda b, h, q, k: (q >= k) & (q - k < 1024)),
        f"{SHAPE} causal, softcap 50": Flex(causal, lambda s, b, h, q, k: SOFTCAP * torch.tanh(s / SOFTCAP)),
    }


@cache
def _terms(name: str) -> dict[str, Any]:
    return MASKS[name]()


class MaskCase(NamedTuple):
    """A case of ``MASKS``."""

    name: str
    suite: str = "masks"
    short: bool = False

    @property
    def is_step(self) -> bool:
        """Whether it is a decode step."""
        return self.name.startswith(STEP)

    @property
    def buffers(self) -> int:
        """Calls over different buffers that are together larger than L2."""
        return STEPS if self.is_step else BUFFERS

    def call(self, seed: int) -> AttentionCall:
        """A call over buffers of its own."""
        sizes = (STEP_BATCH, HEADS, KV_HEADS, 1, CACHE) if self.is_step else (BATCH, HEADS, KV_HEADS, SEQLEN, SEQLEN)
        return random_call(*sizes, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE, seed=seed, **_terms(self.name))

    def implementations(self, call: AttentionCall) -> Implementations:
        """Ours; with the scan where a mask is opaque; cuDNN and FlexAttention where they run the like."""
        found = {our_name(call): Implementation(ours)}
        if call.attn_mask is not None:
            found[f"{our_name(call)}+scan"] = Implementation(_scanned)
        if self.is_step:
            found["cudnn"] = cudnn()._replace(prepare=_valid_cache)
        elif call.attn_mask is not None:
            hidden = ~call.attn_mask[:, :1]
            found["cudnn"] = cudnn(torch.zeros_like(hidden, dtype=call.q.dtype).masked_fill_(hidden, -1e9))
        elif self.name == f"{SHAPE} causal":
            found["cudnn"] = cudnn()
        if self.name in _flex_masks():
            found["flex"] = Implementation(_flex(_flex_masks()[self.name]))
        return found

    def rate(self, ms: float, form: Any) -> dict[str, float]:
        """Products of visible pairs, or bytes of visible keys and values, per second."""
        if self.is_step:
            return {"tbps": 4 * STEP_BATCH * KV_HEADS * VALID * HEAD_DIM / ms / 1e9}
        return {"tflops": 4 * HEADS * HEAD_DIM * _visible_pairs(self.name) / ms / 1e9}


@cache
def _visible_pairs(name: str) -> int:
    """Pairs that see each other, of one head and all sequences."""
    one_head = random_call(BATCH, 1, 1, SEQLEN, SEQLEN, 1, device=DEVICE, **_of_one_head(_terms(name)))
    return int((~hidden_keys(one_head)).sum())


def _of_one_head(terms: dict[str, Any]) -> dict[str, Any]:
    return {name: term for name, term in terms.items() if name not in ("sinks", "alibi_slopes")}


def _scanned(call: AttentionCall) -> Tensor:
    """The scan of the mask, and the attention."""
    assert call.attn_mask is not None
    return ours(call._replace(key_bounds=ops.key_bounds(call.attn_mask[:, :1]).expand(-1, call.num_heads, -1, -1)))


def _valid_cache(call: AttentionCall) -> AttentionCall:
    """A cache of the valid length."""
    return call._replace(k=call.k[:, :, :VALID], v=call.v[:, :, :VALID], attn_mask=None, key_bounds=None)


def _flex(flex: Flex) -> Callable[[AttentionCall], Tensor]:
    """FlexAttention, compiled, with its block mask made beforehand; what other cases compiled is forgotten."""
    torch._dynamo.reset()
    blocks = create_block_mask(flex.mask_mod, BATCH, None, SEQLEN, SEQLEN, device=DEVICE)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"block_mask": blocks, "enable_gqa": True}
        if flex.sinks is None:
            return flex_attention(q, k, v, flex.score_mod, **options)  # type: ignore[no-any-return]
        o, lse = flex_attention(q, k, v, flex.score_mod, return_lse=True, **options)
        return o * torch.sigmoid(lse - flex.sinks[:, None])[..., None].to(o.dtype)

    compiled = torch.compile(attention, dynamic=False)
    return lambda call: compiled(call.q, call.k, call.v)


SCANS: dict[str, Callable[[int], Tensor]] = {
    f"B{BATCH} S{SEQLEN} bool": lambda seed: _opaque(),
    f"B{BATCH} S{SEQLEN} bfloat16": lambda seed: torch.zeros(
        BATCH, 1, SEQLEN, SEQLEN, dtype=torch.bfloat16, device=DEVICE
    ).masked_fill_(~_opaque(), -torch.inf),
    f"B{STEP_BATCH} S{CACHE} bool, one row": lambda seed: _valid()["attn_mask"],
}
"""Masks to scan, by the case's name."""


def measure_scan(name: str, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """Rows of the scan alone: ours and plain torch.

    Raises:
        AssertionError: they give other bounds.
    """
    masks = [run_scan_once(name)]
    num_bytes = masks[0].numel() * masks[0].element_size()
    masks += [masks[0].clone() for _ in range(min(63, PAST_L2 // num_bytes))]
    found = {"attnpatch.key_bounds": ops.key_bounds, "torch": masking.key_bounds}
    captured = {impl: Captured(run, masks) for impl, run in found.items()}
    for impl, by_clock in interleave(captured, rounds).items():
        for clock, ms in by_clock.items():
            row = {"suite": "masks", "case": f"scan {name}", "impl": impl, "ms": ms, "tbps": num_bytes / ms / 1e9}
            yield {**row, "rel_err": 0.0, "clock": clock}


def run_scan_once(name: str) -> Tensor:
    """The mask, whose scan was found right."""
    mask = SCANS[name](0)
    assert torch.equal(ops.key_bounds(mask), masking.key_bounds(mask))
    return mask
