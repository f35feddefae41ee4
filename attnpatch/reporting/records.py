"""What compiled graphs count as they run."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from attnpatch.dispatch import Dispatch, Recording, Traffic
from attnpatch.replaying import Replays
from attnpatch.rewriter import SiteRecord
from attnpatch.timing import Watch

log = logging.getLogger("attnpatch")


class Time(NamedTuple):
    """Calls that were timed, and how many seconds they took in all."""

    calls: int
    seconds: float

    def plus(self, seconds: float, calls: int = 1) -> Time:
        """With more calls that took so long in all."""
        return Time(self.calls + calls, self.seconds + seconds)


NO_TIME = Time(0, 0.0)


class GraphRecord:
    """The sites of one compiled graph and what its runs dispatched to.

    Args:
        sites: in the order the graph runs them.
        parameters: the model's parameters among the graph's inputs, to tell whose graph it is.

    Attributes:
        runs: how often the fused sites dispatched in one way, replayed by a CUDA graph or not.
        times: of each fused site, by its place among them and what it dispatched to; of timed runs alone.
        whole: of timed runs, by each phase that is in them.
    """

    def __init__(self, sites: Sequence[SiteRecord], parameters: Iterable[nn.Parameter] = ()) -> None:
        self.sites = list(sites)
        self.fused = [site for site in sites if site.fused for _ in range(site.operators)]
        self.runs: Counter[tuple[tuple[Dispatch, ...], bool]] = Counter()
        self.times: dict[tuple[int, Dispatch], Time] = {}
        self.whole: dict[str, Time] = {}
        self._scores, self._repeats = [0] * len(self.fused), [0] * len(self.fused)
        self._writes_scores = [site.rule != "sdpa_call" for site in self.fused]  # torch's SDPA keeps none
        self._last: tuple[tuple[Dispatch, ...], Sequence[Traffic]] = ((), ())
        self._logged: set[tuple[int, str, str, bool]] = set()
        self._parameters = [weakref.ref(p) for p in parameters]

    @property
    def traffic(self) -> list[Traffic]:
        """Bytes that each fused site did not move, over all runs."""
        written = zip(self._scores, self._writes_scores, strict=True)
        scores = (total if writes else 0 for total, writes in written)
        return [Traffic(*pair) for pair in zip(scores, self._repeats, strict=True)]

    @property
    def bytes_avoided(self) -> int:
        """Bytes of K/V and scores that all runs of the graph did not move."""
        return sum(sum(traffic) for traffic in self.traffic)

    def count(self, recorded: Recording) -> None:
        """Count one run. Nothing dispatched although sites are fused: a CUDA graph replayed it, or the last."""
        captured = bool(self.fused) and not recorded.dispatches
        known = recorded.replayed or (None if captured else recorded)
        if known is not None:
            self._last = tuple(known.dispatches), known.traffic
        if (self._last[0], captured) not in self.runs:
            self._log_first(captured)
        self.runs[self._last[0], captured] += 1
        moved = self._last[1]  # one comprehension each: this runs at every step
        self._scores[: len(moved)] = [a + t[0] for a, t in zip(self._scores, moved, strict=False)]
        self._repeats[: len(moved)] = [a + t[1] for a, t in zip(self._repeats, moved, strict=False)]
        if recorded.watch is not None and recorded.dispatches:
            self._add_times(recorded.dispatches, recorded.watch)

    def _add_times(self, dispatches: Sequence[Dispatch], watch: Watch) -> None:
        for key, seconds in zip(enumerate(dispatches), watch.attentions, strict=True):
            self.times[key] = self.times.get(key, NO_TIME).plus(seconds)
        for phase in {dispatch.phase for dispatch in dispatches}:
            self.whole[phase] = self.whole.get(phase, NO_TIME).plus(watch.whole)

    def _log_first(self, captured: bool) -> None:
        """One line per site, phase and backend when the graph first runs it so: a reason that names lengths is none."""
        for i, (site, dispatch) in enumerate(zip(self.fused, self._last[0], strict=False)):
            way = (i, dispatch.phase, dispatch.backend, captured)
            if way not in self._logged:
                self._logged.add(way)
                where, replayed = site.module or site.place, ", replayed by a CUDA graph" if captured else ""
                log.info("%s: %s runs on %s%s (%s)", where, dispatch.phase, dispatch.backend, replayed, dispatch.reason)

    def belongs_to(self, parameters: set[int]) -> bool:
        """Whether any of the graph's parameters is among those (by ``id``)."""
        return any(id(p()) in parameters for p in self._parameters if p() is not None)


class Collector:
    """Every graph compiled for one model (or by the bare backend), its captured steps, and every gap."""

    def __init__(self) -> None:
        self.graphs: list[GraphRecord] = []
        self.replays = Replays()
        self.gaps: Counter[tuple[str, str]] = Counter()
        self.runs = 0
