"""Two attentions on different keys as one, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnpatch.attention_call import new_output


def merge(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """:func:`attnpatch.merging.merge` of such arguments, which are checked already."""
    largest = torch.maximum(lse, other_lse)
    is_seen = largest > -torch.inf
    largest = torch.where(is_seen, largest if sinks is None else largest.maximum(sinks[:, None].float()), 0.0)
    first, second = (lse - largest).exp(), (other_lse - largest).exp()
    total = first + second
    if sinks is not None:
        total = total + (sinks[:, None].float() - largest).exp()
    merged = (o * first[..., None] + other * second[..., None]) / torch.where(is_seen, total, 1.0)[..., None]
    return new_output(o, o).copy_(merged), torch.where(is_seen, largest + total.log(), -torch.inf)
