"""What ran where and why: the data behind ``attnpatch.report``, as a table, a page and a file; docs/report.md."""

from attnpatch.dispatch import timed
from attnpatch.reporting.difference import Change, Difference
from attnpatch.reporting.records import Collector, GraphRecord
from attnpatch.reporting.sites import DispatchReport, Gap, PhaseTime, SiteReport
from attnpatch.reporting.whole import SCHEMA, Report

__all__ = [
    "SCHEMA",
    "Change",
    "Collector",
    "Difference",
    "DispatchReport",
    "Gap",
    "GraphRecord",
    "PhaseTime",
    "Report",
    "SiteReport",
    "timed",
]
