"""The rules, in the order they are tried. A new rule is one line here."""

from __future__ import annotations

from attnpatch.rewrites import eager_attention, packed_call, sdpa_call
from attnpatch.rule import Rule

RULES: tuple[Rule, ...] = (eager_attention.RULE, sdpa_call.RULE, packed_call.RULE)
