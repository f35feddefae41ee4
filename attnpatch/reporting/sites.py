"""One row per attention of a model, merged from all graphs that it was compiled in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from attnpatch.attention_call import PHASES
from attnpatch.dispatch import Dispatch, Traffic
from attnpatch.reporting.records import NO_TIME, GraphRecord, Time
from attnpatch.rewriter import SiteRecord


@dataclass(frozen=True)
class DispatchReport:
    """How often a site ran on a backend in a phase, why on that one, and what its mask was there.

    Attributes:
        phase: "prefill", "decode", "append", "cross" or "varlen".
        backend: its dotted name.
        calls: how often, replays included.
        captured: whether a CUDA graph replayed these calls.
        reason: why this backend.
        mask: in the graph that ran these calls, in words.
        timed_calls: how many of them were timed.
        seconds: what those took in all; None when none was timed.
    """

    phase: str
    backend: str
    calls: int
    captured: bool
    reason: str
    mask: str = ""
    timed_calls: int = 0
    seconds: float | None = None


@dataclass
class SiteReport:
    """One attention of the model, over all graphs it was compiled in.

    Attributes:
        module: dotted name of the module that computes it; empty at the top level.
        rule: what recognised it.
        status: "fused", or "refused" when any graph left it as it was.
        reason: why it was refused.
        mask: what the mask became, in words; those of several graphs are separated by ``|``.
        num_heads: heads of q.
        num_kv_heads: heads of k and v.
        head_dim: width of q and k.
        dtype: of q.
        dispatches: what its calls ran on.
        kv_bytes_avoided: bytes of K and V repeated for their group that were neither written nor read.
        score_bytes_avoided: likewise of scores and probabilities.
    """

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
    kv_bytes_avoided: int = 0
    score_bytes_avoided: int = 0


@dataclass(frozen=True)
class Gap:
    """Something that ran past the patch: kind, where, how often."""

    kind: str
    place: str
    count: int


@dataclass(frozen=True)
class PhaseTime:
    """Timed runs of graphs in which a phase ran, and how many seconds they took in all, attention and the rest."""

    phase: str
    runs: int
    seconds: float


class Key(NamedTuple):
    """The n-th attention of a module: the same one in every graph and in every report."""

    module: str
    order: int


def keys(modules: Iterable[str]) -> list[Key]:
    """A key for each of ``modules``, in their order."""
    seen: Counter[str] = Counter()
    found = []
    for module in modules:
        found.append(Key(module, seen[module]))
        seen[module] += 1
    return found


class _Calls(NamedTuple):
    dispatch: Dispatch
    captured: bool
    mask: str


def merge(graphs: Sequence[GraphRecord]) -> list[SiteReport]:
    """One SiteReport per attention; the n-th site of a module in each graph is the same attention."""
    merged: dict[Key, SiteReport] = {}
    calls: dict[Key, Counter[_Calls]] = {}
    times: dict[tuple[Key, _Calls], Time] = {}
    for graph in graphs:
        named = list(zip(keys(site.module or site.place for site in graph.sites), graph.sites, strict=True))
        for key, site in named:
            _take(merged, key, site)
        fused = [(key, site.mask) for key, site in named if site.fused for _ in range(site.operators)]
        for (dispatches, captured), count in graph.runs.items():
            for (key, mask), dispatch in zip(fused, dispatches, strict=False):
                calls.setdefault(key, Counter())[_Calls(dispatch, captured, mask)] += count
        for (i, dispatch), time in graph.times.items():
            key, mask = fused[i]
            way = key, _Calls(dispatch, False, mask)
            times[way] = times.get(way, NO_TIME).plus(time.seconds, time.calls)
        for (key, _), traffic in zip(fused, graph.traffic, strict=True):
            _add_traffic(merged[key], traffic)
    for key, counted in calls.items():
        merged[key].dispatches = [_dispatch(way, n, times.get((key, way), NO_TIME)) for way, n in counted.items()]
    return list(merged.values())


def _dispatch(way: _Calls, calls: int, time: Time) -> DispatchReport:
    d, seconds = way.dispatch, time.seconds if time.calls else None
    return DispatchReport(d.phase, d.backend, calls, way.captured, d.reason, way.mask, time.calls, seconds)


def phase_times(graphs: Sequence[GraphRecord]) -> list[PhaseTime]:
    """Of all timed runs, in the order of PHASES."""
    whole: dict[str, Time] = {}
    for graph in graphs:
        for phase, time in graph.whole.items():
            whole[phase] = whole.get(phase, NO_TIME).plus(time.seconds, time.calls)
    return [PhaseTime(phase, *whole[phase]) for phase in PHASES if phase in whole]


def share(rows: Iterable[SiteReport], times: Sequence[PhaseTime], phase: str) -> float | None:
    """What part of the time of ``phase`` the attentions of ``rows`` took; None when it was not timed."""
    whole = next((time.seconds for time in times if time.phase == phase), 0.0)
    own = [d.seconds for row in rows for d in row.dispatches if d.phase == phase and d.seconds is not None]
    return sum(own) / whole if own and whole else None


def _take(merged: dict[Key, SiteReport], key: Key, site: SiteRecord) -> None:
    """Add what one graph says of a site: refused anywhere is refused, masks are listed."""
    row = merged.setdefault(key, SiteReport(site.module, site.rule, "fused", "", "", 0, 0, 0, ""))
    if not site.fused:
        row.status, row.reason = "refused", f"{site.reason}"
        return
    row.rule, row.num_heads, row.num_kv_heads = site.rule, site.num_heads, site.num_kv_heads
    row.head_dim, row.dtype = site.head_dim, site.dtype
    if site.mask not in row.mask.split(" | "):
        row.mask = f"{row.mask} | {site.mask}" if row.mask else site.mask


def _add_traffic(row: SiteReport, traffic: Traffic) -> None:
    row.kv_bytes_avoided += traffic.repeats
    row.score_bytes_avoided += traffic.scores
