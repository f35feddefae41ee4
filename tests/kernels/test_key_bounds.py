"""The scan of a mask in the interpreter, against the same in plain torch."""

import math

import pytest
import torch

from attnpatch import masking
from attnpatch.kernels.key_bounds.launch import FEW_ROWS, MANY_ROWS, ScanConfig, key_bounds

pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, not a kernel's

B, H, Q, K = 2, 3, 7, 150
SMALL = ScanConfig(4, 64, 4, 1)


def bool_mask(*shape, keep=0.7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < keep


def additive(hidden, constant, dtype=torch.float32):
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, constant)


CAUSAL = bool_mask(1, 1, Q, K, keep=1).tril(100)
SOME_ROWS = CAUSAL & (torch.arange(Q)[:, None] % 2 == 0)

MASKS = {
    "causal": CAUSAL,
    "all": bool_mask(1, 1, Q, K, keep=1),
    "nothing": bool_mask(B, 1, Q, K, keep=0),
    "some rows see nothing": SOME_ROWS,
    "holes": bool_mask(B, H, Q, K),
    "few": bool_mask(B, H, Q, K, keep=0.02),
    "one row, one key": bool_mask(B, 1, 1, 1, keep=0.5),
    "-inf": additive(~SOME_ROWS, -math.inf),
    "float16 minimum": additive(~CAUSAL, -65504.0, torch.float16),
    "bfloat16 minimum": additive(~CAUSAL, torch.finfo(torch.bfloat16).min, torch.bfloat16),
    "float64": additive(~CAUSAL, -1e300, torch.float64),
    "a bias is not plain": additive(torch.arange(K).eq(77).expand(1, H, Q, K), -100.0),
    "expanded": CAUSAL.expand(B, H, Q, K),
    "expanded keys": bool_mask(B, 1, Q, 1, keep=0.5).expand(B, 1, Q, K),
    "transposed": bool_mask(B, 1, K, Q).transpose(2, 3),
    "every second": bool_mask(B, 1, Q, 2 * K)[..., ::2],
    "heads outside": bool_mask(H, B, Q, K).transpose(0, 1),
    "no keys": bool_mask(B, 1, Q, 0),
    "no rows": bool_mask(B, 1, 0, K),
    "no sequences": bool_mask(0, 1, Q, K),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(mask):
    found = key_bounds(mask, SMALL)
    assert torch.equal(found, masking.key_bounds(mask))
    assert (found.dtype, found.is_contiguous()) == (torch.int32, True)


@pytest.mark.parametrize("config", [FEW_ROWS, MANY_ROWS], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_shipped_tiles(config, dtype):
    mask = bool_mask(1, 1, 3, 9000)
    mask[:, :, 1] = False
    mask = mask if dtype == torch.bool else additive(~mask, -math.inf)
    assert torch.equal(key_bounds(mask, config), masking.key_bounds(mask))
