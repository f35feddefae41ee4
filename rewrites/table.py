"""The rules. A new rule is one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.fx import Graph

from attnpatch.rewrites import eager_attention, packed_call, sdpa_call
from attnpatch.rewrites.linear import fuse_linears
from attnpatch.rewrites.rms_norm import fuse_norms
from attnpatch.rewrites.rotary import fuse_rotary
from attnpatch.rule import Rule

RULES: tuple[Rule, ...] = (eager_attention.RULE, sdpa_call.RULE, packed_call.RULE)
"""Of attention, in the order they are tried."""

OF_THE_REST: Mapping[str, tuple[Callable[[Graph], int], ...]] = {
    "eager": (fuse_norms, fuse_rotary, fuse_linears),
    "inductor": (fuse_norms, fuse_linears),
}
"""Of what runs beside it on a GPU, in order, by who runs that; each says how often it applied."""
