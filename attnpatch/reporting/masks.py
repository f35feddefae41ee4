"""What a mask's words say: a sentence for each, and which blocks of a prefill they leave to compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

BLOCKS, SMALLEST = 16, 64
"""Blocks of a picture's side, and the least side of a block in tokens."""

UNKNOWN = "as the graph has it"
"""What is said of a word that is not in the list below."""

FULL, PARTIAL, EMPTY = "full", "partial", "empty"


class Run(NamedTuple):
    """Keys ``first <= j < stop`` that each row sees, by one term or another."""

    first: Positions
    stop: Positions


class Term(NamedTuple):
    """One word of a mask.

    Args:
        word: as reports have it.
        says: what it means.
        run: the keys that rows at given positions see; None when the word does not tell.
        hides: whether it hides keys at all.
        reach: distance in tokens at which its edge shows; 0 when anywhere.
    """

    word: str
    says: str
    run: Callable[[Positions], Run] | None = None
    hides: bool = True
    reach: int = 0


class Picture(NamedTuple):
    """Which blocks of a square prefill a mask leaves.

    Args:
        block: tokens of a block's side.
        kinds: BLOCKS rows of BLOCKS kinds, each FULL, PARTIAL or EMPTY.
        unknown: words of what hides more keys, at places that are known on the device alone.
    """

    block: int
    kinds: list[list[str]]
    unknown: list[str]

    def count(self, kind: str) -> int:
        """Blocks of that kind."""
        return sum(row.count(kind) for row in self.kinds)


def terms(mask: str) -> list[Term]:
    """The terms of one mask in words, such as ``causal, window 4096, padding``."""
    said = re.split(r"(?:^|, )(?:K and V|K|V) unpacked: ", mask)[0]  # its reasons have commas of their own
    words = re.split(r", (?![^\[]*\]|(?:\d+|all) right)", said)
    return [_term(word) for word in words if word]


def picture(mask: str) -> Picture | str:
    """The blocks that ``mask`` leaves to compute, or a sentence that says why there is none."""
    found = [term for term in terms(mask) if term.hides]
    unknown = [term.word for term in found if term.run is None]
    if len(unknown) == len(found) and unknown:
        return f"No picture: only the device knows which keys {_listed(unknown)} leaves."
    choices = [term for term in found if " or " in term.word]
    shaped = [term for term in found if not re.match("padding|streamed", term.word)]
    if choices and len(shaped) > 1:
        return "No picture: its words do not say how the terms around 'or' are nested."
    known = [term for term in found if term.run is not None]
    block = _block(max((term.reach for term in known), default=0))
    rows = [_kinds(known, block, i) for i in range(BLOCKS)]
    return Picture(block, rows, unknown)


def _block(reach: int) -> int:
    """Tokens of a block, so that an edge at a distance of ``reach`` lies in the picture's nearer half."""
    block = SMALLEST
    while BLOCKS * block < 2 * reach:
        block *= 2
    return block


def _kinds(known: Sequence[Term], block: int, index: int) -> list[str]:
    rows = np.arange(index * block, (index + 1) * block)
    everything = Run(np.zeros_like(rows), np.full_like(rows, BLOCKS * block))
    alternatives = known[0].word.split(" or ") if len(known) == 1 else []
    if len(alternatives) == 2:
        a, b = (_run(_term(word), rows) for word in alternatives)
        seen = _per_block(a, block) + _per_block(b, block) - _per_block(_both(a, b), block)
    else:
        run = everything
        for term in known:
            run = _both(run, _run(term, rows))
        seen = _per_block(run, block)
    return [EMPTY if n == 0 else FULL if n == block * block else PARTIAL for n in seen.tolist()]


def _run(term: Term, rows: Positions) -> Run:
    assert term.run is not None
    return term.run(rows)


def _both(a: Run, b: Run) -> Run:
    return Run(np.maximum(a.first, b.first), np.minimum(a.stop, b.stop))


def _per_block(run: Run, block: int) -> Positions:
    """Pairs of a row and a key that it sees, in each block of keys."""
    starts = np.arange(BLOCKS) * block
    first = np.maximum(run.first[:, None], starts)
    stop = np.minimum(run.stop[:, None], starts + block)
    return np.asarray(np.maximum(stop - first, 0).sum(axis=0))


def _term(word: str) -> Term:
    if " or " in word:
        parts = [_term(part) for part in word.split(" or ")]
        drawn = len(parts) == 2 and all(part.run is not None for part in parts)
        says = "; or ".join(part.says for part in parts)
        return Term(word, says, parts[0].run if drawn else None, True, max(part.reach for part in parts))
    for pattern, make in _WORDS:
        match = re.fullmatch(pattern, word)
        if match:
            return make(word, *match.groups())
    return Term(word, UNKNOWN)


def _causal(word: str) -> Term:
    return Term(word, "a row sees itself and what is before it", lambda q: Run(0 * q, q + 1))


def _window(word: str, width: str) -> Term:
    says = f"of that, the last {int(width):,} keys, its own among them"
    return Term(word, says, lambda q: Run(q - int(width) + 1, q + 2**40), reach=int(width))


def _two_sided(word: str, left: str, right: str) -> Term:
    a, b = (2**40 if side == "all" else int(side) for side in (left, right))
    says = f"a row sees {left} keys on the left of its own and {right} on the right"
    reach = max(0 if side == "all" else int(side) + 1 for side in (left, right))
    return Term(word, says, lambda q: Run(q - a, q + b + 1), reach=reach)


def _chunk(word: str, size: str) -> Term:
    c = int(size)
    return Term(word, f"a row sees its own chunk of {c:,} keys", lambda q: Run(q // c * c, q // c * c + c), reach=c)


def _hidden(says: str) -> Callable[..., Term]:
    return lambda word, *_: Term(word, says)


def _harmless(says: str) -> Callable[..., Term]:
    return lambda word, *_: Term(word, says, hides=False)


_WORDS: tuple[tuple[str, Callable[..., Term]], ...] = (
    (r"none", _harmless("every row sees every key")),
    (r"causal", _causal),
    (r"window (\d+)", _window),
    (r"window (\d+|all) left, (\d+|all) right", _two_sided),
    (r"chunk (\d+)", _chunk),
    (r"prefix", _hidden("keys up to a number that every row shares")),
    (r"bounded", _hidden("keys up to a number that rises with the row")),
    (r"documents", _hidden("a row sees its own document of several packed into one")),
    (r"blocks", _hidden("a row sees its own block, such as an image, both ways")),
    (r"padding", _hidden("keys that stand for no token are hidden")),
    (r"streamed mask \[.*\]", _hidden("read as the model made it, after a scan that skips what nobody sees")),
    (r"streamed bias \[.*\]", _hidden("added to the scores as the model made it, after a scan that skips hidden keys")),
    (r"ALiBi", _harmless("a penalty that grows with the distance, computed in the kernel")),
    (r"pages", _harmless("K and V are read where they lie, by pages")),
    (r"(TBQ4|\w*8\w*) [KV]", _harmless("read as stored, with its scales")),
)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
