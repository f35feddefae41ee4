"""The operator that makes one attention of two on different keys, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnpatch.attention_call import new_output

SCHEMA = "merge(Tensor o, Tensor lse, Tensor other, Tensor other_lse, Tensor? sinks=None) -> (Tensor, Tensor)"


def merge(
    o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention on all keys, of the outputs of two attentions that share none of them.

    Args:
        o: float16, bfloat16 or float32 ``[batch, num_heads, seqlen_q, head_dim_v]``, any strides.
        lse: float32 ``[batch, num_heads, seqlen_q]``, contiguous; -inf where a row sees no key.
        other: like ``o``.
        other_lse: like ``lse``.
        sinks: float ``[num_heads]``, which neither has counted, or None.

    Returns:
        The output, in the dtype of ``o`` and the layout of every attention's, and its lse. Of a row that sees no key,
        zeros and -inf. Gradients do not pass.

    Raises:
        ValueError: shapes, dtypes or devices differ; the message names them.
    """
    return torch.ops.attnpatch.merge(o, lse, other, other_lse, sinks)


def run(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The operator: by Triton on a GPU, else in plain torch."""
    from attnpatch.kernels.common.support import has_triton

    check(o, lse, other, other_lse, sinks)
    if not (o.is_cuda and has_triton()):
        from attnpatch.kernels.merge import reference

        return reference.merge(o, lse, other, other_lse, sinks)
    from attnpatch.kernels.merge import launch

    return launch.merge(o, lse, other, other_lse, sinks)


def fake(
    o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The operator on tensors without data."""
    check(o, lse, other, other_lse, sinks)
    return new_output(o, o), torch.empty_like(lse)


def check(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, sinks: Tensor | None) -> None:
    """Raise what :func:`merge` raises."""
    if o.dim() != 4 or lse.shape != o.shape[:3] or lse.dtype != torch.float32:
        raise ValueError(
            "merge takes o [batch, num_heads, seqlen_q, head_dim_v] and its lse, float32 [batch, num_heads, seqlen_q]; "
            f"got {tuple(o.shape)} and {lse.dtype} {tuple(lse.shape)}"
        )
    for name, x, like in (("other", other, o), ("other_lse", other_lse, lse)):
        if (x.shape, x.dtype, x.device) != (like.shape, like.dtype, like.device):
            raise ValueError(
                f"{name} of merge must be {like.dtype} {tuple(like.shape)} on {like.device}; "
                f"got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
    if sinks is not None and (sinks.shape != o.shape[1:2] or sinks.device != o.device):
        raise ValueError(f"sinks of merge must be [num_heads={o.shape[1]}] on {o.device}; got {tuple(sinks.shape)}")
