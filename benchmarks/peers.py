"""The implementations that ours are measured beside. One that is not installed is left out, with a line that says so.

FlashAttention-3 is the wheel fa3-fwd (no pages, no window), FlashInfer the wheel flashinfer-python; its first call of a
head dim compiles for about 40 s.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import DEVICE
from measure import Implementation
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.dense import sequences
from attnpatch.masking import band

PAGE_SIZE = 16
"""Of the pages as which FlashInfer gets a dense cache."""

WORKSPACE_BYTES = 256 << 20


@cache
def installed(module: str) -> Any:
    """The module, or None with a line that says why it does not import."""
    try:
        if module == "fa3_fwd_interface":  # imports its own configuration under the name of its parent project
            sys.modules.setdefault("flash_attn_config", importlib.import_module("fa3_fwd_config"))
        return importlib.import_module(module)
    except Exception as error:
        print(f"{module} is not measured: {type(error).__name__}: {error}", flush=True)
        return None


def sdpa(backend: SDPBackend, call: AttentionCall, attn_mask: Tensor | None = None) -> Tensor:
    """torch's scaled_dot_product_attention on one backend."""
    causal = call.is_banded and call.seqlen_q > 1 and attn_mask is None
    with sdpa_kernel([backend] if DEVICE == "cuda" else [SDPBackend.MATH]):
        return F.scaled_dot_product_attention(
            call.q, call.k, call.v, attn_mask, is_causal=causal, enable_gqa=call.group_size > 1
        )


def cudnn(attn_mask: Tensor | None = None) -> Implementation:
    """cuDNN's attention, through torch."""
    return Implementation(partial(sdpa, SDPBackend.CUDNN_ATTENTION, attn_mask=attn_mask))


def sdpa_flash() -> Implementation:
    """FlashAttention-2, through torch, which gives it no mask."""
    return Implementation(partial(sdpa, SDPBackend.FLASH_ATTENTION))


def hf_eager(call: AttentionCall, attn_mask: Tensor | None = None) -> Tensor:
    """The ``eager_attention_forward`` of Hugging Face's Llama, mask included."""
    k, v = (_repeat_kv(x, call.group_size) for x in (call.k, call.v))
    scores = call.q @ k.transpose(2, 3) * call.sm_scale
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(dim=-1, dtype=torch.float32).to(call.q.dtype) @ v


def _repeat_kv(x: Tensor, n: int) -> Tensor:
    batch, heads, seqlen, head_dim = x.shape
    return x[:, :, None].expand(batch, heads, n, seqlen, head_dim).reshape(batch, heads * n, seqlen, head_dim)


def additive_mask(call: AttentionCall) -> Tensor:
    """The mask that a model builds, ``[1, 1, seqlen_q, seqlen_k]``."""
    rows, keys = (torch.arange(n, device=call.q.device) for n in (call.seqlen_q, call.seqlen_k))
    hidden = ~band(call, rows, keys)[:, None]
    return call.q.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(call.q.dtype).min)


def seqlens(call: AttentionCall) -> Tensor:
    """Keys that the last row of each sequence sees under a causal term, int32 ``[batch]``."""
    rows = call.seqlen_q if call.cu_seqlens_q is None else call.cu_seqlens_q.diff()
    offset = torch.as_tensor(call.q_offset, device=call.q.device)
    return (offset + rows).to(torch.int32).expand(call.batch).contiguous()


def fa3() -> dict[str, Implementation]:
    """FlashAttention-3 on a causal call of a dense cache, from the bottom right: every head dim, no window."""
    interface = installed("fa3_fwd_interface")
    if interface is None:
        return {}

    def run(form: tuple[AttentionCall, Tensor | None]) -> Tensor:
        call, cache_seqlens = form
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
        options = {"cache_seqlens": cache_seqlens, "softmax_scale": call.sm_scale, "causal": call.seqlen_q > 1}
        return interface.flash_attn_with_kvcache(q, k, v, **options).transpose(1, 2)

    def prepare(call: AttentionCall) -> tuple[AttentionCall, Tensor | None]:
        lengths = seqlens(call)
        return call, None if (lengths == call.seqlen_k).all() else lengths

    return {"fa3": Implementation(run, prepare)}


def fa3_prefill() -> dict[str, Implementation]:
    """FlashAttention-3 on as many queries as keys, causal or not."""
    interface = installed("fa3_fwd_interface")
    if interface is None:
        return {}

    def run(call: AttentionCall) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
        y: Tensor = interface.flash_attn_func(q, k, v, softmax_scale=call.sm_scale, causal=call.window_right == 0)
        return y.transpose(1, 2)

    return {"fa3": Implementation(run)}


class Packed(NamedTuple):
    """A packed call as FlashAttention-3 takes it."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def packed_kv(call: AttentionCall) -> Packed:
    """K and V of the visible keys one behind the other, ``[total_k, num_kv_heads, head_dim]``."""
    lengths = seqlens(call)
    parts = [part for *_, part in sequences(call)]
    k, v = (
        torch.cat([x[0, :, :n].transpose(0, 1) for x, n in zip(xs, lengths.tolist(), strict=True)])
        for xs in ([part.k for part in parts], [part.v for part in parts])
    )
    cu_seqlens_k = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    assert call.cu_seqlens_q is not None
    longest = int(call.cu_seqlens_q.diff().max())
    return Packed(call.q[0].transpose(0, 1), k, v, call.cu_seqlens_q, cu_seqlens_k, longest, int(lengths.max()))


def fa3_varlen(num_splits: int = 0) -> dict[str, Implementation]:
    """FlashAttention-3 on packed sequences, causal from the bottom right; 0 splits: as many as it chooses."""
    interface = installed("fa3_fwd_interface")
    if interface is None:
        return {}

    def run(form: Packed) -> Tensor:
        return interface.flash_attn_varlen_func(*form, causal=True, num_splits=num_splits).transpose(0, 1)[None]

    return {"fa3": Implementation(run, packed_kv)}


class Planned(NamedTuple):
    """A call as FlashInfer takes it: planned on the host, pages with their table flattened."""

    wrapper: Any
    q: Tensor
    kv: tuple[Tensor, Tensor]
    shape: tuple[int, int, int, int]


def flashinfer() -> dict[str, Implementation]:
    """FlashInfer on a causal call of pages, or of a dense cache as pages of PAGE_SIZE; not above head_dim 128."""
    if installed("flashinfer") is None:
        return {}

    def run(form: Planned) -> Tensor:
        batch, rows, heads, width = form.shape
        return form.wrapper.run(form.q, form.kv).view(batch, rows, heads, width).transpose(1, 2)

    return {"flashinfer": Implementation(run, _plan)}


@cache
def _workspace() -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)


def _plan(call: AttentionCall) -> Planned:
    layout, kv, table = _pages(call)
    page_size = kv[0].shape[1] if layout == "NHD" else kv[0].shape[2]
    arguments = (
        *_indices(table, seqlens(call), page_size),
        call.num_heads,
        call.num_kv_heads,
        call.head_dim,
        page_size,
    )
    dtypes = {"q_data_type": call.q.dtype, "kv_data_type": kv[0].dtype, "sm_scale": call.sm_scale}
    module = installed("flashinfer")
    if call.seqlen_q == 1:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(_workspace(), layout, use_tensor_cores=True)
        wrapper.plan(*arguments, **dtypes)
    else:  # of the same module as decode on tensor cores, so that it compiles once
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(_workspace(), layout, backend="fa2")
        wrapper.plan(_cu_seqlens_q(call), *arguments, causal=True, **dtypes)
    q = call.q.transpose(1, 2)
    return Planned(wrapper, q.flatten(0, 1).contiguous(), kv, (*q.shape[:3], call.head_dim_v))


def _pages(call: AttentionCall) -> tuple[str, tuple[Tensor, Tensor], Tensor]:
    """Layout, pages of K and V, and block table; a dense cache is viewed in pages and not copied."""
    if call.block_table is not None:
        return "HND", (call.k, call.v), call.block_table
    k, v = (x.transpose(1, 2).reshape(-1, PAGE_SIZE, *x.shape[1::2]) for x in (call.k, call.v))
    return "NHD", (k, v), torch.arange(k.shape[0], device=call.q.device).view(call.batch, -1)


def _indices(table: Tensor, lengths: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's indptr, indices and last_page_len, int32."""
    pages = (lengths + page_size - 1) // page_size
    used = torch.arange(table.shape[1], device=table.device) < pages[:, None]
    indptr = F.pad(pages.cumsum(0), (1, 0))
    last_page_len = (lengths - 1) % page_size + 1
    return indptr.to(torch.int32), table[used].to(torch.int32), last_page_len.to(torch.int32)


def _cu_seqlens_q(call: AttentionCall) -> Tensor:
    if call.cu_seqlens_q is not None:
        return call.cu_seqlens_q
    return torch.arange(call.batch + 1, dtype=torch.int32, device=call.q.device) * call.seqlen_q
