"""FLOPs and bytes of a prefill and of a decode step, and the times that a device cannot get below.

A roofline (Williams, Waterman, Patterson 2009): a time is at least bytes / bandwidth and at least FLOPs / rate. Bytes
are those that must move: weights once per forward, and K and V. Activations, which a fused program need not write to
memory, softmax, norms and the host are left out, so that floors are below what any machine takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnpatch.roofline.device import Device
from attnpatch.roofline.formats import SIXTEEN_BIT, KVFormat
from attnpatch.roofline.model import ModelShape


@dataclass(frozen=True)
class Cost:
    """What one forward costs.

    Args:
        tokens: that it yields, one per sequence.
        weight_flops: FLOPs of products with weights.
        attention_flops: FLOPs of ``q k^T`` and ``p v``.
        weight_bytes: bytes of weights read.
        kv_bytes: bytes of K and V read and written.
        kept_bytes: bytes of K and V in the cache.
    """

    tokens: int
    weight_flops: float
    attention_flops: float
    weight_bytes: float
    kv_bytes: float
    kept_bytes: float

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return self.weight_flops + self.attention_flops

    @property
    def bytes(self) -> float:
        """All bytes."""
        return self.weight_bytes + self.kv_bytes

    @property
    def attention_share(self) -> float:
        """Of the bytes, those of K and V: 0 to 1."""
        return self.kv_bytes / self.bytes

    def bytes_floor(self, device: Device) -> float:
        """Seconds in which the device moves the bytes."""
        return self.bytes / device.bandwidth

    def flops_floor(self, device: Device) -> float:
        """Seconds in which the device computes the FLOPs."""
        return self.flops / device.flops

    def floor(self, device: Device) -> float:
        """Seconds that the forward takes at least."""
        return max(self.bytes_floor(device), self.flops_floor(device))

    def limit(self, device: Device) -> str:
        """``"bytes"`` or ``"FLOPs"``, whichever takes longer."""
        return "bytes" if self.bytes_floor(device) >= self.flops_floor(device) else "FLOPs"

    def tokens_per_s(self, device: Device) -> float:
        """Tokens per second of all sequences together, at most."""
        return self.tokens / self.floor(device)

    def to_dict(self, device: Device) -> dict[str, Any]:
        """All numbers, in FLOPs, bytes and seconds."""
        return {
            **vars(self),
            "attention_share": self.attention_share,
            "bytes_floor_s": self.bytes_floor(device),
            "flops_floor_s": self.flops_floor(device),
            "limit": self.limit(device),
            "tokens_per_s_at_most": self.tokens_per_s(device),
        }


def decode_cost(shape: ModelShape, batch: int, context: int, kv_format: KVFormat = SIXTEEN_BIT) -> Cost:
    """One new token for each of ``batch`` sequences of ``context`` keys, its own included.

    Per key and layer it sees, a query head takes ``2 head_dim`` FLOPs for its score and as many for its value; K and V
    are read once for all heads of a group: ``2 num_kv_heads`` vectors. The write of the new key is not counted.

    Raises:
        ValueError: batch or context is below 1.
    """
    _check(batch, context)
    keys = batch * shape.kept_keys(context)
    return Cost(
        tokens=batch,
        weight_flops=shape.weights.flops(batch, batch),
        attention_flops=4 * shape.num_heads * shape.head_dim * keys,
        weight_bytes=shape.weights.read_bytes(batch),
        kv_bytes=2 * shape.num_kv_heads * keys * kv_format.moved(shape.head_dim),
        kept_bytes=2 * shape.num_kv_heads * keys * kv_format.kept(shape.head_dim),
    )


def prefill_cost(shape: ModelShape, batch: int, context: int, kv_format: KVFormat = SIXTEEN_BIT) -> Cost:
    """``batch`` prompts of ``context`` tokens, causal, by a fused kernel: what is masked is not computed.

    Weights are read once, K and V written once in the format of the cache; windowed layers keep their window.

    Raises:
        ValueError: batch or context is below 1.
    """
    _check(batch, context)
    kept = 2 * shape.num_kv_heads * batch * shape.kept_keys(context) * kv_format.kept(shape.head_dim)
    return Cost(
        tokens=batch,
        weight_flops=shape.weights.flops(batch * context, batch),
        attention_flops=4 * shape.num_heads * shape.head_dim * batch * shape.visible_pairs(context),
        weight_bytes=shape.weights.read_bytes(batch * context),
        kv_bytes=kept,
        kept_bytes=kept,
    )


def eager_score_bytes(shape: ModelShape, batch: int, context: int) -> int:
    """Bytes of the scores of a prefill in 16 bit, as eager attention writes them once: the masked ones, too.

    ``2 context ** 2`` for each head of each layer, whatever its window; no part of ``prefill_cost``.

    Raises:
        ValueError: batch or context is below 1.
    """
    _check(batch, context)
    return 2 * context * context * batch * shape.num_heads * shape.kv_layers


def _check(batch: int, context: int) -> None:
    for name, size in (("batch", batch), ("context", context)):
        if size < 1:
            raise ValueError(f"{name} is {size}; give at least 1")
