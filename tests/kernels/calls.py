"""Masks, poison and forced splits for the tests of the flash-decode kernels."""

import math

import torch

from attnpatch.dispatch import load_backend
from attnpatch.kernels.decode.launch import decode
from attnpatch.testing.inputs import check_backend


def bool_mask(*shape, keep=0.7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < keep


def bias(*shape, dtype=torch.float32, hide=0.0, constant=-math.inf):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return values.to(dtype).masked_fill(~bool_mask(*shape, keep=1 - hide), constant)


def poison(call, dead):
    """NaN in the keys and values of every key that bool ``dead`` ``[batch, seqlen_k]`` marks."""
    dead = dead[:, None, :, None]
    return call._replace(k=call.k.masked_fill(dead, math.nan), v=call.v.masked_fill(dead, math.nan))


def check(call, num_splits=0, config=None):
    """Check ``call`` on the flash-decode backend that takes it; see ``decode`` for the rest."""
    one_query = call.seqlen_q == 1 and call.cu_seqlens_q is None
    name = "triton.paged" if call.block_table is not None else "triton.decode" if one_query else "triton.append"
    return check_backend(load_backend(name)._replace(run=lambda call: decode(call, num_splits, config)), call)
