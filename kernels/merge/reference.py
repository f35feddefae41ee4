"""Two attentions on different keys as one, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnpatch.attention_call import new_output


def merge(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """:func:`attnpatch.merging.merge` of such arguments, which are checked already."""
    total = torch.logaddexp(lse, other_lse)
    if sinks is not None:
        total = torch.where(total > -torch.inf, torch.logaddexp(total, sinks[:, None].float()), total)
    finite = total.clamp(min=torch.finfo(torch.float32).min)
    parts = (x * (y - finite).exp()[..., None] for x, y in ((o, lse), (other, other_lse)))
    return new_output(o, o).copy_(sum(parts)), total  # type: ignore[arg-type]
