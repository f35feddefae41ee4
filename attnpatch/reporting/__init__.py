"""What ran where and why: the data behind ``attnpatch.report``, as a table, a page and a file; docs/report.md."""

from attnpatch.reporting.difference import Change, Difference
from attnpatch.reporting.records import Collector, GraphRecord
from attnpatch.reporting.sites import DispatchReport, Gap, SiteReport
from attnpatch.reporting.whole import SCHEMA, Report

__all__ = [
    "SCHEMA",
    "Change",
    "Collector",
    "Difference",
    "DispatchReport",
    "Gap",
    "GraphRecord",
    "Report",
    "SiteReport",
]
