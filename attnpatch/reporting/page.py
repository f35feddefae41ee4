"""A report as one page of HTML that needs no other file, no network and no JavaScript but to print folded parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from rich.filesize import decimal

from attnpatch.attention_call import PHASES
from attnpatch.reporting import advice, masks
from attnpatch.reporting.folding import Row, folded
from attnpatch.reporting.sites import DispatchReport, Gap, PhaseTime, SiteReport
from attnpatch.reporting.style import STYLE
from attnpatch.reporting.text import milliseconds, percent

SQUARE_PHASES = ("prefill", "append", "varlen")
"""Phases of which a picture of a square prefill says something."""

_OPEN_TO_PRINT = 'addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => d.open = 1))'


def html(
    sites: Sequence[SiteReport],
    gaps: Sequence[Gap],
    summary: Mapping[str, int],
    note: str,
    times: Sequence[PhaseTime] = (),
) -> str:
    """The page: summary, then what is refused or ran past the patch, then the fused sites by layer."""
    rows = folded(sites)
    refused, fused = ([r for r in rows if (r.site.status == "fused") == wanted] for wanted in (False, True))
    body = [
        "<h1>attnpatch: which kernel runs where, and why</h1>",
        _summary(sites, summary, len(gaps)),
        f"<p>{escape(note)}</p>" if note else "",
        _section("Refused, and what ran past the patch", _problems(refused, gaps)) if sites or gaps else "",
        _section("By phase", _phases(sites)) if any(site.dispatches for site in sites) else "",
        _section("Time per phase", _times(sites, times)) if times else "",
        _section("Sites by layer", "".join(map(_site, fused))) if fused else "",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><title>attnpatch report</title>'
        f"<style>\n{STYLE}</style><script>{_OPEN_TO_PRINT}</script>"
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(body)}</body></html>\n'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>\n"


def _summary(sites: Sequence[SiteReport], summary: Mapping[str, int], gaps: int) -> str:
    total = summary["fused"] + summary["refused"]
    facts = {
        f"{summary['fused']} of {total} sites fused": "good" if total and summary["fused"] == total else "",
        f"{summary['refused']} refused": "bad" if summary["refused"] else "",
        f"{gaps} {'gap' if gaps == 1 else 'gaps'}": "bad" if gaps else "",
        f"{summary['graphs']} graphs": "",
        f"{decimal(sum(s.kv_bytes_avoided for s in sites))} of K/V copies not moved": "",
        f"{decimal(sum(s.score_bytes_avoided for s in sites))} of scores not moved": "",
    }
    items = (f'<li class="{kind}">{escape(fact)}</li>' for fact, kind in facts.items())
    return f'<ul class="facts">{"".join(items)}</ul>\n'


def _problems(refused: Sequence[Row], gaps: Sequence[Gap]) -> str:
    if not refused and not gaps:
        return '<p class="good">Nothing was refused, and nothing ran past the patch.</p>'
    return "".join([*map(_refused, refused), *map(_gap, gaps)])


def _refused(row: Row) -> str:
    site = row.site
    ran = f"<p>Other graphs of the model run it fused:</p>{_dispatches(row)}" if site.dispatches else ""
    body = f"<p>{escape(site.reason)}</p>{_advice(advice.for_reason(site.reason))}{ran}"
    return f'<article class="bad" data-status="refused"><h3>{_title(row)}</h3>{body}</article>\n'


def _gap(gap: Gap) -> str:
    title = f"{escape(gap.kind)} <small>{gap.count}x</small>"
    body = f"<p>{escape(gap.place)}</p>{_advice(advice.for_gap(gap.kind))}"
    return f'<article class="bad" data-status="gap"><h3>{title}</h3>{body}</article>\n'


def _advice(text: str) -> str:
    known = text or "Nothing is known to help short of writing that step in another way."
    return f'<p class="advice"><b>What to change:</b> {escape(known)}</p>'


def _phases(sites: Sequence[SiteReport]) -> str:
    """Phase by phase, the backends: how many sites and calls each had."""
    ran = [(d.phase, d.backend, i, d.calls) for i, site in enumerate(sites) for d in site.dispatches]
    pairs = sorted({(p, b) for p, b, *_ in ran}, key=lambda pair: (PHASES.index(pair[0]), pair[1]))
    rows = []
    for pair in pairs:
        here = [(i, calls) for p, b, i, calls in ran if (p, b) == pair]
        rows.append([*pair, f"{len({i for i, _ in here}):,}", f"{sum(calls for _, calls in here):,}"])
    return _table(["phase", "backend", "sites", "calls"], rows)


def _times(sites: Sequence[SiteReport], times: Sequence[PhaseTime]) -> str:
    """Phase by phase: how long a run takes, and how much of that each backend's attentions and the rest."""
    rows = []
    for time in times:
        own: dict[str, float] = {}
        for d in (d for site in sites for d in site.dispatches if d.phase == time.phase and d.seconds is not None):
            own[d.backend] = own.get(d.backend, 0.0) + (d.seconds or 0.0)
        parts = {f"attention on {backend}": seconds for backend, seconds in sorted(own.items())}
        parts |= {"all else": max(0.0, time.seconds - sum(own.values())), "whole run": time.seconds}
        for what, seconds in parts.items():
            rows.append([time.phase, what, milliseconds(seconds / time.runs), percent(seconds / time.seconds)])
    timed = ", ".join(f"{time.runs:,} of {time.phase}" for time in times)
    table = _table(["phase", "part", "time per run", "share"], rows)
    return f"<p>Of runs of graphs that hold attention; timed: {escape(timed)}.</p>{table}"


def _site(row: Row) -> str:
    """One row of the layers, to be opened: calls by phase, the mask in words and as a picture, bytes."""
    site = row.site
    ways = dict.fromkeys((d.phase, d.backend) for d in _ordered(site))
    badges = "".join(f"<span><b>{escape(p)}</b> {escape(b)}</span>" for p, b in ways) or "<span>not run yet</span>"
    shape = f"{site.num_heads} / {site.num_kv_heads} heads x {site.head_dim}, {site.dtype}"
    heading = f"<b>{_title(row)}</b><small>; {escape(shape)}; mask {escape(site.mask)}</small> {badges}"
    body = _dispatches(row) + _bytes(row) + "".join(_mask(mask) for mask in _drawn(site))
    return f'<details data-status="fused"><summary>{heading}</summary>{body}</details>\n'


def _title(row: Row) -> str:
    count = f" ({row.count} sites)" if row.count > 1 else ""
    return f"{escape(row.label)}{count} <small>{escape(row.site.rule)}</small>"


def _ordered(site: SiteReport) -> list[DispatchReport]:
    return sorted(site.dispatches, key=lambda d: PHASES.index(d.phase))


def _dispatches(row: Row) -> str:
    """What the calls of each site of a row ran on; their time is the mean over all sites."""
    alike = list(zip(*map(_ordered, row.sites), strict=True))
    timed = any(d.timed_calls for group in alike for d in group)
    header = ["phase", "backend", "calls", *(["time per call"] if timed else []), "mask", "why this backend"]
    rows = []
    for group in alike:
        d, calls, seconds = group[0], sum(d.timed_calls for d in group), sum(d.seconds or 0.0 for d in group)
        time = milliseconds(seconds / calls) if calls else "not timed"
        counted = f"{d.calls:,}{' replayed by a CUDA graph' if d.captured else ''}"
        rows.append([d.phase, d.backend, counted, *([time] if timed else []), d.mask, d.reason])
    return _table(header, rows) if rows else ""


def _bytes(row: Row) -> str:
    site, each = row.site, " in each of them" if row.count > 1 else ""
    kv, scores = decimal(site.kv_bytes_avoided), decimal(site.score_bytes_avoided)
    return f"<p>Not moved{each}: {escape(kv)} of K/V copies, {escape(scores)} of scores.</p>"


def _drawn(site: SiteReport) -> list[str]:
    """The masks to draw: those of whole prompts, or all where nothing ran."""
    if not site.dispatches:
        return site.mask.split(" | ")
    return list(dict.fromkeys(d.mask for d in _ordered(site) if d.phase in SQUARE_PHASES))


def _mask(mask: str) -> str:
    """A mask's words, each with what it means, and its picture."""
    words = "".join(f"<dt>{escape(t.word)}</dt><dd>{escape(t.says)}</dd>" for t in masks.terms(mask))
    found = masks.picture(mask)
    drawn = f"<p>{escape(found)}</p>" if isinstance(found, str) else _figure(mask, found)
    return f'<div class="mask"><div><h4>Mask of whole prompts</h4><dl>{words}</dl></div>{drawn}</div>'


def _figure(mask: str, found: masks.Picture) -> str:
    side = len(found.kinds)
    counts = ", ".join(f"{found.count(kind)} {kind}" for kind in (masks.FULL, masks.PARTIAL, masks.EMPTY))
    caption = f"{side * found.block:,} tokens in blocks of {found.block:,} x {found.block:,}: {counts}."
    more = f" On top of that, {', '.join(found.unknown)} may hide keys that only the device knows."
    paths = "".join(_path(found, kind) for kind in (masks.FULL, masks.PARTIAL, masks.EMPTY))
    label = f"Blocks of queries (down) and keys (right) that the mask {mask} leaves"
    return (
        f'<figure><svg viewBox="-0.2 -0.2 {side + 0.4} {side + 0.4}" role="img" aria-label="{escape(label)}">{paths}'
        f"</svg><figcaption>{escape(caption + (more if found.unknown else ''))}<br>"
        '<span class="key full">full</span> <span class="key partial">partial</span> '
        '<span class="key empty">empty, skipped</span></figcaption></figure>'
    )


def _path(found: masks.Picture, kind: str) -> str:
    cells = ((x, y) for y, row in enumerate(found.kinds) for x, k in enumerate(row) if k == kind)
    return f'<path class="{kind}" d="{"".join(f"M{x} {y}h.9v.9h-.9z" for x, y in cells)}"/>'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: Callable[[int], str]) -> str:
        return "<tr>" + "".join(f"<{tag(i)}>{escape(c)}</{tag(i)}>" for i, c in enumerate(cells)) + "</tr>"

    head = line(header, lambda _: "th")
    body = "".join(line(cells, lambda _: "td") for cells in rows)
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'
