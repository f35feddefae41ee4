"""Random attention calls for kernel tests and benchmarks, with outputs and cache tails poisoned.

``random_call`` draws a plain one; ``quantised``, ``codes``, ``integers``, ``packed`` and ``paged`` store one as caches
and servers do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from attnpatch import attention_call
from attnpatch.attention_call import SCALES, AttentionCall
from attnpatch.dispatch import FP8
from attnpatch.kernels.dense import sequence
from attnpatch.kernels.reference import attention_fp8_reference, attention_lse_reference, hidden_keys
from attnpatch.masking import without_repeats
from attnpatch.tbq4 import encode
from attnpatch.tbq4.codec import pack
from attnpatch.testing.tolerance import assert_same_function

KEYS = ("k", "v", *SCALES)


def random_call(
    batch: int = 1,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    seqlen_q: int = 64,
    seqlen_k: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    **terms: Any,
) -> AttentionCall:
    """An attention call with normal q, k, v in the strides models produce (``[B, S, H, D]`` transposed).

    Args:
        batch: sequences.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        seqlen_q: query rows.
        seqlen_k: keys; default as many as rows.
        head_dim: width of q and k.
        head_dim_v: width of v; default that of q.
        dtype: of q, k and v.
        device: where.
        seed: of the generator.
        terms: further fields of AttentionCall; ``sm_scale`` defaults to ``head_dim ** -0.5``, and a 4-D
            ``attn_mask`` is expanded to the scores' shape, ``key_bounds`` and ``key_padding`` likewise; ``lse=True``
            asks for one.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k

    def draw(seqlen: int, heads: int, width: int) -> Tensor:
        x = torch.randn(batch, seqlen, heads, width, generator=generator, device=device)
        return x.to(dtype).transpose(1, 2)

    q, k = draw(seqlen_q, num_heads, head_dim), draw(seqlen_k, num_kv_heads, head_dim)
    v = draw(seqlen_k, num_kv_heads, head_dim_v or head_dim)
    if terms.get("attn_mask") is not None:
        terms["attn_mask"] = terms["attn_mask"].expand(batch, num_heads, seqlen_q, seqlen_k)
    if terms.get("key_bounds") is not None:
        terms["key_bounds"] = terms["key_bounds"].expand(batch, num_heads, seqlen_q, 3)
    if terms.get("key_padding") is not None:
        terms["key_padding"] = terms["key_padding"].expand(batch, seqlen_k)
    if terms.get("lse") is True:
        terms["lse"] = torch.empty(batch, num_heads, seqlen_q, device=device)
    terms.setdefault("sm_scale", head_dim**-0.5)
    return AttentionCall(q, k, v, **terms)


def key_bounds(first: Any, stop: Any, plain: Any = 1) -> Tensor:
    """``AttentionCall.key_bounds`` of rows that see ``first <= j < stop``: numbers, or tensors that broadcast."""
    device = next((x.device for x in (first, stop, plain) if isinstance(x, Tensor)), None)
    values = torch.broadcast_tensors(*(torch.as_tensor(x, device=device) for x in (first, stop, plain)))
    return torch.stack([-values[0], *values[1:]], dim=-1).int()


def quantised(call: AttentionCall, dtype: torch.dtype, per: str = "token") -> AttentionCall:
    """``call`` with K and V in ``dtype``, one of QUANTISED, and a scale per "token" and head, or per "head"."""
    (k, k_scale), (v, v_scale) = (_quantised(x, dtype, per) for x in (call.k, call.v))
    return call._replace(k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def _quantised(x: Tensor, dtype: torch.dtype, per: str) -> tuple[Tensor, Tensor]:
    """``x`` and its scale. Poison stays poison: NaN in 8 bit floats, in a token's scale too, 127 in int8."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    size = x.float().abs()
    absmax = size.amax(dim=3) if per == "token" else size.nan_to_num(0.0).amax(dim=(0, 2, 3))[None, :, None]
    scale = (absmax / largest).masked_fill(absmax == 0, 1.0)
    y = x.float() / scale[..., None]
    y = y.round().nan_to_num(largest) if dtype == torch.int8 else y
    return y.to(dtype), scale.expand(x.shape[:3])


def codes(call: AttentionCall, keys: bool = True, values: bool = True) -> AttentionCall:
    """``call`` with K, V or both in TBQ4 codes; norms of a block lie side by side over the keys, as caches have them.

    Poison stays poison: the norm of a block that holds NaN is NaN.
    """
    if keys:
        k, k_scale = _codes(call.k)
        call = call._replace(k=k, k_scale=k_scale)
    if values:
        v, v_scale = _codes(call.v)
        call = call._replace(v=v, v_scale=v_scale)
    return call


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of ``x``, and its norms."""
    encoded, norms = encode(x)
    return encoded, norms.transpose(2, 3).contiguous().transpose(2, 3)


def integers(
    call: AttentionCall, groups: int | None = 1, groups_v: int | None = 1, dtype: torch.dtype = torch.float32
) -> AttentionCall:
    """``call`` with K and V in integers of 4 bits; poison stays poison: scale and shift of a group that holds NaN.

    Args:
        call: any dense call.
        groups: of K's channels, each with a scale and a shift in every row; None leaves K as it is.
        groups_v: likewise of V.
        dtype: of scales and shifts.
    """
    fields: dict[str, Tensor] = {}
    for name, x, count in (("k", call.k, groups), ("v", call.v, groups_v)):
        if count is not None:
            fields |= zip((name, f"{name}_scale", f"{name}_shift"), _integers(x, count, dtype), strict=True)
    return call._replace(**fields)  # type: ignore[arg-type]


def _integers(x: Tensor, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Integers of ``x``, scales and shifts."""
    wide = x.float().unflatten(3, (groups, -1))
    shift = wide.amin(dim=-1).to(dtype)
    scale = ((wide.amax(dim=-1) - shift) / 15).to(dtype)
    y = ((wide - shift[..., None]) / scale.masked_fill(scale == 0, 1.0)[..., None]).round().clamp(0, 15)
    return pack(y.nan_to_num(15.0).flatten(3).to(torch.uint8)), scale, shift


def packed(calls: Sequence[AttentionCall], spare: int = 0) -> AttentionCall:
    """Calls of batch 1 as one call of packed sequences.

    Args:
        calls: of the same heads, widths, dtypes and terms, with lengths, offsets and slopes of their own. No masks.
        spare: rows and keys of no sequence behind the last, full of poison.
    """
    first, device = calls[0], calls[0].q.device
    fields = {n: _joined([getattr(call, n) for call in calls], spare) for n in ("q", *KEYS)}
    if first.lse is not None:
        fields["lse"] = torch.full(fields["q"].shape[:3], -torch.inf, device=device)
    if first.alibi_slopes is not None and first.alibi_slopes.dim() == 2:
        fields["alibi_slopes"] = torch.cat([call.alibi_slopes for call in calls if call.alibi_slopes is not None])
    return first._replace(
        **fields,
        q_offset=torch.tensor([int(call.q_offset) for call in calls], device=device),
        cu_seqlens_q=_cu_seqlens([call.seqlen_q for call in calls], device),
        cu_seqlens_k=_cu_seqlens([call.seqlen_k for call in calls], device),
    )


def _joined(parts: Sequence[Any], spare: int) -> Any:
    """``[1, heads, length, ...]`` end to end, in the strides models produce, then ``spare`` of poison."""
    if parts[0] is None:
        return None
    x = torch.cat([x.transpose(1, 2) for x in parts], dim=1)
    return torch.cat([x, _poison(x, (1, spare, *x.shape[2:]))], dim=1).transpose(1, 2)


def _cu_seqlens(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _poison(x: Tensor, shape: Sequence[int]) -> Tensor:
    """NaN, or the largest integer, in the dtype of ``x``."""
    largest = torch.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).max
    return torch.full(tuple(shape), largest, device=x.device).to(x.dtype)


def paged(call: AttentionCall, page_size: int, spare: int = 3, seed: int = 0) -> AttentionCall:
    """``call`` with K and V in pages, in an order of chance.

    What fills the last page up is poison, and hidden. Blocks that no row sees (but for attn_mask, which does not
    keep kernels from reading) are poison too, or have no page at all: their entry is -1, or beyond the pool.

    Args:
        call: any call without pages; packed, its band must end at each sequence's last key.
        page_size: keys per page.
        spare: pages of no sequence.
        seed: of the generator.
    """
    call = _filled_up(call, page_size)
    num_blocks, device = call.seqlen_k // page_size, call.q.device
    generator = torch.Generator().manual_seed(seed)
    total = call.batch * num_blocks + spare
    pages = torch.randperm(total, generator=generator)[spare:].view(call.batch, num_blocks).to(device)
    live = _read_keys(call).unflatten(1, (num_blocks, page_size)).any(dim=-1)
    chance = torch.rand(pages.shape, generator=generator).to(device)
    table = torch.where(live | (chance > 0.5), pages, torch.where(chance > 0.25, -1, total + 5)).int()

    def pool(x: Tensor | None) -> Any:
        return None if x is None else _pool(x.unflatten(2, (num_blocks, page_size)).transpose(1, 2), pages, live, total)

    return call._replace(**{name: pool(getattr(call, name)) for name in KEYS}, block_table=table)


def _pool(blocks: Tensor, pages: Tensor, live: Tensor, total: int) -> Tensor:
    """``total`` pages of poison, and ``[batch, num_blocks, ...]`` on those of the blocks that are ``live``."""
    pool = _poison(blocks, (total, *blocks.shape[2:]))
    pool[pages[live]] = blocks[live]
    return pool


def _filled_up(call: AttentionCall, page_size: int) -> AttentionCall:
    """The call with as many keys for each sequence, a multiple of ``page_size``; those beyond its own are hidden."""
    parts = [sequence(call, b)[1] for b in range(call.batch)]
    lengths = [part.seqlen_k for part in parts]
    length = -(-max(lengths) // page_size) * page_size
    fields = {n: _filled([getattr(part, n) for part in parts], length) for n in KEYS}
    call = _with_longer_masks(call._replace(cu_seqlens_k=None), length)._replace(**fields)
    beyond = torch.arange(length, device=call.q.device) >= torch.tensor(lengths, device=call.q.device)[:, None]
    if (_read_keys(call) & beyond).any():
        if call.cu_seqlens_q is not None:
            raise ValueError(f"packed keys of lengths {lengths} fill no pages of {page_size}, and the band hides none")
        call = call._replace(key_padding=~beyond)
    return call


def _filled(parts: Sequence[Any], length: int) -> Any:
    """``[1, heads, own length, ...]`` each, as one ``[batch, heads, length, ...]`` that ends with poison."""
    if parts[0] is None:
        return None
    shapes = [(1, x.shape[1], length - x.shape[2], *x.shape[3:]) for x in parts]
    return torch.cat([torch.cat([x, _poison(x, shape)], dim=2) for x, shape in zip(parts, shapes, strict=True)])


def _with_longer_masks(call: AttentionCall, length: int) -> AttentionCall:
    """The call's masks for ``length`` keys."""
    mask, padding, bounds, more = call.attn_mask, call.key_padding, call.key_bounds, length - call.seqlen_k
    if mask is not None:
        mask = F.pad(without_repeats(mask), (0, more)).expand(*mask.shape[:3], length)
    if padding is not None:
        padding = F.pad(padding, (0, more))
    if bounds is not None:
        end = bounds.new_tensor([call.seqlen_k, call.seqlen_k, 1])  # plain counts up to the old end only
        bounds = torch.minimum(without_repeats(bounds), end).expand(bounds.shape)
    return call._replace(attn_mask=mask, key_padding=padding, key_bounds=bounds)


def _read_keys(call: AttentionCall) -> Tensor:
    """Which keys a kernel may read, those that attn_mask alone hides among them: bool ``[batch, seqlen_k]``."""
    parts = (sequence(call, b)[1]._replace(attn_mask=None) for b in range(call.batch))
    return torch.cat([~hidden_keys(part).all(dim=2).all(dim=1) for part in parts])


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill every output a backend allocates through ``empty_output`` with NaN first."""
    allocate = attention_call.new_output

    def poisoned(q: Tensor, v: Tensor) -> Tensor:
        return allocate(q, v).fill_(float("nan"))

    with mock.patch.object(attention_call, "new_output", poisoned):
        yield


def check_backend(backend: Any, call: AttentionCall) -> Tensor:
    """Run ``call`` on a backend and assert values, zeros of hidden rows, layout, dtype and lse; return the output.

    What is allowed to round to 8 bits is measured by a reference that does.
    """
    assert backend.refuses(call) is None, backend.refuses(call)
    if call.lse is not None:
        call.lse.fill_(float("nan") if call.cu_seqlens_q is None else -torch.inf)
    with poisoned_outputs():
        o = backend.run(call)
    rounds = backend.name == FP8 and call.asks_for_fp8
    original, lse = attention_fp8_reference(call) if rounds else attention_lse_reference(call, call.q.dtype)
    o64, lse64 = attention_lse_reference(call)
    visible_rows = lse64 > -torch.inf
    assert_same_function(o, original, o64, visible_rows)
    assert (o[~visible_rows] == 0).all(), "a row without a visible key must be zeros"
    expected = call.empty_output()
    assert (o.shape, o.stride(), o.dtype) == (expected.shape, expected.stride(), expected.dtype)
    if call.lse is not None:
        _check_lse(call, lse64, visible_rows, lse if rounds else attention_lse_reference(call, torch.float32)[1])
    return o


def _check_lse(call: AttentionCall, lse64: Tensor, visible_rows: Tensor, original: Tensor) -> None:
    """The lse is as right as ``original``, which float32 arithmetic makes, and -inf exactly where a row sees no key.

    Against K in codes it is as right as q's dtype: a rotated query is rounded once more.
    """
    assert call.lse is not None
    assert torch.equal(call.lse == -torch.inf, ~visible_rows)
    lse, original = (x.masked_fill(~visible_rows, 0.0) for x in (call.lse, original))
    dtype = call.q.dtype if call.tbq4[0] else torch.float32
    assert_same_function(lse, original, lse64.masked_fill(~visible_rows, 0.0), dtype=dtype)
