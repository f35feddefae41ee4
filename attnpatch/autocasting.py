"""The operators under autocast: they compute in the dtypes they are given.

Rewrites cast what autocast would have cast. Without these kernels the products that plain backends write out, of
float32, would be cast as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

import attnpatch.ops  # noqa: F401  (defines the operators)

_DEVICES = ("CPU", "CUDA")
_AUTOCAST = reduce(or_, (DispatchKeySet(getattr(DispatchKey, f"Autocast{device}")) for device in _DEVICES))
_LIBRARY = torch.library.Library("attnpatch", "IMPL")


def _as_given(operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(*args)

    return run


for _name in ("attention", "attention_lse", "attention_backward", "cache_write"):
    for _device in _DEVICES:
        _LIBRARY.impl(_name, _as_given(getattr(torch.ops.attnpatch, _name).default), f"Autocast{_device}")
