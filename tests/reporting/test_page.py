"""The page: well-formed, escaped, complete, and in need of nothing but itself."""

import re
from html.parser import HTMLParser

import pytest

from attnpatch.reporting import DispatchReport

VOID = {"meta", "br"}
EVIL = "<script>alert('x')</script>&\"'"


class Page(HTMLParser):
    """A strict reader: every tag closes in its order. Text lies under the tags around it."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute of {tag} comes twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag == "path", f"{tag} closes itself outside SVG"
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append((self.open[-1], data))

    def words(self, *tags):
        return " ".join(data for tag, data in self.text if not tags or tag in tags)

    def statuses(self):
        return [attrs["data-status"] for _, attrs in self.tags if "data-status" in attrs]


@pytest.fixture
def page_of(report_of, tmp_path):
    """The parsed page of a report of these sites, gaps and note."""

    def page(*sites, **kwargs):
        report_of(*sites, **kwargs).to_html(tmp_path / "report.html")
        return Page((tmp_path / "report.html").read_text(encoding="utf-8"))

    return page


def test_refused_sites_and_gaps_come_before_fused_sites(page_of, site, refused):
    page = page_of(site("layers.0"), refused("layers.1"), site("layers.2"), gaps=[("graph break", "Tiny: why", 3)])
    assert page.statuses() == ["refused", "gap", "fused"]
    words = page.words()
    assert "2 of 3 sites fused" in words
    assert "dropout with p=0.5 is active" in words
    assert "call model.eval()" in words
    assert "TORCH_LOGS=graph_breaks" in words
    assert "layers.0,2 (2 sites)" in words


def test_a_refusal_without_known_advice_says_so(page_of, refused):
    assert "Nothing is known to help" in page_of(refused("a", "a diagonal is taken")).words()


def test_nothing_refused_says_so(page_of, site):
    page = page_of(site())
    assert "Nothing was refused, and nothing ran past the patch." in page.words()
    assert page.statuses() == ["fused"]


def test_phases_backends_calls_and_reasons(page_of, site):
    cells = [data for tag, data in page_of(*[site(f"layers.{i}") for i in range(30)]).text if tag == "td"]
    assert cells == [
        *("prefill", "triton.prefill", "30", "30", "decode", "triton.decode", "30", "120"),
        *("prefill", "triton.prefill", "1", "causal", "triton.decode: 12 query rows"),
        *("decode", "triton.decode", "4", "none", "first choice"),
    ]


def test_bytes(page_of, site):
    words = page_of(site("layers.0"), site("layers.1")).words()
    assert "2.0 kB of K/V copies not moved" in words
    assert "4.0 kB of scores not moved" in words
    assert "Not moved in each of them: 1.0 kB of K/V copies, 2.0 kB of scores." in words


def test_a_replayed_call_says_so(page_of, site):
    captured = DispatchReport("decode", "triton.decode", 7, True, "first choice", "none")
    assert "7 replayed by a CUDA graph" in page_of(site(dispatches=[captured])).words()


def test_the_mask_of_whole_prompts_is_drawn(page_of, site):
    """The mask of the prefill, not that of the decode steps."""
    page = page_of(site())
    (svg,) = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert svg["aria-label"] == "Blocks of queries (down) and keys (right) that the mask causal leaves"
    assert "120 full, 16 partial, 120 empty" in page.words("figcaption")
    cells = {attrs["class"]: attrs["d"].count("M") for tag, attrs in page.tags if tag == "path"}
    assert cells == {"full": 120, "partial": 16, "empty": 120}


def test_no_picture_where_only_the_device_knows(page_of, site):
    dispatch = DispatchReport("prefill", "triton.prefill", 1, False, "", "streamed mask [1, 1, 8, 8]")
    page = page_of(site(dispatches=[dispatch]))
    assert "svg" not in dict(page.tags)
    assert "only the device knows which keys streamed mask [1, 1, 8, 8] leaves" in page.words("p")


def test_no_picture_of_decode_steps_and_of_another_length_of_keys(page_of, site):
    for phase in ("decode", "cross"):
        assert "svg" not in dict(page_of(site(dispatches=[DispatchReport(phase, "a", 1, False, "", "none")])).tags)


def test_everything_is_escaped(page_of, site, refused):
    evil = DispatchReport("prefill", EVIL, 1, False, EVIL, EVIL)
    sites = site(EVIL, rule=EVIL, mask=EVIL, dtype=EVIL, dispatches=[evil]), refused(EVIL + "b", EVIL)
    page = page_of(*sites, gaps=[(EVIL, EVIL, 1)], note=EVIL)
    assert [tag for tag, _ in page.tags].count("script") == 1  # the page's own
    assert page.words().count(EVIL) >= 12
    assert {name for _, attrs in page.tags for name in attrs if name.startswith("on")} == set()


def test_an_evil_mask_stays_in_its_attribute(page_of, site):
    mask = f'causal, "><b x="{EVIL}'
    page = page_of(site(dispatches=[DispatchReport("prefill", "a", 1, False, "", mask)]))
    (svg,) = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert mask in svg["aria-label"]


def test_nothing_is_fetched(page_of, site, refused, tmp_path):
    page_of(site(), refused(), gaps=[("graph break", "x", 1)])
    text = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?:|//\w|url\(|@import|\bsrc=|\bhref=|<link", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_nothing_to_report(page_of):
    page = page_of(note="patched, but not called yet")
    assert "patched, but not called yet" in page.words("p")
    assert page.statuses() == []
    assert "h2" not in dict(page.tags)


def test_not_run_yet(page_of, site):
    page = page_of(site(dispatches=[], mask="causal"))
    assert "not run yet" in page.words("span")
    assert "svg" in dict(page.tags)
