"""Suite ``mixed``: decode steps, appends and prefills of a serving batch in one call, packed, over pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import DEVICE, PAST_L2
from measure import Implementation, Implementations, our_name, ours
from peers import fa3_varlen, flashinfer, packed_kv
from torch import Tensor

from attnpatch.attention_call import AttentionCall, bottom_right_offset


class MixedCase(NamedTuple):
    """``decodes`` steps on ``shortest`` to ``longest`` keys, log-uniform; ``appends`` of ``append_rows`` on a cache of
    ``longest`` / 2; ``prefills`` of ``prefill_rows`` tokens without a cache.
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    decodes: int = 28
    shortest: int = 1024
    longest: int = 16384
    appends: int = 2
    append_rows: int = 16
    prefills: int = 2
    prefill_rows: int = 1024
    page_size: int = 16
    suite: str = "mixed"
    short: bool = True

    @property
    def name(self) -> str:
        """The parts of the batch."""
        parts = (
            f"{self.decodes} decodes on {self.shortest} to {self.longest}",
            f"{self.appends} appends of {self.append_rows}",
            f"{self.prefills} prefills of {self.prefill_rows}",
            f"H{self.num_heads}/{self.num_kv_heads} D{self.head_dim} page {self.page_size}",
        )
        return ", ".join(parts)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Rows and keys of each sequence."""
        steps = torch.rand(self.decodes, generator=torch.Generator().manual_seed(0)).tolist()
        decodes = [(1, round(self.shortest * (self.longest / self.shortest) ** step)) for step in steps]
        appends = [(self.append_rows, self.longest // 2)] * self.appends
        return decodes + appends + [(self.prefill_rows, self.prefill_rows)] * self.prefills

    @property
    def _kv_bytes(self) -> int:
        return sum(keys for _, keys in self.lengths) * 4 * self.num_kv_heads * self.head_dim

    @property
    def buffers(self) -> int:
        """Calls over different buffers that are together larger than L2."""
        return -(-PAST_L2 // self._kv_bytes)

    def call(self, seed: int) -> AttentionCall:
        """A call over buffers of its own: pages dealt out at random, none spare."""
        generator = torch.Generator(device=DEVICE).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(torch.bfloat16)

        rows, keys = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in zip(*self.lengths, strict=True))
        table = self._table(keys, generator)
        q = draw(1, int(rows.sum()), self.num_heads, self.head_dim).transpose(1, 2)
        k, v = (draw(int(table.max()) + 1, self.num_kv_heads, self.page_size, self.head_dim) for _ in range(2))
        cu_seqlens_q = F.pad(rows.cumsum(0), (1, 0)).to(torch.int32)
        causal: dict[str, Any] = {"q_offset": bottom_right_offset(cu_seqlens_q, keys), "window_right": 0}
        return AttentionCall(q, k, v, self.head_dim**-0.5, **causal, block_table=table, cu_seqlens_q=cu_seqlens_q)

    def _table(self, keys: Tensor, generator: torch.Generator) -> Tensor:
        """A block table of as many pages as each sequence needs, -1 behind them."""
        pages = -(-keys // self.page_size)
        used = torch.arange(int(pages.max()), device=DEVICE) < pages[:, None]
        table = torch.full(used.shape, -1, dtype=torch.int32, device=DEVICE)
        table[used] = torch.randperm(int(pages.sum()), generator=generator, device=DEVICE).to(torch.int32)
        return table

    def implementations(self, call: AttentionCall) -> Implementations:
        """Ours on pages and on packed K and V; FlashInfer on the pages, FlashAttention-3 on the packed ones."""
        on_packed = {f"{our_name(_packed(call))}+packed": Implementation(ours, _packed)}
        return {our_name(call): Implementation(ours), **on_packed, **flashinfer(), **fa3_varlen()}

    def rate(self, ms: float, form: Any) -> dict[str, float]:
        """Bytes of keys and values, each once, per second."""
        return {"tbps": self._kv_bytes / ms / 1e9}


def _packed(call: AttentionCall) -> AttentionCall:
    """The same sequences with K and V one behind the other."""
    kv = packed_kv(call)
    k, v = (x.transpose(0, 1)[None] for x in (kv.k, kv.v))
    return call._replace(k=k, v=v, block_table=None, cu_seqlens_k=kv.cu_seqlens_k)
