"""Reports made by hand: no model runs here."""

from collections import Counter

import pytest

from attnpatch.reporting import DispatchReport, Gap, Report, SiteReport


def make_site(module="layers.0", **fields):
    """A fused site that ran one prefill and four decode steps."""
    dispatches = [
        DispatchReport("prefill", "triton.prefill", 1, False, "triton.decode: 12 query rows", "causal"),
        DispatchReport("decode", "triton.decode", 4, False, "first choice", "none"),
    ]
    given = {
        "rule": "eager_attention",
        "status": "fused",
        "reason": "",
        "mask": "causal | none",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": "float32",
        "dispatches": dispatches,
        "kv_bytes_avoided": 1000,
        "score_bytes_avoided": 2000,
    }
    return SiteReport(module, **given | fields)


def make_refused(module="layers.1", reason="dropout with p=0.5 is active in training; fused attention has none"):
    nothing = {"kv_bytes_avoided": 0, "score_bytes_avoided": 0, "dispatches": [], "mask": "", "num_heads": 0}
    return make_site(module, status="refused", reason=reason, **nothing)


def make_report(*sites, gaps=(), note=""):
    report = Report([], Counter(), note)
    report.sites, report.gaps = list(sites), [Gap(*gap) for gap in gaps]
    fused = sum(site.status == "fused" for site in sites)
    avoided = sum(site.kv_bytes_avoided + site.score_bytes_avoided for site in sites)
    report.summary = {"fused": fused, "refused": len(sites) - fused, "graphs": 2, "bytes_avoided": avoided}
    return report


@pytest.fixture
def site():
    """Make a fused site; takes its module and fields."""
    return make_site


@pytest.fixture
def refused():
    """Make a refused site; takes its module and reason."""
    return make_refused


@pytest.fixture
def report_of():
    """Make a report of sites, gaps ``(kind, place, count)`` and a note."""
    return make_report
