"""The one rule for "the same function, within rounding", and the float64 run it is measured against.

    error = max |y - y64| over rows with a visible key
    passes if error <= max(2 * error of the original in its own dtype, 4 * eps(dtype) * max |y64|)

``y64`` is the original with every parameter, every float cast and every dtype constant turned to float64.
``model.double()`` alone is not that: RMSNorm, RoPE and softmax of the Hugging Face models cast to float32 inside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _to_float64(value: Any) -> Any:
    """Floating tensors and float dtypes become float64; everything else passes."""
    if isinstance(value, Tensor) and value.dtype in _FLOATS:
        return value.double()
    return torch.float64 if isinstance(value, torch.dtype) and value in _FLOATS else value


class Float64Mode(TorchFunctionMode):
    """Every dtype argument that names a smaller float means float64, and ``.float()`` is ``.double()``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` with its dtypes widened."""
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        args, kwargs = tree_map(_to_float64, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def run_float64(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` (a module is copied first) with everything in float64."""
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).double()
    args, kwargs = tree_map(_to_float64, (args, kwargs))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # torch.full((), finfo(x.dtype).min) names no dtype
    try:
        with Float64Mode(), torch.no_grad():
            return function(*args, **kwargs)
    finally:
        torch.set_default_dtype(default)


def max_error(y: Tensor, y64: Tensor, rows: Tensor | None = None) -> float:
    """Largest ``|y - y64|``, over the positions where bool ``rows`` (broadcast over the last dim) is True.

    NaN anywhere in those rows gives ``inf``, so that it never passes a comparison.
    """
    error = (y.double() - y64.double()).abs()
    if rows is not None:
        error = error[rows.expand(error.shape[:-1])]
    return float("inf") if error.isnan().any() else (error.max().item() if error.numel() else 0.0)


def allowed_error(original: Tensor, y64: Tensor, dtype: torch.dtype, rows: Tensor | None = None) -> float:
    """The tolerance of the module's text, from the original's own output in ``dtype``."""
    scale = y64.double().abs()
    if rows is not None:
        scale = scale[rows.expand(scale.shape[:-1])]
    floor = 4 * torch.finfo(dtype).eps * (scale.max().item() if scale.numel() else 0.0)
    own = max_error(original, y64, rows)
    return max(2 * own, floor) if own != float("inf") else floor


def assert_same_function(
    y: Tensor, original: Tensor, y64: Tensor, rows: Tensor | None = None, dtype: torch.dtype | None = None
) -> None:
    """Assert that ``y`` is as right as ``original`` is, within the tolerance of the module's text.

    Args:
        y: the output under test.
        original: the unfused computation's output in the same dtype.
        y64: its float64 output, from :func:`run_float64` or a float64 reference.
        rows: bool, True for rows with a visible key, shaped like ``y`` without its last dim (broadcasts).
        dtype: dtype whose eps counts; default that of ``y``.
    """
    error, allowed = max_error(y, y64, rows), allowed_error(original, y64, dtype or y.dtype, rows)
    assert error <= allowed, f"error {error:.3e} against float64 is above the allowed {allowed:.3e}"
