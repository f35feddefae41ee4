"""Models that accelerate put hooks on: a ``device_map`` over several devices, weights kept on the CPU or on disk.

A hook runs around the forward of a module and is hidden from Dynamo: a graph ends at each, and every block and every
Linear has one. While a model is patched, a stand-in says in a graph what the hook does:

    move    inputs go to the module's device          x.to(device), nothing where they are there
    load    weights that are elsewhere are brought    attnpatch::onloaded, a copy that lives while it is used

so that the model is one graph, as it is without hooks. Outside of graphs the hooks themselves run.
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_LIBRARY = torch.library.Library("attnpatch", "FRAGMENT")
_LIBRARY.define(
    "onloaded(Tensor? after, int hook, str name, SymInt[] size, ScalarType dtype, Device device) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe],
)
_numbers = itertools.count()
_hooks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Hooks by the number that graphs know them by."""


def _onloaded(
    after: Tensor | None, hook: int, name: str, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The weight ``name`` of a hook on ``device``; ``after`` keeps it behind what the module is given."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{name} is loaded from elsewhere at every call, which a CUDA graph would not do again")
    weight: Tensor = _hooks[hook].weights_map[name]
    return weight.to(device=device, dtype=dtype, copy=True)


def _onloaded_fake(
    after: Tensor | None, hook: int, name: str, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


_LIBRARY.impl("onloaded", _onloaded, "CompositeExplicitAutograd")
torch.library.register_fake("attnpatch::onloaded", _onloaded_fake, lib=_LIBRARY)


class _Hook(NamedTuple):
    """One of a module's hooks: its number, itself, and where the module runs (None = where its inputs are)."""

    number: int
    hook: Any
    device: torch.device | None


class HookedForward:
    """Stands for the ``forward`` of a module with hooks. A deepcopy or a pickle is one of what it stands for.

    Args:
        module: the module.
        hooks: its hooks in the order they run, all of them accelerate's AlignDevicesHook.
    """

    def __init__(self, module: nn.Module, hooks: Sequence[Any]) -> None:
        self.module, self.original = module, module.forward
        self.hooks = [_Hook(next(_numbers), hook, _resolved(hook.execution_device)) for hook in hooks]
        _hooks.update({number: hook for number, hook, _ in self.hooks})
        functools.update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as its hooks do."""
        if not torch.compiler.is_dynamo_compiling():
            return self.original(*args, **kwargs)
        given: list[torch.device | None] = []
        weights: dict[str, Tensor] = {}
        for x in self.hooks:
            given.append(_device_of((args, kwargs)) if x.hook.io_same_device else None)
            args, kwargs = _moved(args, x.device), _moved(kwargs, x.device, x.hook.skip_keys)
            weights.update(_loaded(self.module, x, (*args, *kwargs.values())))
        result = _run_with(self.module, weights, args, kwargs)
        for x, device in zip(self.hooks, given, strict=True):
            result = _moved(result, device, x.hook.skip_keys)
        return result

    def take_off(self) -> None:
        """Put the original back, unless other hooks took this one's place."""
        if self.module.__dict__.get("forward") is self:
            self.module.forward = self.original

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.original.__reduce_ex__(protocol)


class StandIns:
    """The stand-ins of a model.

    Args:
        model: a module; most have no hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.made = model, _stand_in(model)
        self.outermost = model.__dict__.get("forward")

    def follow(self) -> None:
        """Stand in for hooks that came since, if the model itself got one, as it does by accelerate's functions."""
        if self.model.__dict__.get("forward") is not self.outermost:
            self.made += _stand_in(self.model)
            self.outermost = self.model.__dict__.get("forward")

    def take_off(self) -> None:
        """Put back what was there before."""
        for forward in self.made:
            forward.take_off()


def _stand_in(model: nn.Module) -> list[HookedForward]:
    made = [HookedForward(module, hooks) for module in model.modules() if (hooks := _hooks_of(module))]
    for forward in made:
        forward.module.forward = forward
    return made


def _hooks_of(module: nn.Module) -> list[Any]:
    """The module's hooks in the order they run; none where it has its stand-in, or where one is not understood.

    That one stays, and a graph ends there: a gap of the report.
    """
    if "_hf_hook" not in module.__dict__ or isinstance(module.__dict__.get("forward"), HookedForward):
        return []
    from accelerate.hooks import AlignDevicesHook  # type: ignore[import-untyped]

    hooks = _flat(module._hf_hook)
    if not all(type(hook) is AlignDevicesHook and not hook.no_grad for hook in hooks):
        return []
    return [] if any(hook.offload for hook in hooks) and _is_quantised(module) else hooks


def _flat(hook: Any) -> list[Any]:
    return [part for inner in hook.hooks for part in _flat(inner)] if hasattr(hook, "hooks") else [hook]


def _is_quantised(module: nn.Module) -> bool:
    """Whether a weight is more than a tensor: accelerate brings its scales in a way of its own."""
    return any(type(weight) is not nn.Parameter for weight in module.parameters())


def _resolved(device: Any) -> torch.device | None:
    """``0``, ``"cuda"`` and the like as tensors name it."""
    return None if device is None else torch.empty(0, device=device).device


def _loaded(module: nn.Module, hook: _Hook, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """The weights that a hook brings, by name."""
    if not hook.hook.offload:
        return {}
    after = next((x.detach() for x in inputs if isinstance(x, Tensor)), None)
    return {
        name: torch.ops.attnpatch.onloaded(after, hook.number, name, list(x.shape), x.dtype, hook.device)
        for name, x in _elsewhere(module, hook.hook)
    }


def _elsewhere(module: nn.Module, hook: Any) -> list[tuple[str, Tensor]]:
    tensors: list[tuple[str, Tensor]] = list(module.named_parameters(recurse=hook.place_submodules))
    if hook.offload_buffers:
        tensors += list(module.named_buffers(recurse=hook.place_submodules))
    return [(name, x) for name, x in tensors if x.device.type == "meta"]


def _run_with(module: Any, weights: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
    """Run the code under the hooks with ``weights`` in place of the module's own."""
    places = [(_table(module, name), name.rpartition(".")[2]) for name in weights]
    own = [table[leaf] for table, leaf in places]
    for (table, leaf), weight in zip(places, weights.values(), strict=True):
        table[leaf] = weight
    try:
        return module._old_forward(*args, **kwargs)
    finally:
        for (table, leaf), weight in zip(places, own, strict=True):
            table[leaf] = weight


def _table(module: nn.Module, name: str) -> dict[str, Any]:
    """Where the parameter or buffer ``name`` is kept."""
    path, _, leaf = name.rpartition(".")
    owner: Any = module.get_submodule(path)
    return owner._parameters if leaf in owner._parameters else owner._buffers


def _moved(x: Any, device: torch.device | None, skip: Any = None) -> Any:
    """``x`` with its tensors on ``device``, but those under the keys ``skip``; None = where they are."""
    if device is None:
        return x
    if isinstance(x, Tensor):
        return x if x.device == device else x.to(device)
    if isinstance(x, (tuple, list)):
        parts = [_moved(part, device, skip) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if isinstance(x, Mapping):
        kept = (skip,) if isinstance(skip, str) else skip or ()
        kind: Any = type(x)
        return kind({key: part if key in kept else _moved(part, device, skip) for key, part in x.items()})
    return x


def _device_of(x: Any) -> torch.device | None:
    """Of the first tensor in ``x``."""
    if isinstance(x, Tensor):
        return x.device
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else ()
    found = [_device_of(part) for part in parts]
    return next((device for device in found if device is not None), None)


def without_hooks(path: str) -> str:
    """A module's name in a graph, without the way through its hooks."""
    return re.sub(r"(^|\.)(_old_forward\.__self__|forward\.module)(?=\.|$)", "", path).removeprefix(".")
