"""A report as a table in the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleRenderable
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from attnpatch.reporting.advice import for_reason
from attnpatch.reporting.folding import Row, folded
from attnpatch.reporting.sites import PhaseTime, SiteReport, share

WIDTH = 118
"""Of reports as plain text."""


def plain(report: ConsoleRenderable) -> str:
    """What rich prints of a report, without colours."""
    console = Console(width=WIDTH, no_color=True)
    with console.capture() as capture:
        console.print(report)
    return capture.get().rstrip()


def table(sites: Sequence[SiteReport], times: Sequence[PhaseTime] = ()) -> Table:
    """Rows of equal content in numbered layers are folded into one; a column for their time where it was taken."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("site, rule", "heads x dim", "mask", "runs on (calls)", *(["time"] if times else [])):
        result.add_column(name, overflow="fold")
    for row in folded(sites):
        site = row.site
        heads = f"{site.num_heads}/{site.num_kv_heads} x {site.head_dim}\n{site.dtype}" if site.num_heads else ""
        cells = [f"{row.label}\n{site.rule}", heads, site.mask, _ran(site), *([_shares(row, times)] if times else [])]
        result.add_row(*map(Text, cells))  # Text: brackets in masks and reasons are no markup
    return result


def _ran(site: SiteReport) -> str:
    """``prefill: cpu.sdpa (3)``, one line per phase and backend; why a graph left the site alone, and what may help."""
    counts: Counter[tuple[str, str, bool]] = Counter()
    for d in site.dispatches:
        counts[d.phase, d.backend, d.captured] += d.calls
    lines = [f"{p}: {b} ({n}{' replayed' if c else ''})" for (p, b, c), n in counts.items()]
    if site.reason:
        advice = for_reason(site.reason)
        lines += [f"refused: {site.reason}", *([f"try: {advice}"] if advice else [])]
    return "\n".join(lines) or "not run yet"


def _shares(row: Row, times: Sequence[PhaseTime]) -> str:
    """``prefill 12%`` of the phase's time, of all sites of the row together."""
    found = ((time.phase, share(row.sites, times, time.phase)) for time in times)
    return "\n".join(f"{phase} {percent(part)}" for phase, part in found if part is not None)


def time_lines(sites: Sequence[SiteReport], times: Sequence[PhaseTime]) -> list[str]:
    """A line per phase that was timed: how long a run takes, and what part of that attention is."""
    return [
        f"{time.phase}: {milliseconds(time.seconds / time.runs)} per run, of which attention "
        f"{percent(share(sites, times, time.phase) or 0.0)} ({time.runs:,} timed)"
        for time in times
    ]


def percent(part: float) -> str:
    """``12%``, or ``1.2%`` where it is below ten."""
    return f"{part:.{0 if part >= 0.0995 else 1}%}"


def milliseconds(seconds: float) -> str:
    """Three digits of it."""
    value = seconds * 1e3
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0}f} ms"


def summary_line(summary: Mapping[str, int]) -> str:
    """The last line of the table."""
    total = summary["fused"] + summary["refused"]
    return (
        f"{summary['fused']} of {total} sites fused, {summary['refused']} refused; {summary['graphs']} graphs; "
        f"{decimal(summary['bytes_avoided'])} of K/V copies and scores not moved"
    )
