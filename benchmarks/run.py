"""Measure the kernels beside their peers on this GPU, and write ``results/<date>-<gpu>.json``.

TRITON_INTERPRET=0 python benchmarks/run.py [--suites prefill decode masks] [--results FOLDER] [--commit ID]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import environment, write_results
from masks import MASKS, SCANS, MaskCase, measure_scan
from rich.console import Console
from rich.table import Table
from suites import SUITES, Case, measure

HERE = Path(__file__).parent
ALL = [*SUITES, "masks"]
CLOCKS = ("burst", "hot")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--commit", help="default: what git says")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "no CUDA device: nothing to measure\n")

    console = Console()
    rows: list[dict[str, Any]] = []
    for suite in options.suites:
        for name, measured in cases(suite):
            console.print(f"{suite}: {name}")
            rows += measured()
            torch.cuda.empty_cache()
    path = write_results(options.results, environment(options.commit), rows)
    for suite in options.suites:
        console.print(table(suite, [row for row in rows if row["suite"] == suite]))
    console.print(f"written to {path}")


def cases(suite: str) -> list[tuple[str, Callable[[], Iterable[dict[str, Any]]]]]:
    """Each case of a suite: its name, and what measures it."""
    if suite != "masks":
        return [(name, partial(measure, Case.parse(suite, name))) for name in SUITES[suite]]
    masked = [(name, partial(measure, MaskCase(name))) for name in MASKS]
    return [*masked, *((name, partial(measure_scan, name)) for name in SCANS)]


def table(suite: str, rows: list[dict[str, Any]]) -> Table:
    """One line per case and implementation; factors are against cuDNN, where it ran, at the same clock."""
    shown = Table(title=suite)
    for column in ("case", "impl"):
        shown.add_column(column)
    for column in ("burst ms", "hot ms", "rate", "x cudnn", "rel err"):
        shown.add_column(column, justify="right")
    ms = {(row["case"], row["impl"], row["clock"]): row["ms"] for row in rows}
    for row in rows:
        if row["clock"] != "burst":
            continue
        case, impl = row["case"], row["impl"]
        cudnn = [ms.get((case, "cudnn", clock)) for clock in CLOCKS]
        factors = " / ".join(f"{t / ms[case, impl, clock]:.2f}" for t, clock in zip(cudnn, CLOCKS, strict=True) if t)
        rate = f"{row['tbps']:.2f} TB/s" if "tbps" in row else f"{row['tflops']:.0f} TFLOP/s"
        times = [f"{ms[case, impl, clock]:.4f}" for clock in CLOCKS]
        shown.add_row(case, impl, *times, rate, factors, f"{row['rel_err']:.1e}")
    return shown


if __name__ == "__main__":
    main()
