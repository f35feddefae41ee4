"""Measure the kernels beside their peers on this GPU, and write ``results/<date>-<gpu>.json``.

TRITON_INTERPRET=0 python benchmarks/run.py [--suites prefill decode] [--results FOLDER] [--commit ID]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from harness import environment, write_results
from rich.console import Console
from rich.table import Table
from suites import SUITES, Case, measure

HERE = Path(__file__).parent


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--commit", help="default: what git says")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "no CUDA device: nothing to measure\n")

    console = Console()
    rows: list[dict[str, Any]] = []
    for suite in options.suites:
        for name in SUITES[suite]:
            console.print(f"{suite}: {name}")
            rows += measure(Case.parse(suite, name))
            torch.cuda.empty_cache()
    path = write_results(options.results, environment(options.commit), rows)
    for suite in options.suites:
        console.print(table(suite, [row for row in rows if row["suite"] == suite]))
    console.print(f"written to {path}")


def table(suite: str, rows: list[dict[str, Any]]) -> Table:
    """One line per case and implementation; factors are against cuDNN at the same clock."""
    unit = "tbps" if "tbps" in rows[0] else "tflops"
    shown = Table(title=suite)
    for column in ("case", "impl"):
        shown.add_column(column)
    for column in ("burst ms", "hot ms", {"tbps": "TB/s", "tflops": "TFLOP/s"}[unit], "x cudnn", "rel err"):
        shown.add_column(column, justify="right")
    ms = {(row["case"], row["impl"], row["clock"]): row["ms"] for row in rows}
    for row in rows:
        if row["clock"] != "burst":
            continue
        case, impl = row["case"], row["impl"]
        factors = " / ".join(f"{ms[case, 'cudnn', clock] / ms[case, impl, clock]:.2f}" for clock in ("burst", "hot"))
        times = [f"{ms[case, impl, clock]:.4f}" for clock in ("burst", "hot")]
        shown.add_row(case, impl, *times, f"{row[unit]:.2f}", factors, f"{row['rel_err']:.1e}")
    return shown


if __name__ == "__main__":
    main()
