"""What the examples that measure share: their arguments, times, agreement with float64, tables and pictures."""

import argparse
import datetime
import importlib.util
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from attnpatch.cli.checkpoint import NAME, CheckpointMissing
from attnpatch.cli.measure import TokenClock, elapsed_ms
from attnpatch.reporting import Report
from attnpatch.testing.tolerance import assert_same_function, max_error

ROUNDS = 5
GENERATED = 3
"""Rounds of whole models."""

REPLAYED = 10
"""Calls in one CUDA graph, over the same tensors: up to the size of the L2 they may be read from there."""

WIDTH = 120
"""Of tables in files and pipes."""

MODEL = f"a causal language model's folder; default: {NAME}"
CONFIG = "a config.json, or its folder: random weights instead"

PICTURES = (".png", ".pdf", ".svg")

Runs = dict[str, Callable[[], Any]]
"""Ways to compute the same thing, by name."""


def parser(text: str) -> argparse.ArgumentParser:
    """With ``--device`` and ``--plot``."""
    made = argparse.ArgumentParser(description=text)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", type=device, default=default, help="default here: %(default)s")
    made.add_argument("--plot", type=picture, metavar="FILE", help=f"write a picture, too: {', '.join(PICTURES)}")
    return made


def sizes(parser: argparse.ArgumentParser, seqlens: str = "", **defaults: int) -> None:
    """``--seqlens``, of which ``seqlens`` says what they are by default, and a number for each of ``defaults``."""
    if seqlens:
        parser.add_argument("--seqlens", type=count, nargs="+", metavar="S", help=seqlens)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=count, default=default, metavar="N", help="default %(default)s")


def needs(parser: argparse.ArgumentParser, *modules: str) -> None:
    """Exit with 2 and the command to install it when one of Hugging Face's modules is not here."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            parser.error(f"{module} is not installed: pip install 'attnpatch[hf]'")


@contextmanager
def loading(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Exit with 2 and a sentence when there is no model to load, or none that can be read."""
    try:
        yield
    except (CheckpointMissing, OSError, ValueError) as error:
        parser.error(str(error))


def device(text: str) -> torch.device:
    """An argument that names a device which is here."""
    try:
        found = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor cuda")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"{text!r} is not here; torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def picture(text: str) -> str:
    """An argument that names a picture which can be written; asked before anything is measured."""
    if not text.endswith(PICTURES):
        raise argparse.ArgumentTypeError(f"{text!r} ends in none of {', '.join(PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a picture needs matplotlib: pip install 'attnpatch[plots]'")
    return text


def count(text: str) -> int:
    """An argument that is a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def several(text: str) -> int:
    """An argument that is a whole number from 2 on: between two tokens there is a time."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 2 on")
    return int(text)


def dtype_on(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def draw(*shapes: tuple[int, ...], device: torch.device, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Normal tensors, the same in every run; without a dtype that of :func:`dtype_on`."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = dtype or dtype_on(device)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def draw_ids(model: Any, tokens: int, device: torch.device) -> Tensor:
    """Random token ids ``[1, tokens]``, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, model.config.vocab_size, (1, tokens), generator=generator).to(device)


def generate(model: Any, ids: Tensor, new_tokens: int, **options: Any) -> Any:
    """Greedy ``generate()`` of exactly so many new tokens after one prompt without padding."""
    asked = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **asked, **options)


class Speed(NamedTuple):
    """Milliseconds from the prompt to the first token, and tokens per second after it."""

    first_ms: float
    tokens_per_s: float


def speed(model: Any, ids: Tensor, new_tokens: int) -> Speed:
    """Medians of GENERATED runs; the prefill has run before, and the first tokens may still compile."""
    clocks = [TokenClock() for _ in range(GENERATED)]
    for clock in clocks:
        generate(model, ids, new_tokens, streamer=clock)
    first = [1e3 * (clock.arrivals[1] - clock.arrivals[0]) for clock in clocks]
    return Speed(statistics.median(first), statistics.median(clock.tokens_per_s() for clock in clocks))


def not_moved(report: Report) -> tuple[int, int]:
    """Bytes of K/V copies and of scores that were not moved up to this report."""
    return sum(x.kv_bytes_avoided for x in report.sites), sum(x.score_bytes_avoided for x in report.sites)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as it is written down, scores and all; group_size heads of q in turn read one of k and v."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = grouped @ k[:, :, None].transpose(-2, -1) * q.shape[-1] ** -0.5
    return (torch.softmax(scores, dim=-1) @ v[:, :, None]).flatten(1, 2)


def errors(outputs: dict[str, Tensor], original: Tensor, exact: Tensor) -> dict[str, float]:
    """Largest errors of outputs against float64.

    Raises:
        AssertionError: one is above the tolerance, twice the error of ``original``.
    """
    for output in outputs.values():
        assert_same_function(output, original, exact)
    return {name: max_error(output, exact) for name, output in outputs.items()}


def times(runs: Runs, device: torch.device) -> dict[str, float]:
    """Median milliseconds of each, taken in turns; on a GPU in CUDA graphs, so that the host does not count."""
    return _medians({name: _timer(run, device) for name, run in runs.items()}, ROUNDS)


def times_as_called(runs: Runs, device: torch.device) -> dict[str, float]:
    """Those of whole models, which CUDA graphs do not capture, so the host counts; each has run before."""
    return _medians({name: partial(elapsed_ms, run, device) for name, run in runs.items()}, GENERATED)


def _medians(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    found = [{name: timer() for name, timer in timers.items()} for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in found) for name in timers}


def _timer(run: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    run()  # compiles, and warms up
    if device.type != "cuda":
        return lambda: elapsed_ms(run, device)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYED):
            run()
    return lambda: elapsed_ms(graph.replay, device) / REPLAYED


def nbytes(*tensors: Tensor) -> int:
    """Bytes of all tensors, each as large as it is said to be: a repeat that is only a view counts in full."""
    return sum(x.numel() * x.element_size() for x in tensors)


def machine(device: torch.device) -> str:
    """Where and with what: goes with every number."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    return f"{name}{threads}, torch {torch.__version__}, {datetime.date.today()}"


def console() -> Console:
    """Where examples print; a file or a pipe, which has no width, gets WIDTH columns."""
    made = Console()
    return made if made.is_terminal else Console(width=WIDTH)


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of numbers; its headers may have two lines."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="right", vertical="bottom", overflow="fold")
    for row in rows:
        table.add_row(*row)
    printer = console()
    printer.print(title, markup=False, highlight=False, soft_wrap=True)
    printer.print(table)


def panels(number: int, title: str) -> tuple[Any, Any]:
    """A figure and its axes, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8 * number, 4), layout="constrained")
    axes = figure.subplots(1, number, squeeze=False)[0]
    figure.suptitle(title, fontsize=10)
    return figure, axes


def series(rows: Sequence[Mapping[str, float]], unit: float = 1.0) -> dict[str, list[float]]:
    """What :func:`lines` draws of one number per name in every row."""
    return {name: [row[name] / unit for row in rows] for name in rows[0]}


def lines(axes: Any, x: Sequence[int], series: Mapping[str, Sequence[float]], xlabel: str, ylabel: str) -> None:
    """Lines from 0 up, over an axis of powers of two whose ticks are the points measured."""
    for name, y in series.items():
        axes.plot(x, y, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(True, alpha=0.3)
    axes.legend(frameon=False)


def bars(axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]], ylabel: str, fmt: str) -> None:
    """Bars side by side for every group, one per series, each with its number; a legend where there are several."""
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        places = [group + (i - (len(series) - 1) / 2) * width for group in range(len(groups))]
        axes.bar_label(axes.bar(places, values, width * 0.9, label=name), fmt=fmt, fontsize=8)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.3 if len(series) > 1 else 0.1)
    axes.set_ylabel(ylabel)
    if len(series) > 1:
        axes.legend(frameon=False)
