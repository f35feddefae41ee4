"""Masks in words: ``causal, (window 5 or blocks), padding``. Commas join what all must hold; groups have brackets."""

from __future__ import annotations

import re
from collections.abc import Sequence

AND, OR, COMMA = " and ", " or ", ", "


def conjunction(*words: str) -> str:
    """What all of ``words`` let a row see; an empty one hides nothing."""
    return AND.join(_bracketed(word, OR) for word in words if word)


def disjunction(*words: str) -> str:
    """What any of ``words`` lets a row see; an empty one hides nothing."""
    return OR.join(_bracketed(word, AND) for word in words) if all(words) else ""


def sentence(words: Sequence[str], storage: Sequence[str] = ()) -> str:
    """A whole mask.

    Args:
        words: what every key that is seen fulfils; none of them: ``none``.
        storage: how K and V lie, if in another way than as attention reads them.
    """
    alone = len(words) + len(storage) == 1
    return COMMA.join([*(word if alone else _bracketed(word, OR) for word in words or ["none"]), *storage])


def split(words: str, separator: str) -> list[str]:
    """The parts between those of ``separator`` that stand in no brackets; empty ones are left out.

    The comma of ``window 3 left, 5 right`` is none that separates.
    """
    pieces = [""]
    for piece in re.split(rf"({separator})(?!(?:\d+|all) right)", words):
        inside = sum(map(pieces[-1].count, "([")) > sum(map(pieces[-1].count, ")]"))
        if piece == separator and not inside:
            pieces.append("")
        else:
            pieces[-1] += piece
    return [piece for piece in pieces if piece]


def _bracketed(word: str, separator: str) -> str:
    return f"({word})" if len(split(word, separator)) > 1 else word
