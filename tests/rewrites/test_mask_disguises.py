"""Masks one step away from causal, windows, chunks, documents and ALiBi: never read as what they are not."""

import pytest
import torch

from attnpatch.testing.recording import check_rewrite

from .lookalikes import B, D, H, S, scaled
from .mask_disguises import MASKS


@pytest.mark.parametrize("mask", MASKS, ids=[f.__name__ for f in MASKS])
def test_same_function(mask):
    def attend(q, k, v):
        m, scores = mask(), scaled(q, k)
        return (scores.masked_fill(~m, -torch.inf) if m.dtype == torch.bool else scores + m).softmax(-1) @ v

    recording = check_rewrite(attend, *(torch.randn(B, H, S, D) for _ in range(3)))
    assert len(recording.masks) == len(recording.sites) == 1
