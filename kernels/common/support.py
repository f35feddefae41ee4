"""What the launchers of the Triton kernels share on the host; imports no Triton."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnpatch.attention_call import AttentionCall, width_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256

MAX_PLANS = 4096
"""Plans kept at a time: three per length that a growing cache has had, and kind of layer."""

Plan = TypeVar("Plan")
_plans: dict[Any, Any] = {}
_kinds: dict[Any, object] = {}
_PLAIN = frozenset({bool, int, float, str, type(None)})  # by type: isinstance is slow to say that x is no Tensor


def devices() -> tuple[str, ...]:
    """Device types the kernels run on: CPU tensors too when Triton's interpreter is on (TRITON_INTERPRET=1)."""
    return ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)


def refusal(call: AttentionCall, name: str) -> str | None:
    """Why no Triton kernel takes ``call``, whatever its phase; ``name`` is the backend that is asked."""
    if not has_triton():
        return "Triton is not installed (pip install triton)"
    if call.q.dtype not in DTYPES:
        return f"{_short(call.q.dtype)} is not one of {', '.join(map(_short, DTYPES))}"
    width = max(call.head_dim, call.head_dim_v)
    if width > MAX_HEAD_DIM:
        return f"head_dim {width} is above {MAX_HEAD_DIM}, the widest tile of {name}"
    if call.sm_scale <= 0:
        return f"sm_scale {call.sm_scale} is not positive, so the largest product is not the largest score"
    major, minor = capability(call.q.device)
    if major < 8:
        return f"compute capability {major}.{minor} is below 8.0"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; the interpreter poses as 8.0."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def precision(dtype: torch.dtype) -> str:
    """Input precision of ``tl.dot``: float32 is exact unless torch's own matmuls may use TF32."""
    exact = dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def offset_stride(call: AttentionCall) -> int | None:
    """Stride of ``q_offset`` over the batch, None when it is a number."""
    if not isinstance(call.q_offset, Tensor):
        return None
    return call.q_offset.stride(0) if call.q_offset.numel() > 1 else 0


def per_head_strides(x: Tensor | None) -> tuple[int, int] | None:
    """Strides over batch and head of ``[num_heads]`` or ``[batch, num_heads]``; None for None."""
    return None if x is None else (x.stride(0) if x.dim() == 2 else 0, x.stride(-1))


def strides(x: Tensor | None) -> tuple[int, ...] | None:
    """The strides of a tensor that may be absent."""
    return None if x is None else x.stride()


def padded_width(head_dim: int) -> int:
    """Width of a tile that holds ``head_dim``: a power of two, at least what ``tl.dot`` takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


SMALLEST_TILE = 64
"""Channels of the narrowest tile of integers of 4 bits: its planes are a quarter as wide."""


def width_of_groups(x: Tensor, shift: Tensor | None) -> int:
    """Channels of the tiles of K or V: a tile per group of integers of 4 bits, and one of all else."""
    if shift is None:
        return padded_width(width_of(x))
    groups = shift.shape[3]
    return padded_width(groups * max(SMALLEST_TILE, padded_width(width_of(x) // groups)))


def planned(make: Callable[..., Plan], call: tuple[Any, ...], *options: Any) -> Plan:
    """``make(call, *options)``, made once for calls that differ in nothing but where their tensors lie.

    Args:
        make: works out what does not depend on addresses, launches and sizes above all; keeps no tensor.
        call: tensors, numbers and None.
        options: what else ``make`` depends on, hashable.
    """
    return plan_of(kind_of(call), make, call, *options)


def plan_of(kind: object, make: Callable[..., Plan], call: tuple[Any, ...], *options: Any) -> Plan:
    """:func:`planned`, of a call whose kind is known."""
    key = (kind, make, options)
    plan = _plans.get(key)
    if plan is None:
        plan = make(call, *options)
        _keep(_plans, key, plan)
    return plan


def kind_of(call: tuple[Any, ...]) -> object:
    """What calls have in common that differ in nothing but where their tensors lie: one object for all of them."""
    kind = getattr(call, "kind", None)
    if kind is None:
        key = (type(call), *[x if type(x) in _PLAIN else (x.shape, x.stride(), x.dtype, x.device) for x in call])
        kind = _kinds.get(key)
        if kind is None:
            kind = object()
            _keep(_kinds, key, kind)
    return kind


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    if len(kept) >= MAX_PLANS:
        kept.clear()
    kept[key] = value


class KnownCall(AttentionCall):
    """A call that brings its kind, which the operator knows from its arguments; ``_replace`` gives one without."""

    kind: object | None = None
