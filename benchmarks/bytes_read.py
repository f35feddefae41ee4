"""Bytes that a decode step reads from memory over the bytes of K and V, by ncu's counters: ours, and with K/V repeated.

TRITON_INTERPRET=0 python benchmarks/bytes_read.py [--case "B1 H32/8 S32768 D128"]

Each kernel starts with empty caches (ncu's default), so that what one kernel leaves in L2 for the next counts as read.
Where ncu is absent or may not read the counters, as in many containers, it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from harness import environment, write_results
from measure import Implementation, our_name, ours
from peers import hf_eager
from suites import Case

HERE = Path(__file__).parent
CASES = ["B1 H32/8 S32768 D128", "B8 H32/8 S8192 D128"]
BYTES, NANOSECONDS = "dram__bytes_read.sum", "gpu__time_duration.sum"
NCU = ("--csv", "--print-units", "base", "--metrics", f"{BYTES},{NANOSECONDS}", "--profile-from-start", "off")
KEEP_CLOCKS = ("--clock-control", "none", "--target-processes", "all")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--commit", help="default: what git says")
    parser.add_argument("--step", help=argparse.SUPPRESS)  # what runs under ncu: one step of this implementation
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "no CUDA device: nothing to measure\n")
    if options.step:
        step(Case.parse("decode", options.cases[0]), options.step)
        return
    if shutil.which("ncu") is None:
        parser.exit(0, "ncu is not on the PATH: no bytes are counted\n")
    rows = [row for name in options.cases for row in count(Case.parse("decode", name))]
    if rows:
        print(f"written to {write_results(options.results, environment(options.commit), rows)}")


def implementations(case: Case) -> dict[str, Implementation]:
    """By name in the results."""
    return {our_name(case.call(0)): Implementation(ours), "hf-eager": Implementation(hf_eager)}


def step(case: Case, name: str) -> None:
    """Compile, then one step between the marks of the profiler."""
    call, run = case.call(0), implementations(case)[name].run
    run(call)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run(call)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def count(case: Case) -> list[dict[str, Any]]:
    """Rows of one case; none, and a line that says why, where ncu does not count."""
    rows = []
    for name in implementations(case):
        inner = [sys.executable, __file__, "--cases", case.name, "--step", name]
        ncu = subprocess.run(["ncu", *NCU, *KEEP_CLOCKS, *inner], capture_output=True, text=True, check=False)
        try:
            rows.append(row(case, name, totals(ncu.stdout)))
        except ValueError as error:
            print(f"ncu counts nothing for {name}: {error}; it said: {(ncu.stdout + ncu.stderr)[-600:]}")
            return []
        print(f"{case.name} {name}: {rows[-1]['bytes_read']:.4g} bytes, {rows[-1]['x_kv']:.3f} x K and V", flush=True)
    return rows


def totals(output: str) -> dict[str, float]:
    """Sums over all kernels of ncu's CSV, by metric.

    Raises:
        ValueError: there is no such table in ``output``.
    """
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no table in its output")
    sums = {BYTES: 0.0, NANOSECONDS: 0.0}
    for line in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if line["Metric Name"] in sums:
            sums[line["Metric Name"]] += float(line["Metric Value"].replace(",", ""))
    if not all(sums.values()):
        raise ValueError(f"no {BYTES} or {NANOSECONDS} in its table")
    return sums


def row(case: Case, name: str, sums: dict[str, float]) -> dict[str, Any]:
    """A row of the results; the times are ncu's, of kernels one by one with empty caches."""
    ms, num_bytes = sums[NANOSECONDS] / 1e6, sums[BYTES]
    kv_bytes = sum(case.lengths) * case.num_kv_heads * 4 * case.head_dim
    key = {"suite": "bytes_read", "case": case.name, "impl": name, "ms": ms, "tbps": num_bytes / ms / 1e9}
    return {**key, "rel_err": 0.0, "clock": "ncu", "bytes_read": num_bytes, "x_kv": num_bytes / kv_bytes}


if __name__ == "__main__":
    main()
