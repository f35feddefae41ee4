"""Host side of the mask scan."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnpatch.kernels.common.launcher import Launch
from attnpatch.kernels.common.support import planned
from attnpatch.kernels.key_bounds.kernel import _key_bounds_kernel
from attnpatch.masking import without_repeats


class Scan(NamedTuple):
    """What the kernel reads: a mask without the rows that repeat."""

    mask: Tensor


class ScanConfig(NamedTuple):
    """Launch configuration: rows and keys per tile, warps, pipeline stages."""

    BLOCK_R: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


MANY_ROWS = ScanConfig(4, 512, 4, 3)
"""A prefill's mask: a warp per row. H200, bool [4, 1, 4096, 4096]: 46 us, and 45 to 124 with ten other tiles."""

FEW_ROWS = ScanConfig(1, 8192, 16, 3)
"""A decode step's mask: a program reads a row alone. H200, bool [8, 1, 1, 32768] past L2: 7 us, others 28 to 49."""

FEW = 512


def key_bounds(mask: Tensor, config: ScanConfig | None = None) -> Tensor:
    """:func:`attnpatch.masking.key_bounds` of a mask of any strides, in one pass over it.

    Args:
        mask: bool (True = attend) or additive float, ``[b, h, q, k]``.
        config: tile shapes; default by the number of rows.

    Returns:
        int32 ``[b, h, q, 3]``.
    """
    scan = Scan(without_repeats(mask))
    bounds = torch.empty((*scan.mask.shape[:3], 3), dtype=torch.int32, device=mask.device)
    if bounds.numel() > 0:
        planned(_launch, scan, config)(scan, bounds)
    return bounds.expand(*mask.shape[:3], 3).contiguous()


def _launch(scan: Scan, config: ScanConfig | None) -> Launch:
    rows = scan.mask
    num_rows = rows.shape[0] * rows.shape[1] * rows.shape[2]
    config = config or (FEW_ROWS if num_rows < FEW else MANY_ROWS)
    return Launch(
        _key_bounds_kernel,
        -(-num_rows // config.BLOCK_R),
        scan,
        ("mask",),
        ("bounds",),
        strides=rows.stride(),
        num_heads=rows.shape[1],
        seqlen_q=rows.shape[2],
        num_rows=num_rows,
        seqlen_k=rows.shape[3],
        **config._asdict(),
    )
