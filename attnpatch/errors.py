"""The errors attnpatch raises."""

from __future__ import annotations

from collections.abc import Sequence


class AttentionNotPatched(RuntimeError):
    """Raised under ``strict`` when any attention runs unfused.

    Attributes:
        reasons: one sentence per site or gap, each starting with the place it speaks of.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = list(reasons)
        super().__init__("attention stays unfused (strict=True):\n" + "\n".join(f"  - {r}" for r in self.reasons))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return type(self), (self.reasons,)


class NoBackend(RuntimeError):
    """Raised when every backend that may run an attention call refuses it; lists each refusal."""


class Refused(Exception):
    """Raised inside a rewrite rule: the site must be left alone, and this sentence says why."""
