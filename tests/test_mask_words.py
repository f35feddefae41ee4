"""Masks in words: brackets where "and" and "or" meet, none where they do not."""

import pytest

from attnpatch.mask_words import AND, COMMA, OR, conjunction, disjunction, sentence, split


def test_brackets_stand_where_connectives_meet():
    assert conjunction("a", "b", "c") == "a and b and c"
    assert disjunction("a", "b", "c") == "a or b or c"
    assert conjunction("a or b", "c") == "(a or b) and c"
    assert disjunction("a and b", "c") == "(a and b) or c"
    assert disjunction(conjunction("a", disjunction("b", "c")), "d") == "(a and (b or c)) or d"
    assert disjunction("(a and b) or c", "(d and e) or f") == "(a and b) or c or (d and e) or f"


def test_what_hides_nothing_narrows_nothing_and_widens_to_everything():
    assert conjunction("a", "", "b or c") == "a and (b or c)"
    assert (conjunction("", ""), disjunction("a", ""), disjunction("a and b", "")) == ("", "", "")


@pytest.mark.parametrize(
    ("words", "storage", "said"),
    [
        ([], [], "none"),
        ([], ["pages"], "none, pages"),
        (["a or b"], [], "a or b"),
        (["a or b", "c"], [], "(a or b), c"),
        (["a or b"], ["pages"], "(a or b), pages"),
        (["a"], ["K unpacked: this or that"], "a, K unpacked: this or that"),
    ],
)
def test_sentence(words, storage, said):
    assert sentence(words, storage) == said


@pytest.mark.parametrize(
    ("words", "separator", "parts"),
    [
        ("a, (b, c), d", COMMA, ["a", "(b, c)", "d"]),
        ("streamed mask [2, 1, s0], d", COMMA, ["streamed mask [2, 1, s0]", "d"]),
        ("streamed mask [2, Max(1, s0)], d", COMMA, ["streamed mask [2, Max(1, s0)]", "d"]),
        ("window 3 left, 5 right, d", COMMA, ["window 3 left, 5 right", "d"]),
        ("window all left, all right", COMMA, ["window all left, all right"]),
        ("a or (b or c) or d", OR, ["a", "(b or c)", "d"]),
        ("(a or b) and (c or d)", AND, ["(a or b)", "(c or d)"]),
        ("(a or b) and (c or d)", OR, ["(a or b) and (c or d)"]),
        ("bounded left, from 5", COMMA, ["bounded left", "from 5"]),
        ("", COMMA, []),
    ],
)
def test_split(words, separator, parts):
    assert split(words, separator) == parts
