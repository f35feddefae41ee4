"""The report of a model: its sites and gaps, and how it is printed, written, read and compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from attnpatch.attention_call import PHASES
from attnpatch.reporting import text
from attnpatch.reporting.difference import Difference, difference
from attnpatch.reporting.page import html
from attnpatch.reporting.records import GraphRecord
from attnpatch.reporting.sites import DispatchReport, Gap, PhaseTime, SiteReport, merge, phase_times

SCHEMA = "attnpatch.report/2"
"""Names the fields of :meth:`Report.to_dict`; docs/report.md lists them. The number rises with every change of them."""

OLDER = ("attnpatch.report/1",)
"""What :meth:`Report.from_dict` reads besides: the first had no times."""


class Report:
    """Sites, gaps and a summary; ``str()`` is a table.

    Attributes:
        sites: one SiteReport per attention.
        gaps: what ran past the patch.
        summary: counts of fused and refused sites, graphs compiled, and bytes of K/V and score traffic avoided.
        note: why there is nothing to report, when there is nothing.
        times: of the phases, when runs were timed (:func:`attnpatch.reporting.timed`); else empty.
    """

    def __init__(self, graphs: Sequence[GraphRecord], gaps: Counter[tuple[str, str]], note: str = "") -> None:
        self.sites = merge(graphs)
        self.gaps = [Gap(kind, place, count) for (kind, place), count in gaps.items()]
        statuses = Counter(site.status for site in self.sites)
        self.summary = {
            "fused": statuses["fused"],
            "refused": statuses["refused"],
            "graphs": len(graphs),
            "bytes_avoided": sum(graph.bytes_avoided for graph in graphs),
        }
        self.note = note
        self.times = phase_times(graphs)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report that :meth:`to_dict` gave.

        Raises:
            ValueError: ``data`` is of another schema, or its fields are not those of SCHEMA.
        """
        schema = data.get("schema") if isinstance(data, Mapping) else None
        if schema not in (SCHEMA, *OLDER):
            raise ValueError(f"schema {schema!r} is not {SCHEMA!r}; write the report again with this attnpatch")
        found = cls([], Counter())
        try:
            found.sites = [_site(site) for site in data["sites"]]
            found.gaps = [Gap(**gap) for gap in data["gaps"]]
            found.summary = {name: data["summary"][name] for name in found.summary}
            found.note = data["note"]
            found.times = [PhaseTime(**time) for time in data["times"]] if schema == SCHEMA else []
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a report of schema {schema!r}: {error}") from None
        return found

    @classmethod
    def from_json(cls, path: str | Path) -> Report:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: the file is no JSON, or no report of this schema; the message names the file.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, with stable field names."""
        return {
            "schema": SCHEMA,
            "summary": dict(self.summary),
            "sites": [asdict(site) for site in self.sites],
            "gaps": [asdict(gap) for gap in self.gaps],
            "note": self.note,
            "times": [asdict(time) for time in self.times],
        }

    def to_json(self, path: str | Path) -> None:
        """Write :meth:`to_dict` to ``path``."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def to_html(self, path: str | Path) -> None:
        """Write the report to ``path`` as one page that needs no other file and no network."""
        Path(path).write_text(html(self.sites, self.gaps, self.summary, self.note, self.times), encoding="utf-8")

    def diff(self, newer: Report) -> Difference:
        """What changed from this report to ``newer``: status, reason, mask and the backend of each phase.

        Sites are matched by module and their order within it. A phase that one of the two did not run is no change.
        """
        return difference(self.sites, newer.sites, (self.gaps, newer.gaps))

    def __str__(self) -> str:
        return text.plain(self)

    def __rich_console__(self, console: Console, options: Any) -> Iterator[Any]:
        if self.sites:
            yield text.table(self.sites, self.times)
        yield from (Text(f"gap: {gap.kind} at {gap.place} (x{gap.count})") for gap in self.gaps)
        yield from map(Text, text.time_lines(self.sites, self.times))
        yield self.note or text.summary_line(self.summary)


def _site(data: Mapping[str, Any]) -> SiteReport:
    site = SiteReport(**{**data, "dispatches": [DispatchReport(**d) for d in data["dispatches"]]})
    unknown = [d.phase for d in site.dispatches if d.phase not in PHASES]
    if unknown:
        raise ValueError(f"phase {unknown[0]!r} of site {site.module!r} is none of {', '.join(PHASES)}")
    return site
