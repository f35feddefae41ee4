"""A report as a table in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleRenderable
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from attnpatch.reporting.advice import for_reason
from attnpatch.reporting.folding import folded
from attnpatch.reporting.sites import SiteReport

WIDTH = 118
"""Of reports as plain text."""


def plain(report: ConsoleRenderable) -> str:
    """What rich prints of a report, without colours."""
    console = Console(width=WIDTH, no_color=True)
    with console.capture() as capture:
        console.print(report)
    return capture.get().rstrip()


def table(sites: Sequence[SiteReport]) -> Table:
    """Rows of equal content in numbered layers are folded into one."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("site, rule", "heads x dim", "mask", "runs on (calls)"):
        result.add_column(name, overflow="fold")
    for row in folded(sites):
        site = row.site
        heads = f"{site.num_heads}/{site.num_kv_heads} x {site.head_dim}\n{site.dtype}" if site.num_heads else ""
        cells = f"{row.label}\n{site.rule}", heads, site.mask, _ran(site)
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


def summary_line(summary: Mapping[str, int]) -> str:
    """The last line of the table."""
    total = summary["fused"] + summary["refused"]
    return (
        f"{summary['fused']} of {total} sites fused, {summary['refused']} refused; {summary['graphs']} graphs; "
        f"{decimal(summary['bytes_avoided'])} of K/V copies and scores not moved"
    )
