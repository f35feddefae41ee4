"""Random attention calls for kernel tests and benchmarks, with outputs and cache tails poisoned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attnpatch import attention_call
from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.reference import attention_lse_reference, hidden_keys
from attnpatch.testing.tolerance import assert_same_function


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
            ``attn_mask`` is expanded to the scores' shape, ``key_bounds`` likewise; ``lse=True`` asks for one.
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
    if terms.get("lse") is True:
        terms["lse"] = torch.empty(batch, num_heads, seqlen_q, device=device)
    terms.setdefault("sm_scale", head_dim**-0.5)
    return AttentionCall(q, k, v, **terms)


def key_bounds(first: Any, stop: Any, plain: Any = 1) -> Tensor:
    """``AttentionCall.key_bounds`` of rows that see ``first <= j < stop``: numbers, or tensors that broadcast."""
    device = next((x.device for x in (first, stop, plain) if isinstance(x, Tensor)), None)
    values = torch.broadcast_tensors(*(torch.as_tensor(x, device=device) for x in (first, stop, plain)))
    return torch.stack([-values[0], *values[1:]], dim=-1).int()


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill every output a backend allocates through ``empty_output`` with NaN first."""
    allocate = attention_call.new_output

    def poisoned(q: Tensor, v: Tensor) -> Tensor:
        return allocate(q, v).fill_(float("nan"))

    with mock.patch.object(attention_call, "new_output", poisoned):
        yield


def check_backend(backend: Any, call: AttentionCall) -> Tensor:
    """Run ``call`` on a backend and assert values, zeros of hidden rows, layout, dtype and lse; return the output."""
    assert backend.refuses(call) is None, backend.refuses(call)
    if call.lse is not None:
        call.lse.fill_(float("nan"))
    with poisoned_outputs():
        o = backend.run(call)
    visible_rows = ~hidden_keys(call).all(dim=-1)
    (original, _), (o64, lse64) = attention_lse_reference(call, call.q.dtype), attention_lse_reference(call)
    assert_same_function(o, original, o64, visible_rows)
    assert (o[~visible_rows] == 0).all(), "a row without a visible key must be zeros"
    expected = call.empty_output()
    assert (o.shape, o.stride(), o.dtype) == (expected.shape, expected.stride(), expected.dtype)
    if call.lse is not None:
        _check_lse(call, lse64, visible_rows)
    return o


def _check_lse(call: AttentionCall, lse64: Tensor, visible_rows: Tensor) -> None:
    """The lse is as right as float32 arithmetic makes it, and -inf exactly where a row sees no key."""
    assert call.lse is not None
    assert torch.equal(call.lse == -torch.inf, ~visible_rows)
    lse, original = (
        x.masked_fill(~visible_rows, 0.0) for x in (call.lse, attention_lse_reference(call, torch.float32)[1])
    )
    assert_same_function(lse, original, lse64.masked_fill(~visible_rows, 0.0))
