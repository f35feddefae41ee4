"""Prints what torch takes for each call: equal rows as one, reasons numbered, falls to math with what to change."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnpatch.sdpa.choice import Choice, Choices, examine

Row = tuple[Any, ...]
DTYPE, HEAD_DIM, CALL = range(3)
NO_REMEDY = "no single change that was tried leaves math"
# Of the table: header, least and most width, so that 100 columns hold it.
COLUMNS = (
    ("call", 32, 48),
    ("dtype", 17, 17),
    ("head_dim", 14, 14),
    ("runs on", 7, 24),
    ("not on (reason)", 15, None),
)


def run(json_path: str | None) -> int:
    """Print the table of this machine's device, write the JSON where asked; 0."""
    choices = examine("cuda" if torch.cuda.is_available() else "cpu")
    show(choices, Console())
    if json_path:
        Path(json_path).write_text(json.dumps(to_dict(choices), indent=2) + "\n")
    return 0


def to_dict(choices: Choices) -> dict[str, Any]:
    """As written by ``--json``: ``torch``, ``device``, ``notes`` and a list ``calls``, of each its case and choice."""
    calls = [
        {**choice.case._asdict(), **choice._asdict(), "case": choice.case.describe(), "silent_math": _silent(choice)}
        for choice in choices.choices
    ]
    return {"torch": choices.torch, "device": choices.device, "notes": list(choices.notes), "calls": calls}


def show(choices: Choices, console: Console) -> None:
    """Print the table, its reasons, the silent falls to math, and the notes."""
    rows = [
        (choice.case.dtype, choice.case.head_dim, choice.case.describe(), choice.runs, tuple(choice.others.items()))
        for choice in choices.choices
    ]
    reasons = list(dict.fromkeys(reason for row in rows for _, reason in row[-1]))
    console.print(_table(f"scaled_dot_product_attention, torch {choices.torch}, {choices.device}", rows, reasons))
    console.print(_pairs((f"({number})", reason) for number, reason in enumerate(reasons, 1)))
    _show_falls([choice for choice in choices.choices if _silent(choice)], console)
    for note in choices.notes:
        console.print(f"[yellow]note[/]: {escape(note)}", highlight=False)


def _silent(choice: Choice) -> bool:
    return choice.runs == "math"


def _table(title: str, rows: list[Row], reasons: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_lines=True)
    for header, least, most in COLUMNS:
        table.add_column(header, overflow="fold", min_width=least, max_width=most)
    for dtypes, head_dims, calls, runs, others in merge(rows):
        why = "\n".join(f"{name} ({reasons.index(reason) + 1})" for name, reason in others)
        runs = f"[yellow]{runs}[/]" if runs == "math" else escape(runs)
        words = "\n".join(calls), ", ".join(dtypes), ", ".join(map(str, head_dims))
        table.add_row(*map(escape, words), runs, why)
    return table


def merge(rows: Iterable[Row]) -> list[Row]:
    """Rows that differ in head_dim alone as one, then those in dtype alone, then those in the call alone."""
    for field in (HEAD_DIM, DTYPE, CALL):
        groups: dict[Row, list[Any]] = defaultdict(list)
        for row in rows:
            groups[row[:field] + row[field + 1 :]].append(row[field])
        rows = [(*rest[:field], tuple(values), *rest[field:]) for rest, values in groups.items()]
    return list(rows)


def _show_falls(falls: list[Choice], console: Console) -> None:
    """One entry per kind of call that torch computes with every score in memory, and says nothing."""
    console.print(f"\n[bold]silent falls to math[/]: {len(falls)} calls" if falls else "\nno silent fall to math")
    rows = [(fall.case.dtype, fall.case.head_dim, fall.case.describe(), fall.remedies) for fall in falls]
    console.print(_pairs((_words(*row[:3]), "\nor ".join(row[3]) or NO_REMEDY) for row in merge(rows)))


def _words(dtypes: tuple[str, ...], head_dims: tuple[int, ...], calls: tuple[str, ...]) -> str:
    return "\n".join((*map(escape, calls), f"[dim]{', '.join(dtypes)}; head_dim {', '.join(map(str, head_dims))}[/]"))


def _pairs(pairs: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for first, second in pairs:
        grid.add_row(first, escape(second))
    return grid
