"""Masks in words: what each word means, and the blocks that they leave, against every pair of a row and a key."""

import re
from pathlib import Path

import numpy as np
import pytest

from attnpatch.reporting import masks

COVERAGE = Path(__file__).parents[2] / "docs" / "coverage.md"


def by_pairs(sees, block=64):
    """The kinds of blocks, counted pair by pair."""
    side = masks.BLOCKS * block
    q, k = np.arange(side)[:, None], np.arange(side)[None, :]
    seen = np.broadcast_to(sees(q, k), (side, side)).reshape(masks.BLOCKS, block, masks.BLOCKS, block).sum(axis=(1, 3))
    return [["empty" if n == 0 else "full" if n == block**2 else "partial" for n in row] for row in seen]


SQUARES = {
    "none": lambda q, k: k >= 0,
    "ALiBi": lambda q, k: k >= 0,
    "causal": lambda q, k: k <= q,
    "causal, window 512": lambda q, k: (k <= q) & (k > q - 512),
    "causal, window 5": lambda q, k: (k <= q) & (k > q - 5),
    "causal, window 1": lambda q, k: k == q,
    "window 100 left, 3 right": lambda q, k: (k <= q + 3) & (k >= q - 100),
    "window 128 left, all right": lambda q, k: k >= q - 128,
    "chunk 100": lambda q, k: k // 100 == q // 100,
    "causal, chunk 256": lambda q, k: (k <= q) & (k // 256 == q // 256),
    "causal or chunk 300": lambda q, k: (k <= q) | (k // 300 == q // 300),
    "prefix 300": lambda q, k: (k < 300) & (q >= 0),
    "causal, from 70": lambda q, k: (k <= q) & (k >= 70),
    "causal or prefix 500": lambda q, k: (k <= q) | (k < 500),
    "(causal or prefix 500), chunk 450": lambda q, k: ((k <= q) | (k < 500)) & (k // 450 == q // 450),
    "causal or (prefix 500 and chunk 450)": lambda q, k: (k <= q) | ((k < 500) & (k // 450 == q // 450)),
    "(causal and window 100) or chunk 300": lambda q, k: ((k <= q) & (k > q - 100)) | (k // 300 == q // 300),
    "(causal and (chunk 100 or chunk 130)) or prefix 70 or chunk 90": lambda q, k: (
        ((k <= q) & ((k // 100 == q // 100) | (k // 130 == q // 130))) | (k < 70) | (k // 90 == q // 90)
    ),
    "causal, int8 K, TBQ4 V, pages": lambda q, k: k <= q,
    "causal, float8_e4m3fn K": lambda q, k: k <= q,
    "causal, K and V unpacked: a, chunk 3 [b, c]": lambda q, k: k <= q,
    "causal, K unpacked: one, V unpacked: two": lambda q, k: k <= q,
}


@pytest.mark.parametrize("mask", SQUARES)
def test_pictures(mask):
    picture = masks.picture(mask)
    assert (picture.block, picture.unknown) == (64, [])
    assert picture.kinds == by_pairs(SQUARES[mask])
    assert sum(picture.count(kind) for kind in ("full", "partial", "empty")) == 256


@pytest.mark.parametrize(("mask", "block"), [("causal, window 513", 128), ("chunk 8192", 1024), ("causal", 64)])
def test_an_edge_lies_in_the_picture(mask, block):
    picture = masks.picture(mask)
    assert picture.block == block
    assert picture.count("empty") > 0


def test_a_wide_window_in_wide_blocks():
    assert masks.picture("causal, window 600").kinds == by_pairs(lambda q, k: (k <= q) & (k > q - 600), 128)


def test_what_the_device_alone_knows_is_named():
    picture = masks.picture("causal, documents, padding, streamed mask [2, 1, s0, s1]")
    assert picture.unknown == ["documents", "padding", "streamed mask [2, 1, s0, s1]"]
    assert picture.kinds == masks.picture("causal").kinds


def test_what_is_unknown_in_brackets_is_named_where_it_hides_and_the_whole_where_it_shows():
    """An unknown alternative may show any key: nothing is drawn of its group. An unknown condition hides some."""
    narrower = masks.picture("causal or (chunk 300 and padding)")
    assert narrower.unknown == ["padding"]
    assert narrower.kinds == masks.picture("causal or chunk 300").kinds
    wider = masks.picture("chunk 300, (causal or prefix per sequence)")
    assert wider.unknown == ["(causal or prefix per sequence)"]
    assert wider.kinds == masks.picture("chunk 300").kinds


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("padding", "only the device knows which keys padding leaves"),
        ("padding, streamed bias [1, 4, 12, 12]", "keys padding and streamed bias [1, 4, 12, 12] leaves"),
        ("prefix", "keys prefix leaves"),
        ("something new", "keys something new leaves"),
        ("causal or blocks", "keys causal or blocks leaves"),
        ("causal or (chunk 5 and odd) or blocks", "keys causal or (chunk 5 and odd) or blocks leaves"),
        ("(prefix and blocks), padding", "keys (prefix and blocks) and padding leaves"),
        ("chunk 5 in some rows", "keys chunk 5 in some rows leaves"),
    ],
)
def test_no_picture(mask, words):
    found = masks.picture(mask)
    assert isinstance(found, str)
    assert words in found


def test_every_word_says_what_it_means():
    mask = "causal, window 5, chunk 3, documents, blocks, padding, ALiBi, streamed bias [2, 1], pages, int8 K"
    found = [term.word for term in masks.terms(mask)]
    assert found == [*mask.split(", ")[:7], "streamed bias [2, 1]", "pages", "int8 K"]
    assert all(term.says != masks.UNKNOWN for term in masks.terms(mask))
    assert [term.word for term in masks.terms("window 3 left, 5 right, padding")] == [
        "window 3 left, 5 right",
        "padding",
    ]


def test_groups_say_what_they_mean_in_brackets():
    causal, group = masks.terms("causal, (chunk 5 or (prefix 3 and from 1)), pages")[:2]
    assert (causal.word, group.word) == ("causal", "(chunk 5 or (prefix 3 and from 1))")
    assert group.says == (
        "(a row sees its own chunk of 5 keys; or (the first 3 keys, whatever the row; and keys from number 1 on, "
        "counted from 0))"
    )


def test_the_words_of_every_measured_family_are_known():
    """docs/coverage.md has the masks of all families, with shapes left out."""
    rows = re.findall(r"^\| \w+ \| (?:eager|sdpa) \| [\d/]+ \| (.*?) \|", COVERAGE.read_text(), re.MULTILINE)
    said = {mask for row in rows for part in row.split("; ") for mask in part.split(": ")[-1].split(" / ") if mask}
    assert len(said) > 10
    for mask in said:
        words = [term.word for term in masks.terms(re.sub("streamed (mask|bias)", r"\g<0> [1]", mask))]
        assert [w for w in words if masks.terms(w)[0].says == masks.UNKNOWN] == [], mask
