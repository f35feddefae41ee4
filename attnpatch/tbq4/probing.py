"""``probe``: what a TBQ4Cache costs a model, layer by layer and in perplexity, before one trusts it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from attnpatch.attention_call import MAX_APPEND

GROUP = MAX_APPEND
"""Tokens of one forward: the most that attend on their own keys as they are stored."""


@dataclass(frozen=True)
class LayerCost:
    """What one layer's cache costs.

    Args:
        layer: index in the model.
        keys: how K is kept: "tbq4", "int8" or "dense".
        values: likewise of V.
        error: length of the change of its attention's output over the length of the output, all tokens together; its
            inputs are the exact ones, so that errors of layers before it do not count.
    """

    layer: int
    keys: str
    values: str
    error: float


@dataclass(frozen=True)
class Probe:
    """What :func:`probe` found; prints as a table.

    Args:
        layers: of full attention.
        tokens: how many were predicted.
        exact: perplexity with a cache that rounds nothing.
        perplexity: perplexity with the TBQ4Cache, in all layers together.
    """

    layers: tuple[LayerCost, ...]
    tokens: int
    exact: float
    perplexity: float

    @property
    def ratio(self) -> float:
        """``perplexity`` over ``exact``."""
        return self.perplexity / self.exact

    def _last_line(self) -> str:
        change = f"{self.exact:.3f} becomes {self.perplexity:.3f}"
        return f"perplexity x {self.ratio:.4f}: {change} ({self.tokens} tokens)"

    def __str__(self) -> str:
        table = Table("layer", "K", "V", "error of its attention")
        for cost in self.layers:
            table.add_row(str(cost.layer), cost.keys, cost.values, f"{cost.error:.1%}")
        console = Console(width=80, highlight=False)
        with console.capture() as capture:
            console.print(table, self._last_line())
        return capture.get().rstrip()


@torch.no_grad()
def probe(model: nn.Module, text: str | Tensor, tokenizer: Any = None, **choice: Any) -> Probe:
    """Run a text through a model with and without a :class:`attnpatch.TBQ4Cache`.

    The first 64 tokens are a prompt. The others follow in groups of 64, each attending on keys and values as they are
    stored, its own included, as one by one in generation. The model runs as it is, patched or not.

    Args:
        model: a decoder of transformers.
        text: or its ids, int64 ``[1, tokens]``, 66 or more.
        tokenizer: makes ids of a text.
        **choice: arguments of :class:`attnpatch.TBQ4Cache`.

    Raises:
        ValueError: a text comes without a tokenizer, or ids have another shape, or what the cache raises.
    """
    from transformers.cache_utils import DynamicCache

    from attnpatch.caches.tbq4 import TBQ4Cache

    ids = _ids(text, tokenizer).to(next(model.parameters()).device)
    cache, errors = TBQ4Cache(model, **choice), dict[int, _Error]()
    with _compared(model, cache, errors):
        exact = _perplexity(model, ids, DynamicCache(config=model.config))
    perplexity = _perplexity(model, ids, TBQ4Cache(model, **choice))
    layers = tuple(_cost(cache.layers[i], error) for i, error in sorted(errors.items()))
    return Probe(layers, ids.shape[1] - 1 - GROUP, exact, perplexity)


def _ids(text: Any, tokenizer: Any) -> Tensor:
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("probe needs the tokenizer of a text: probe(model, text, tokenizer), or give it ids")
        text = tokenizer(text, return_tensors="pt")["input_ids"]
    if text.dim() != 2 or text.shape[0] != 1 or text.shape[1] < GROUP + 2:
        raise ValueError(
            f"probe takes one sequence of {GROUP + 2} tokens or more, a prompt of {GROUP} and what it is measured on; "
            f"got ids of shape {tuple(text.shape)}"
        )
    return text


def _perplexity(model: nn.Module, ids: Tensor, cache: Any) -> float:
    """Of what follows the first group, which no cache is read for."""
    losses = []
    for inputs, labels in zip(ids[:, :-1].split(GROUP, dim=1), ids[:, 1:].split(GROUP, dim=1), strict=True):
        logits = model.forward(inputs, past_key_values=cache, use_cache=True).logits[0]  # past a patch
        losses.append(nn.functional.cross_entropy(logits.float(), labels[0], reduction="none"))
    return math.exp(torch.cat(losses[1:]).double().mean().item())


class _Error:
    """Squares of lengths, summed up."""

    def __init__(self) -> None:
        self.changed = self.whole = 0.0

    def add(self, got: Tensor, exact: Tensor) -> None:
        self.changed += (got.double() - exact.double()).square().sum().item()
        self.whole += exact.double().square().sum().item()

    @property
    def relative(self) -> float:
        return math.sqrt(self.changed / self.whole)


def _cost(layer: Any, error: _Error) -> LayerCost:
    keys, values = layer.formats
    return LayerCost(layer.index, keys, values, error.relative)


@contextmanager
def _compared(model: nn.Module, cache: Any, errors: dict[int, _Error]) -> Iterator[None]:
    """While open, each attention runs once more, on ``cache``; ``errors`` by layer grow."""
    with ExitStack() as stack:
        for module in _attentions(model):
            if module.layer_idx in cache.buffered:
                hook = _comparison(cache, errors.setdefault(module.layer_idx, _Error()))
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def _comparison(cache: Any, error: _Error) -> Any:
    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        (name,) = (name for name in kwargs if name in ("past_key_values", "cache"))
        got = module.forward(*args, **{**kwargs, name: cache})
        if not cache.tokens.first:
            error.add(*(x[0] if isinstance(x, tuple) else x for x in (got, output)))

    return compare


def _attentions(model: nn.Module) -> list[Any]:
    """Modules that call a cache: the innermost that know their layer."""
    known = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    return [x for x in known if not any(y is not x and y in known for y in x.modules()) and _takes_cache(x)]


def _takes_cache(module: nn.Module) -> bool:
    return bool({"past_key_values", "cache"} & set(inspect.signature(module.forward).parameters))
