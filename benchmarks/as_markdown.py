"""Print a results file as Markdown tables, for documents: one line per case, one column per implementation.

python benchmarks/as_markdown.py benchmarks/results/<date>-<gpu>.json [--suites decode paged ...]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--suites", nargs="+", help="default: all")
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    print(", ".join(f"{key} {value}" for key, value in results["env"].items()))
    for suite in options.suites or dict.fromkeys(row["suite"] for row in results["rows"]):
        print(f"\n{suite}\n\n" + "\n".join(table([row for row in results["rows"] if row["suite"] == suite])))


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a suite's table; ours, the first of a case, has its rate, the others their time over ours."""
    cases: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        cases.setdefault(row["case"], {}).setdefault(row["impl"], []).append(row)
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    lines = [["case", *impls], ["---"] * (len(impls) + 1)]
    for case, by_impl in cases.items():
        first = next(iter(by_impl.values()))
        lines.append([case, *(cell(by_impl[impl], first) if impl in by_impl else "" for impl in impls)])
    return [f"| {' | '.join(line)} |" for line in lines]


def cell(rows: list[dict[str, Any]], first: list[dict[str, Any]]) -> str:
    """Times at each clock, and the rate, or the factors over ``first``; of generation, the factor over its floor."""
    if "floor_ms" in rows[0]:
        return " / ".join(f"{row['ms']:.1f} ms, x {row['ms'] / row['floor_ms']:.2f} of the floor" for row in rows)
    times = " / ".join(f"{row['ms'] * 1e3:.1f}" if row["ms"] < 1 else f"{row['ms'] * 1e3:.0f}" for row in rows) + " us"
    if rows is first:
        rate = f"{rows[0]['tbps']:.2f} TB/s" if "tbps" in rows[0] else f"{rows[0]['tflops']:.0f} TFLOP/s"
        return f"{times}, {rate}"
    factors = " / ".join(f"{row['ms'] / one['ms']:.2f}" for row, one in zip(rows, first, strict=True))
    return f"{times}; x {factors}"


if __name__ == "__main__":
    main()
