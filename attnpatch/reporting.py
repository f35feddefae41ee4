"""What ran where and why: the data behind ``attnpatch.report``, counted as graphs run."""

from __future__ import annotations

import io
import json
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import nn

from attnpatch.dispatch import Dispatch, Recording
from attnpatch.rewriter import SiteRecord

log = logging.getLogger("attnpatch")


@dataclass(frozen=True)
class DispatchReport:
    """How often a site ran on a backend in a phase, and why on that one."""

    phase: str
    backend: str
    calls: int
    captured: bool
    reason: str


@dataclass
class SiteReport:
    """One attention of the model, over all graphs it was compiled in."""

    module: str
    rule: str
    status: str
    reason: str
    mask: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    dispatches: list[DispatchReport] = field(default_factory=list)


@dataclass(frozen=True)
class Gap:
    """Something that ran past the patch: kind, where, how often."""

    kind: str
    place: str
    count: int


class GraphRecord:
    """The sites of one compiled graph and what its runs dispatched to.

    Args:
        sites: in the order the graph runs them.
        parameters: the model's parameters among the graph's inputs, to tell whose graph it is.
    """

    def __init__(self, sites: Sequence[SiteRecord], parameters: Iterable[nn.Parameter] = ()) -> None:
        self.sites = list(sites)
        self.fused = [site for site in sites if site.fused]
        self.runs: Counter[tuple[tuple[Dispatch, ...], bool]] = Counter()
        self.bytes_avoided = 0
        self._writes_scores = [site.rule != "sdpa_call" for site in self.fused]  # torch's SDPA keeps none
        self._last: tuple[tuple[Dispatch, ...], int] = ((), 0)
        self._parameters = [weakref.ref(p) for p in parameters]

    def count(self, recorded: Recording) -> None:
        """Count one run. Nothing dispatched although sites are fused: a CUDA graph replayed the last run."""
        captured = bool(self.fused) and not recorded.dispatches
        if not captured:
            pairs = zip(self._writes_scores, recorded.traffic, strict=False)
            avoided = sum(t.repeats + (t.scores if writes else 0) for writes, t in pairs)
            self._last = (tuple(recorded.dispatches), avoided)
        if (self._last[0], captured) not in self.runs:
            self._log_first(captured)
        self.runs[self._last[0], captured] += 1
        self.bytes_avoided += self._last[1]

    def _log_first(self, captured: bool) -> None:
        """Log a way of running the first time it is taken, one line per phase and backend."""
        for phase, backend in dict.fromkeys((d.phase, d.backend) for d in self._last[0]):
            log.info("%s of %d sites runs on %s%s", phase, len(self.fused), backend, ", replayed" if captured else "")

    def belongs_to(self, parameters: set[int]) -> bool:
        """Whether any of the graph's parameters is among those (by ``id``)."""
        return any(id(p()) in parameters for p in self._parameters if p() is not None)


class Collector:
    """Every graph compiled for one model (or by the bare backend), and every gap."""

    def __init__(self) -> None:
        self.graphs: list[GraphRecord] = []
        self.gaps: Counter[tuple[str, str]] = Counter()
        self.runs = 0


class Report:
    """Sites, gaps and a summary; ``str()`` is a table.

    Attributes:
        sites: one SiteReport per attention.
        gaps: what ran past the patch.
        summary: counts of fused and refused sites, graphs compiled, and bytes of K/V and score traffic avoided.
        note: why there is nothing to report, when there is nothing.
    """

    def __init__(self, graphs: Sequence[GraphRecord], gaps: Counter[tuple[str, str]], note: str = "") -> None:
        self.sites = _merge(graphs)
        self.gaps = [Gap(kind, place, count) for (kind, place), count in gaps.items()]
        statuses = Counter(site.status for site in self.sites)
        self.summary = {
            "fused": statuses["fused"],
            "refused": statuses["refused"],
            "graphs": len(graphs),
            "bytes_avoided": sum(graph.bytes_avoided for graph in graphs),
        }
        self.note = note

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, with stable field names."""
        return {
            "summary": self.summary,
            "sites": [asdict(site) for site in self.sites],
            "gaps": [asdict(gap) for gap in self.gaps],
            "note": self.note,
        }

    def to_json(self, path: str | Path) -> None:
        """Write :meth:`to_dict` to ``path``."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def to_html(self, path: str | Path) -> None:
        """Write the table of ``str()`` to ``path`` as a page."""
        console = Console(record=True, width=140, file=io.StringIO())
        console.print(*self._renderables(), sep="\n")
        Path(path).write_text(console.export_html(inline_styles=True))

    def __str__(self) -> str:
        console = Console(width=118, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    def __rich_console__(self, console: Console, options: Any) -> Iterator[Any]:
        yield from self._renderables()

    def _renderables(self) -> list[Any]:
        parts: list[Any] = [_table(self.sites)] if self.sites else []
        parts += [f"gap: {gap.kind} at {gap.place} (x{gap.count})" for gap in self.gaps]
        return [*parts, self.note or _summary_line(self.summary)]


def _merge(graphs: Sequence[GraphRecord]) -> list[SiteReport]:
    """One SiteReport per attention; the n-th site of a module in each graph is the same attention."""
    merged: dict[tuple[str, int], SiteReport] = {}
    calls: dict[tuple[str, int], Counter[tuple[Dispatch, bool]]] = {}
    for graph in graphs:
        fused: list[tuple[str, int]] = []
        seen: Counter[str] = Counter()
        for site in graph.sites:
            key = (site.module or site.place, seen[site.module or site.place])
            seen[key[0]] += 1
            _take(merged, key, site)
            fused += [key] if site.fused else []
        for (dispatches, captured), count in graph.runs.items():
            for key, dispatch in zip(fused, dispatches, strict=False):
                calls.setdefault(key, Counter())[dispatch, captured] += count
    for key, counted in calls.items():
        merged[key].dispatches = [
            DispatchReport(d.phase, d.backend, n, captured, d.reason) for (d, captured), n in counted.items()
        ]
    return list(merged.values())


def _take(merged: dict[tuple[str, int], SiteReport], key: tuple[str, int], site: SiteRecord) -> None:
    """Add what one graph says of a site: refused anywhere is refused, masks are listed."""
    row = merged.setdefault(key, SiteReport(site.module, site.rule, "fused", "", "", 0, 0, 0, ""))
    if not site.fused:
        row.status, row.reason = "refused", f"{site.reason}"
        return
    row.rule, row.num_heads, row.num_kv_heads = site.rule, site.num_heads, site.num_kv_heads
    row.head_dim, row.dtype = site.head_dim, site.dtype
    if site.mask not in row.mask.split(" | "):
        row.mask = f"{row.mask} | {site.mask}" if row.mask else site.mask


def _table(sites: Sequence[SiteReport]) -> Table:
    """Rows of equal content in numbered layers are folded into one."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("site, rule", "heads x dim", "mask", "runs on (calls)"):
        table.add_column(name, overflow="fold")
    for label, site in _folded(sites):
        heads = f"{site.num_heads}/{site.num_kv_heads} x {site.head_dim}\n{site.dtype}" if site.num_heads else ""
        table.add_row(f"{label}\n{site.rule}", heads, site.mask, _ran(site))
    return table


def _ran(site: SiteReport) -> str:
    """``prefill: cpu.sdpa (3)``, one line per phase and backend, and why a graph left the site alone."""
    counts: Counter[tuple[str, str, bool]] = Counter()
    for d in site.dispatches:
        counts[d.phase, d.backend, d.captured] += d.calls
    lines = [f"{p}: {b} ({n}{' replayed' if c else ''})" for (p, b, c), n in counts.items()]
    lines += [f"refused: {site.reason}"] if site.reason else []
    return "\n".join(lines) or "not run yet"


def _folded(sites: Sequence[SiteReport]) -> list[tuple[str, SiteReport]]:
    """``model.layers.0-29.self_attn`` for neighbours that differ only in one number of their path."""
    rows: list[tuple[str, int, int, SiteReport]] = []
    for site in sites:
        pattern, number = _numbered(site.module or "(top level)")
        previous = rows[-1] if rows else None
        if previous and number is not None and _same_row(previous, pattern, number, site):
            rows[-1] = (pattern, previous[1], number, previous[3])
        else:
            rows.append((pattern, number or 0, number or 0, site))
    return [(p.replace("#", str(a) if a == b else f"{a}-{b}"), site) for p, a, b, site in rows]


def _same_row(previous: tuple[str, int, int, SiteReport], pattern: str, number: int, site: SiteReport) -> bool:
    same = asdict(previous[3]) | {"module": ""} == asdict(site) | {"module": ""}
    return same and previous[0] == pattern and previous[2] + 1 == number


def _numbered(path: str) -> tuple[str, int | None]:
    """The path with its first numeric part as ``#``, and that number."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join([*parts[:i], "#", *parts[i + 1 :]]), int(part)
    return path, None


def _summary_line(summary: dict[str, int]) -> str:
    total = summary["fused"] + summary["refused"]
    return (
        f"{summary['fused']} of {total} sites fused, {summary['refused']} refused; {summary['graphs']} graphs; "
        f"{decimal(summary['bytes_avoided'])} of K/V copies and scores not moved"
    )
