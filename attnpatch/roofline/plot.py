"""A picture of the ceilings: tokens per second against context length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnpatch.roofline.costs import decode_cost
from attnpatch.roofline.device import Device
from attnpatch.roofline.formats import formats_for
from attnpatch.roofline.model import ModelShape

_POINTS_PER_OCTAVE = 8
_COLOURS = ("#1f77b4", "#2ca02c", "#d62728", "#7f7f7f")


def plot_ceilings(shape: ModelShape, batch: int, longest: int, device: Device, path: str | Path) -> None:
    """Write a picture, of the type that the path's ending says, of contexts from 1,024 to ``longest`` tokens.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the path's ending is no type of picture, or ``longest`` is not above 1,024.
    """
    if longest <= 1024:
        raise ValueError(f"a picture begins at a context of 1,024 tokens; the longest is {longest}, give a longer one")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, shape, batch, longest, device)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=144)


def _draw(axes: Any, shape: ModelShape, batch: int, longest: int, device: Device) -> None:
    contexts = _contexts(longest)
    for kv_format, colour in zip(formats_for(shape.head_dim), _COLOURS, strict=False):
        ceilings = [decode_cost(shape, batch, context, kv_format).tokens_per_s(device) for context in contexts]
        axes.plot(contexts, ceilings, label=kv_format.name, color=colour, linewidth=2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}K")
    axes.set_xlim(contexts[0], contexts[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel(f"tokens/s at most, batch {batch}")
    axes.set_title(_title(shape, batch, device), fontsize=10)
    axes.grid(True, alpha=0.3)


def _contexts(longest: int) -> list[int]:
    """From 1,024 to the longest, evenly on a logarithmic axis."""
    contexts = [1024]
    while (following := round(contexts[-1] * 2 ** (1 / _POINTS_PER_OCTAVE))) < longest:
        contexts.append(following)
    return [*contexts, longest]


def _title(shape: ModelShape, batch: int, device: Device) -> str:
    weights = f"weights {shape.weights.read_bytes(batch) / 1e9:.3g} GB per step"
    heads = f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}"
    return f"{device.name}, {device.bandwidth / 1e12:.3g} TB/s; {weights}\nlayers: {shape.describe_layers()}; {heads}"
