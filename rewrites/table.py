"""The rules. A new rule is one line here."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph

from attnpatch.rewrites import eager_attention, packed_call, sdpa_call
from attnpatch.rewrites.rms_norm import fuse_norms
from attnpatch.rewrites.rotary import fuse_rotary
from attnpatch.rule import Rule

RULES: tuple[Rule, ...] = (eager_attention.RULE, sdpa_call.RULE, packed_call.RULE)
"""Of attention, in the order they are tried."""

OF_THE_REST: tuple[Callable[[Graph], int], ...] = (fuse_norms, fuse_rotary)
"""Of what runs beside it operator by operator on a GPU; each says how often it applied."""
