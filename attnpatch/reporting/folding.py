"""Sites of equal content in numbered layers, as one row: ``model.layers.0-29.self_attn``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from attnpatch.reporting.sites import SiteReport, keys


@dataclass
class Row:
    """One or more sites that differ in nothing but numbers of their names, and how long they took.

    Attributes:
        label: the name that they share.
        sites: they.
    """

    label: str
    sites: list[SiteReport]

    @property
    def site(self) -> SiteReport:
        """The first of them."""
        return self.sites[0]

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.sites)


def folded(sites: Sequence[SiteReport]) -> list[Row]:
    """Rows in the order of their first sites; each number in the names is folded in turn, from the left."""
    names = [site.module or "(top level)" for site in sites]
    orders = [key.order for key in keys(names)]
    rows = [(order, _content(site), Row(name, [site])) for name, order, site in zip(names, orders, sites, strict=True)]
    for position in range(max((name.count(".") + 1 for name in names), default=0)):
        groups: dict[object, list[tuple[int, str, Row]]] = {}
        for order, content, row in rows:
            parts = row.label.split(".")
            numbered = position < len(parts) and parts[position].isdigit()
            rest = (*parts[:position], *parts[position + 1 :]) if numbered else row.label
            groups.setdefault((rest, order, content), []).append((order, content, row))
        rows = [(*group[0][:2], _joined([row for *_, row in group], position)) for group in groups.values()]
    return [row for *_, row in rows]


def _content(site: SiteReport) -> str:
    untimed = [replace(d, timed_calls=0, seconds=None) for d in site.dispatches]
    return repr(replace(site, module="", dispatches=untimed))


def _joined(rows: Sequence[Row], position: int) -> Row:
    if len(rows) == 1:
        return rows[0]
    parts = rows[0].label.split(".")
    parts[position] = ranges(sorted(int(row.label.split(".")[position]) for row in rows))
    return Row(".".join(parts), [site for row in rows for site in row.sites])


def ranges(numbers: Sequence[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7; ``0,2,..,10`` for every second one up to 10.

    Args:
        numbers: rising.
    """
    steps = {b - a for a, b in pairwise(numbers)}
    if len(steps) == 1 and steps != {1} and len(numbers) > 3:
        return f"{numbers[0]},{numbers[1]},..,{numbers[-1]}"
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
