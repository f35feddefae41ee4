"""What prefill and a decode step must read and compute, from a model's config and a device."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from attnpatch.roofline import (
    DEVICES,
    Cost,
    Device,
    ModelShape,
    Weights,
    count_weights,
    decode_cost,
    eager_score_bytes,
    formats_for,
    measured_device,
    prefill_cost,
    read_config,
    shape_from_config,
)

_FLAGS = ("layers", "heads", "kv_heads", "head_dim")
_WORDS = ("\nK/V", "\nlimit")  # columns of words, on the left


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``attnpatch roofline``."""
    parser.add_argument("--config", metavar="PATH", help="a Hugging Face config.json, or the folder of one")
    for flag in _FLAGS:
        parser.add_argument(f"--{flag.replace('_', '-')}", type=_count, metavar="N", help="instead of --config")
    parser.add_argument("--weight-bytes", type=_number, metavar="N", help="that a step reads, e.g. 17e9; 0: no weights")
    parser.add_argument("--parameters", type=_number, metavar="N", help="of --weight-bytes; default: half as many")
    parser.add_argument("--batch", type=_count, default=1, metavar="N", help="sequences, default %(default)s")
    parser.add_argument(
        "--context", type=_count, nargs="+", default=[4096, 32768, 262144], metavar="N", help="tokens, one or several"
    )
    parser.add_argument(
        "--device", choices=(*DEVICES, "measured"), default="h100-sxm", help="default %(default)s; measured: this one"
    )
    parser.add_argument("--json", metavar="PATH", help="write the numbers as JSON, too")
    parser.add_argument("--plot", metavar="PATH", help="write a picture, too: tokens/s at most against context")


def run(args: argparse.Namespace) -> int:
    """Print the tables; 1 when the model is not described, or in a way that is not counted."""
    console = Console()
    try:
        shape = _shape(args)
        device = measured_device() if args.device == "measured" else DEVICES[args.device]
        _print(console, shape, device, args)
        if args.json:
            Path(args.json).write_text(json.dumps(as_dict(shape, device, args.batch, args.context), indent=2) + "\n")
        if args.plot:
            _plot(shape, device, args)
    except (ValueError, OSError) as error:
        console.print(f"[red]{type(error).__name__}[/]: ", end="")
        console.print(str(error), markup=False, highlight=False)
        return 1
    return 0


def as_dict(shape: ModelShape, device: Device, batch: int, contexts: list[int]) -> dict[str, Any]:
    """All numbers of the tables, in FLOPs, bytes and seconds."""
    return {
        "shape": {**vars(shape), "weights": vars(shape.weights)},
        "device": vars(device),
        "batch": batch,
        "prefill": [
            {"context": context, "eager_score_bytes": eager_score_bytes(shape, batch, context)}
            | prefill_cost(shape, batch, context).to_dict(device)
            for context in contexts
        ],
        "decode": [
            {"context": context, "kv_format": kv_format.name}
            | decode_cost(shape, batch, context, kv_format).to_dict(device)
            for context in contexts
            for kv_format in formats_for(shape.head_dim)
        ],
    }


def _shape(args: argparse.Namespace) -> ModelShape:
    """From --config or from the flags, not from both."""
    given = [f"--{flag.replace('_', '-')}" for flag in _FLAGS if getattr(args, flag) is not None]
    if args.config and given:
        raise ValueError(f"--config and {', '.join(given)}: give one of the two")
    if args.parameters is not None and args.weight_bytes is None:
        raise ValueError("--parameters says how many --weight-bytes are; give both")
    if args.config:
        config = read_config(args.config)
        return shape_from_config(config, count_weights(config) if args.weight_bytes is None else _weights(args))
    missing = [f"--{flag.replace('_', '-')}" for flag in (*_FLAGS, "weight_bytes") if getattr(args, flag) is None]
    if missing:
        raise ValueError(f"without --config, {', '.join(missing)} must be given")
    return ModelShape(args.layers, args.heads, args.kv_heads, args.head_dim, _weights(args))


def _weights(args: argparse.Namespace) -> Weights:
    return Weights.of_bytes(args.weight_bytes, args.parameters)


def _print(console: Console, shape: ModelShape, device: Device, args: argparse.Namespace) -> None:
    weights = shape.weights
    heads = f"{shape.num_heads} heads, {shape.num_kv_heads} of K/V, head_dim {shape.head_dim}"
    lines = (
        f"layers   {shape.describe_layers()}; {heads}",
        f"weights  {_short(weights.read_bytes(args.batch) / 1e9)} GB per step, {weights.source}",
        f"device   {device.name}: {device.bandwidth / 1e12:.3g} TB/s, {device.flops / 1e12:.4g} TFLOP/s",
        f"         {device.source}",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False)
    console.print(_formats_table(shape, device, args.batch, args.context))
    if shape.head_dim % 8:
        console.print(f"TBQ4 needs a head_dim that is a multiple of 8, not {shape.head_dim}", highlight=False)
    console.print(_decode_table(shape, device, args.batch, args.context))
    console.print(_prefill_table(shape, device, args.batch, args.context))


def _formats_table(shape: ModelShape, device: Device, batch: int, contexts: list[int]) -> Table:
    sizes = ("GB in\ncache", "GB\nmoved", "of all\nbytes")
    title = f"K and V of a decode step, batch {batch}"
    table = _table(title, "\ncontext", "\nK/V", *sizes, "ms at\nleast", "\nlimit", "tokens/s\nat most")
    for context in contexts:
        for kv_format in formats_for(shape.head_dim):
            cost = decode_cost(shape, batch, context, kv_format)
            moved = (_short(cost.kept_bytes / 1e9), _short(cost.kv_bytes / 1e9), f"{cost.attention_share:.1%}")
            floor = (_short(cost.floor(device) * 1e3), cost.limit(device), f"{cost.tokens_per_s(device):,.1f}")
            table.add_row(f"{context:,}", kv_format.name, *moved, *floor)
        table.add_section()
    return table


def _decode_table(shape: ModelShape, device: Device, batch: int, contexts: list[int]) -> Table:
    table = _table(f"A decode step, batch {batch}, K and V in 16 bit", *_headers("GFLOP"))
    for context in contexts:
        table.add_row(*_cells(context, decode_cost(shape, batch, context), device, unit=1e9))
    return table


def _prefill_table(shape: ModelShape, device: Device, batch: int, contexts: list[int]) -> Table:
    title = f"Prefill, batch {batch}, K and V in 16 bit; scores: GB that eager writes"
    table = _table(title, *_headers("TFLOP"), "scores\na head", "scores\nall")
    for context in contexts:
        scores = eager_score_bytes(shape, batch, context) / 1e9
        of_a_head = scores / (batch * shape.kv_layers * shape.num_heads)
        cells = _cells(context, prefill_cost(shape, batch, context), device, unit=1e12)
        table.add_row(*cells, _short(of_a_head), _short(scores))
    return table


def _headers(flops: str) -> tuple[str, ...]:
    """Of the columns that ``_cells`` fills."""
    return (
        "\ncontext",
        f"{flops}\nweights",
        f"{flops}\nK/V",
        "ms\nFLOPs",
        "GB\nweights",
        "GB\nK/V",
        "ms\nbytes",
        "\nlimit",
    )


def _cells(context: int, cost: Cost, device: Device, unit: float) -> tuple[str, ...]:
    flops = (cost.weight_flops / unit, cost.attention_flops / unit, cost.flops_floor(device) * 1e3)
    moved = (cost.weight_bytes / 1e9, cost.kv_bytes / 1e9, cost.bytes_floor(device) * 1e3)
    return (f"{context:,}", *map(_short, (*flops, *moved)), cost.limit(device))


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for header in headers:
        table.add_column(header, justify="left" if header in _WORDS else "right", no_wrap=True)
    return table


def _short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.3g}" if number < 1e3 else f"{number:,.0f}"


def _plot(shape: ModelShape, device: Device, args: argparse.Namespace) -> None:
    from attnpatch.roofline.plot import plot_ceilings

    try:
        plot_ceilings(shape, args.batch, max(args.context), device, args.plot)
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib: pip install 'attnpatch[plots]' ({error})") from error


def _count(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return int(text)


def _number(text: str) -> float:
    """A number from 0 on, also as 17e9."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return number
