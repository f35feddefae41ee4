"""Measure the kernels beside their peers on this GPU, and write ``results/<date>-<gpu>.json``.

TRITON_INTERPRET=0 python benchmarks/run.py [--suites decode paged ...] [--quick] [--once] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import bandwidth
import linears
import masks
import torch
import writes
from harness import ROUNDS, environment, write_results
from measure import Measured, measure, ready
from mixed import MixedCase
from rich.console import Console
from rich.table import Table
from suites import SUITES, Case
from varlen import VarlenCase

HERE = Path(__file__).parent
ALL = ["bandwidth", *SUITES, "masks", "mixed", "varlen", "cache_write", "linears"]
CLOCKS = ("burst", "hot")
QUICK_ROUNDS = 1


class Job(NamedTuple):
    """A case: its name, what measures it in so many rounds, and what only compiles, runs and checks it."""

    name: str
    measure: Callable[[int], Iterable[dict[str, Any]]]
    once: Callable[[], Any]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument(
        "--once", action="store_true", help="time nothing: compile, run and check everything, a process per suite"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--commit", help="default: what git says")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "no CUDA device: nothing to measure\n")
    if options.once:
        sys.exit(once(options.suites))
    sys.exit(report(options) > 0)


def once(suites: list[str]) -> int:
    """Fill the compilers' caches, all suites at the same time; 0 when all that ran was right."""
    if len(suites) > 1:
        command = [sys.executable, __file__, "--once", "--suites"]
        return max([process.wait() for process in [subprocess.Popen([*command, suite]) for suite in suites]])
    return len([job.name for job in jobs(suites[0]) if not completes(suites[0], job, job.once)])


def report(options: argparse.Namespace) -> int:
    """Measure, write after every suite, and print tables last; the number of cases that failed."""
    console, env, failed = Console(width=150), environment(options.commit), 0
    measured: dict[str, list[dict[str, Any]]] = {}
    for suite in options.suites:
        rows = measured[suite] = []
        for job in jobs(suite):
            failed += not completes(suite, job, partial(add_rows, rows, job, QUICK_ROUNDS if options.quick else ROUNDS))
        if suite == "append":
            rows[:] = beside_one_row(rows)
        path = write_results(options.results, env, rows)
    fastest_read = max((row["tbps"] for row in measured.get("bandwidth", [])), default=None)
    for suite, rows in measured.items():
        console.print(table(suite, rows, fastest_read))
    console.print(f"written to {path}; {failed} cases failed")
    return failed


def add_rows(rows: list[dict[str, Any]], job: Job, rounds: int) -> None:
    """Measure a case; a failing one adds nothing."""
    rows += list(job.measure(rounds))


def completes(suite: str, job: Job, run: Callable[[], Any]) -> bool:
    """Run, and say when it fails, so that one case does not cost the others."""
    print(f"{suite}: {job.name}", flush=True)
    try:
        run()
    except Exception:
        print(f"FAILED {suite}: {job.name}\n{traceback.format_exc(limit=-4)}", flush=True)
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def jobs(suite: str) -> Iterator[Job]:
    """Each case of a suite."""
    if suite == "bandwidth":
        yield from _plain(bandwidth.CASES, bandwidth.measure_bandwidth, bandwidth.run_bandwidth_once)
    elif suite == "cache_write":
        yield from _plain(writes.CASES, writes.measure_write, writes.run_write_once)
    elif suite == "linears":
        yield from _plain(list(linears.CASES), linears.measure_linears, linears.run_linears_once)
    elif suite == "mixed":
        yield _job(MixedCase())
    elif suite == "varlen":
        yield _job(VarlenCase())
    elif suite == "masks":
        yield from (_job(masks.MaskCase(name)) for name in masks.MASKS)
        yield from _plain(list(masks.SCANS), masks.measure_scan, masks.run_scan_once)
    else:
        yield from (_job(Case.parse(suite, name)) for name in SUITES[suite])


def _job(case: Measured) -> Job:
    return Job(case.name, partial(measure, case), lambda: sum(1 for _ in ready(case)))


def _plain(names: list[str], measure_one: Callable[..., Any], run_once: Callable[[str], Any]) -> Iterator[Job]:
    for name in names:
        yield Job(name, partial(measure_one, name), partial(run_once, name))


def beside_one_row(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of ``append`` with ``x_q1``: their time over ours of one query row, at the same clock."""
    one = {
        row["clock"]: row["ms"] for row in rows if row["impl"].startswith("attnpatch") and row["case"].endswith("q 1")
    }
    return [{**row, "x_q1": row["ms"] / one[row["clock"]]} for row in rows]


def table(suite: str, rows: list[dict[str, Any]], fastest_read: float | None) -> Table:
    """One line per case and implementation; factors are its time over ours, the case's first, at the same clock."""
    shown = Table(title=suite)
    for column in ("case", "impl"):
        shown.add_column(column)
    for column in ("burst ms", "hot ms", "rate", "% of read", "x ours", "x q 1", "rel err"):
        shown.add_column(column, justify="right")
    ms = {(row["case"], row["impl"], row["clock"]): row["ms"] for row in rows}
    for row in rows:
        if row["clock"] == "burst":
            case, impl = row["case"], row["impl"]
            first = next(name for name_case, name, _ in ms if name_case == case)
            factors = " / ".join(f"{ms[case, impl, clock] / ms[case, first, clock]:.2f}" for clock in CLOCKS)
            times = [f"{ms[case, impl, clock]:.4f}" for clock in CLOCKS]
            last = (f"{row['x_q1']:.2f}" if "x_q1" in row else "", f"{row['rel_err']:.1e}")
            shown.add_row(case, impl, *times, *_rate(row, fastest_read), "" if impl == first else factors, *last)
    return shown


def _rate(row: dict[str, Any], fastest_read: float | None) -> tuple[str, str]:
    """The rate, and its share of the bandwidth measured in this run."""
    if "tflops" in row:
        return f"{row['tflops']:.0f} TFLOP/s", ""
    return f"{row['tbps']:.2f} TB/s", f"{100 * row['tbps'] / fastest_read:.0f}" if fastest_read else ""


if __name__ == "__main__":
    main()
