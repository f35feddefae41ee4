"""The page as a real browser shows it: ``make test-browser`` (marker ``browser``)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnpatch.reporting import DispatchReport, PhaseTime

pytestmark = pytest.mark.browser

BROWSER, MISSING = Path(__file__).with_name("browser.py"), 3

LIBRARIES = (
    "libasound2 libdbus-1-3 libegl1 libfontconfig1 libgbm1 libgl1 libglib2.0-0 libnss3 libxcb-dri3-0 libxcomposite1 "
    "libxdamage1 libxkbcommon0 libxkbfile1 libxrandr2 libxrender1 libxtst6"
)

LOOK = """JSON.stringify({
    title: document.title,
    headings: [...document.querySelectorAll("h2")].map(x => x.innerText),
    rows: [...document.querySelectorAll("[data-status]")].map(x => ({
        status: x.dataset.status,
        top: x.getBoundingClientRect().top,
        height: x.getBoundingClientRect().height,
        text: x.innerText,
    })),
    cells: [...document.querySelectorAll("tbody tr")].map(x => x.innerText.split("\\t")),
    width: [document.documentElement.scrollWidth, innerWidth],
})"""

OPEN = """
    document.querySelectorAll("summary").forEach(x => x.click());
    const look = path => [path.className.baseVal, getComputedStyle(path).fill];
    JSON.stringify([...document.querySelectorAll("svg")].map(x => ({
        width: x.getBoundingClientRect().width,
        colours: Object.fromEntries([...x.querySelectorAll("path")].map(look)),
    })))
"""


def opened(path, script):
    """What browser.py says of a file; ``result`` is read from JSON."""
    done = subprocess.run([sys.executable, BROWSER, path, script], capture_output=True, text=True, timeout=120)
    if done.returncode == MISSING:
        pytest.skip(
            f"no browser: {done.stderr.strip().splitlines()[-1]}. It needs pip install 'attnpatch[browser]' and, on "
            f"Debian and Ubuntu, apt-get install {LIBRARIES}"
        )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer | {"result": json.loads(answer["result"])}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("page") / "report.html"


@pytest.fixture
def report(site, refused, report_of):
    """A refused site among fused ones, one of them timed, and a gap."""
    timed = DispatchReport("prefill", "triton.prefill", 2, False, "first choice", "causal, window 512", 1, 0.25)
    sites = site("layers.0"), refused("layers.1"), site("layers.2", dispatches=[timed]), site("layers.3")
    report = report_of(*sites, gaps=[("graph break", "Tiny: why", 3)])
    report.times = [PhaseTime("prefill", 1, 1.0)]
    return report


def test_the_page_in_a_browser(report, path):
    """Every row is there, what is refused above what is fused, and nothing is fetched or complained about."""
    report.to_html(path)
    found = opened(path, LOOK)
    page = found["result"]
    assert found["loaded"]
    assert found["console"] == []
    assert found["requests"] == [path.as_uri()]
    assert page["title"] == "attnpatch report"
    wanted = ["Refused, and what ran past the patch", "By phase", "Time per phase", "Sites by layer"]
    assert page["headings"] == wanted
    rows = sorted(page["rows"], key=lambda row: row["top"])
    assert [row["status"] for row in rows] == ["refused", "gap", "fused", "fused"]
    assert all(row["height"] > 20 for row in rows)
    assert rows[1]["top"] < 900, "the first screen shows what is wrong"
    names = ("layers.1", "graph break", "layers.0,3 (2 sites)", "layers.2")
    assert all(name in row["text"] for name, row in zip(names, rows, strict=True))
    assert "What to change: call model.eval()" in rows[0]["text"]
    assert ["prefill", "triton.prefill", "3", "4"] in page["cells"]
    assert ["prefill", "attention on triton.prefill", "250 ms", "25%"] in page["cells"]
    width, screen = page["width"]
    assert width <= screen, "the page scrolls sideways"


def test_rows_open_and_show_the_picture_of_the_mask(report, path):
    report.to_html(path)
    found = opened(path, OPEN)
    assert found["console"] == []
    pictures = found["result"]
    assert [picture["width"] > 100 for picture in pictures] == [True, True]
    for picture in pictures:
        assert set(picture["colours"]) == {"full", "partial", "empty"}
        assert len(set(picture["colours"].values())) == 3, "full, partial and empty blocks look alike"


def test_the_browser_tells_of_errors_and_requests(path):
    """What the tests above rely on when they find none."""
    path.write_text("<!DOCTYPE html><img src='missing.png'><script>noSuchFunction()</script><title>a</title>")
    found = opened(path, "JSON.stringify(document.title)")
    assert found["result"] == "a"
    assert any("noSuchFunction is not defined" in line for line in found["console"])
    assert [address.rsplit("/", 1)[1] for address in found["requests"]] == ["report.html", "missing.png"]
