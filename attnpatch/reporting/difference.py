"""What changed between two reports of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnpatch.attention_call import PHASES
from attnpatch.reporting.sites import Gap, Key, SiteReport, keys
from attnpatch.reporting.text import plain


@dataclass(frozen=True)
class Change:
    """What became of one site.

    Attributes:
        module: name of its module.
        order: which of the module's sites it is, from 0.
        kind: "changed", "appeared" or "gone".
        fields: of a changed site, field to (old, new): "status", "reason", "mask", "backend in <phase>".
        lost: it was fused, and is refused or gone.
    """

    module: str
    order: int
    kind: str
    fields: dict[str, tuple[str, str]]
    lost: bool


@dataclass(frozen=True)
class Difference:
    """Sites that changed, appeared or went, and gaps that did; false when there are none. ``str()`` is a table.

    Attributes:
        changes: in the order of the newer report, those that went at the end.
        new_gaps: only in the newer report.
        gone_gaps: only in the older one.
    """

    changes: list[Change]
    new_gaps: list[Gap]
    gone_gaps: list[Gap]

    @property
    def lost(self) -> list[Change]:
        """The sites that lost their kernel."""
        return [change for change in self.changes if change.lost]

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain data: ``changes``, ``new_gaps``, ``gone_gaps``, and how many sites ``lost`` theirs.

        A field of a change is ``{"old": ..., "new": ...}``.
        """
        changes = [
            vars(c) | {"fields": {name: {"old": old, "new": new} for name, (old, new) in c.fields.items()}}
            for c in self.changes
        ]
        gaps = {"new_gaps": [vars(gap) for gap in self.new_gaps], "gone_gaps": [vars(gap) for gap in self.gone_gaps]}
        return {"changes": changes, **gaps, "lost": len(self.lost)}

    def __bool__(self) -> bool:
        return bool(self.changes or self.new_gaps or self.gone_gaps)

    def __str__(self) -> str:
        return plain(self)

    def __rich_console__(self, console: Console, options: Any) -> Iterator[Any]:
        if not self:
            yield "no site changed its status, backends, mask or reason"
            return
        if self.changes:
            yield _table(self.changes)
        yield from (Text(f"new gap: {gap.kind} at {gap.place} (x{gap.count})") for gap in self.new_gaps)
        yield from (Text(f"gone gap: {gap.kind} at {gap.place}") for gap in self.gone_gaps)
        yield f"{len(self.changes)} sites differ, {len(self.lost)} lost their kernel"


def difference(old: Sequence[SiteReport], new: Sequence[SiteReport], gaps: tuple[list[Gap], list[Gap]]) -> Difference:
    """Compare sites by module and order within it, and ``gaps`` (old, new) by kind and place."""
    before, after = _by_key(old), _by_key(new)
    changes = [_change(key, before.get(key), site) for key, site in after.items()]
    changes += [_change(key, site, None) for key, site in before.items() if key not in after]
    old_gaps, new_gaps = ({(gap.kind, gap.place): gap for gap in some} for some in gaps)
    return Difference(
        [change for change in changes if change is not None],
        [gap for name, gap in new_gaps.items() if name not in old_gaps],
        [gap for name, gap in old_gaps.items() if name not in new_gaps],
    )


def _by_key(sites: Sequence[SiteReport]) -> dict[Key, SiteReport]:
    return dict(zip(keys(site.module for site in sites), sites, strict=True))


def _change(key: Key, old: SiteReport | None, new: SiteReport | None) -> Change | None:
    lost = old is not None and old.status == "fused" and (new is None or new.status != "fused")
    if old is None or new is None:
        return Change(*key, "appeared" if old is None else "gone", {}, lost)
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in ("status", "reason", "mask")}
    a, b = _backends(old), _backends(new)
    pairs |= {f"backend in {phase}": (a[phase], b[phase]) for phase in PHASES if phase in a and phase in b}
    fields = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return Change(*key, "changed", fields, lost) if fields else None


def _backends(site: SiteReport) -> dict[str, str]:
    """The backends of each phase that ran, in alphabetical order: which came first says nothing."""
    phases = {d.phase for d in site.dispatches}
    return {p: " | ".join(sorted({d.backend for d in site.dispatches if d.phase == p})) for p in phases}


def _table(changes: Sequence[Change]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("site", "", "old", "new"):
        table.add_column(name, overflow="fold")
    for change in changes:
        name = (change.module or "(top level)") + (f" #{change.order + 1}" if change.order else "")
        rows = [(field, *pair) for field, pair in change.fields.items()] or [(change.kind, "", "")]
        for i, (what, old, new) in enumerate(rows):
            first = "" if i else f"{name}{' (lost its kernel)' if change.lost else ''}"
            table.add_row(*map(Text, (first, what, old, new)))  # Text: brackets in masks and reasons are no markup
    return table
