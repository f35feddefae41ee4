"""What a mask's words say: a sentence for each, and which blocks of a prefill they leave to compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnpatch.mask_words import AND, COMMA, OR, split

Positions = NDArray[np.int64]

BLOCKS, SMALLEST = 16, 64
"""Blocks of a picture's side, and the least side of a block in tokens."""

FAR = 2**40
"""A distance beyond every key."""

UNKNOWN = "as the graph has it"
"""What is said of a word that is not in the list below."""

FULL, PARTIAL, EMPTY = "full", "partial", "empty"


class Run(NamedTuple):
    """Keys ``first <= j < stop`` that each row sees, by one term or another."""

    first: Positions
    stop: Positions


class Term(NamedTuple):
    """One word of a mask, or several in brackets.

    Args:
        word: as reports have it.
        says: what it means.
        runs: the runs of keys that rows at given positions see, which may overlap; None when the word does not tell.
        hides: whether it hides keys at all.
        reach: distance in tokens at which its edge shows; 0 when anywhere.
        unknown: words in it, or itself, that hide more keys than ``runs`` does.
    """

    word: str
    says: str
    runs: Callable[[Positions], list[Run]] | None = None
    hides: bool = True
    reach: int = 0
    unknown: tuple[str, ...] = ()


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
    return [_term(word) for word in split(said, COMMA)]


def picture(mask: str) -> Picture | str:
    """The blocks that ``mask`` leaves to compute, or a sentence that says why there is none."""
    found = [term for term in terms(mask) if term.hides]
    known = [term for term in found if term.runs is not None]
    if found and not known:
        return f"No picture: only the device knows which keys {_listed([term.word for term in found])} leaves."
    whole = _all(mask, known)
    block = _block(whole.reach)
    rows = [_kinds(whole, block, i) for i in range(BLOCKS)]
    return Picture(block, rows, [word for term in found for word in term.unknown])


def _block(reach: int) -> int:
    """Tokens of a block, so that an edge at a distance of ``reach`` lies in the picture's nearer half."""
    block = SMALLEST
    while BLOCKS * block < 2 * reach:
        block *= 2
    return block


def _kinds(whole: Term, block: int, index: int) -> list[str]:
    rows = np.arange(index * block, (index + 1) * block)
    assert whole.runs is not None
    seen = _per_block(whole.runs(rows), block).tolist()
    return [EMPTY if n == 0 else FULL if n == block * block else PARTIAL for n in seen]


def _both(a: Run, b: Run) -> Run:
    return Run(np.maximum(a.first, b.first), np.minimum(a.stop, b.stop))


def _per_block(runs: Sequence[Run], block: int) -> Positions:
    """Pairs of a row and a key that it sees by any of ``runs``, in each block of keys."""
    if not runs:
        return np.zeros(BLOCKS, np.int64)
    run, *others = runs
    starts = np.arange(BLOCKS) * block
    first = np.maximum(run.first[:, None], starts)
    stop = np.minimum(run.stop[:, None], starts + block)
    pairs = np.asarray(np.maximum(stop - first, 0).sum(axis=0))
    return pairs + _per_block(others, block) - _per_block([_both(run, other) for other in others], block)


def _term(word: str) -> Term:
    for separator, join in ((OR, _any), (AND, _all)):
        parts = split(word, separator)
        if len(parts) > 1:
            return join(word, [_term(part) for part in parts])
    if word[0] == "(" and word[-1] == ")":
        inner = _term(word[1:-1])
        whole = inner.unknown == (inner.word,)
        return inner._replace(word=word, says=f"({inner.says})", unknown=(word,) if whole else inner.unknown)
    for pattern, make in _WORDS:
        match = re.fullmatch(pattern, word)
        if match:
            return make(word, *match.groups())
    return _hidden(UNKNOWN)(word)


def _any(word: str, parts: Sequence[Term]) -> Term:
    """A row sees what one of ``parts`` or another lets it see; one that is unknown may let it see anything."""
    says, reach = "; or ".join(part.says for part in parts), max(part.reach for part in parts)
    known = [part.runs for part in parts if part.runs is not None]
    if len(known) < len(parts):
        return Term(word, says, unknown=(word,))
    unknown = tuple(name for part in parts for name in part.unknown)
    return Term(word, says, lambda q: [run for runs in known for run in runs(q)], True, reach, unknown)


def _all(word: str, parts: Sequence[Term]) -> Term:
    """A row sees what all of ``parts`` let it see; those that are unknown may hide more than the others do."""
    says, reach = "; and ".join(part.says for part in parts), max((part.reach for part in parts), default=0)
    known = [part.runs for part in parts if part.runs is not None]
    if parts and not known:
        return Term(word, says, unknown=(word,))
    unknown = tuple(name for part in parts for name in part.unknown)
    return Term(word, says, lambda q: _intersections([runs(q) for runs in known], q), True, reach, unknown)


def _intersections(alternatives: Sequence[list[Run]], rows: Positions) -> list[Run]:
    """What is in one run of each of ``alternatives``, for every such choice."""
    found = [Run(0 * rows, 0 * rows + FAR)]
    for runs in alternatives:
        found = [_both(a, b) for a in found for b in runs]
    return found


def _causal(word: str) -> Term:
    return Term(word, "a row sees itself and what is before it", lambda q: [Run(0 * q, q + 1)])


def _window(word: str, width: str) -> Term:
    says = f"of that, the last {int(width):,} keys, its own among them"
    return Term(word, says, lambda q: [Run(q - int(width) + 1, q + FAR)], reach=int(width))


def _two_sided(word: str, left: str, right: str) -> Term:
    a, b = (FAR if side == "all" else int(side) for side in (left, right))
    says = f"a row sees {left} keys on the left of its own and {right} on the right"
    reach = max(0 if side == "all" else int(side) + 1 for side in (left, right))
    return Term(word, says, lambda q: [Run(q - a, q + b + 1)], reach=reach)


def _chunk(word: str, size: str) -> Term:
    c = int(size)
    return Term(word, f"a row sees its own chunk of {c:,} keys", lambda q: [Run(q // c * c, q // c * c + c)], reach=c)


def _prefix(word: str, length: str) -> Term:
    n = int(length)
    return Term(word, f"the first {n:,} keys, whatever the row", lambda q: [Run(0 * q, 0 * q + n)], reach=n)


def _from(word: str, first: str) -> Term:
    n = int(first)
    return Term(word, f"keys from number {n:,} on, counted from 0", lambda q: [Run(0 * q + n, q + FAR)], reach=n)


def _hidden(says: str) -> Callable[..., Term]:
    return lambda word, *_: Term(word, says, unknown=(word,))


def _harmless(says: str) -> Callable[..., Term]:
    return lambda word, *_: Term(word, says, hides=False)


_WORDS: tuple[tuple[str, Callable[..., Term]], ...] = (
    (r"none", _harmless("every row sees every key")),
    (r"causal", _causal),
    (r"window (\d+)", _window),
    (r"window (\d+|all) left, (\d+|all) right", _two_sided),
    (r"chunk (\d+)", _chunk),
    (r"prefix (-?\d+)", _prefix),
    (r"prefix(?: per (?:sequence|head))?", _hidden("keys up to a number that every row of a head shares")),
    (r"bounded", _hidden("keys up to a number that depends on the row")),
    (r"from (-?\d+)", _from),
    (r"from(?: per (?:sequence|head))?", _hidden("keys from a number on that every row of a head shares")),
    (r"bounded left", _hidden("keys from a number on that depends on the row")),
    (r"(.+) in some rows", _hidden("so in rows that fulfil a condition; the others see nothing by it")),
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
