"""The calls of ``scaled_dot_product_attention`` that are tried, and what one can change in a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

BATCH, HEADS, SEQLEN = 2, 8, 128


class Case(NamedTuple):
    """One call, of batch 2 and 8 query heads on 128 keys.

    Args:
        dtype: of q, k and v.
        head_dim: of q and k.
        head_dim_v: of v; 0 is ``head_dim``.
        seqlen_q: query rows.
        group_size: query heads per K/V head; above 1 with ``enable_gqa``.
        mask: a name of ``MASKS``, ``"is_causal"`` or empty.
        layout: a name of ``LAYOUTS`` or empty, which is contiguous ``[batch, heads, rows, head_dim]``.
        grad: q, k and v require a gradient.
        dropout: ``dropout_p``.
    """

    dtype: str = "bfloat16"
    head_dim: int = 64
    head_dim_v: int = 0
    seqlen_q: int = SEQLEN
    group_size: int = 1
    mask: str = ""
    layout: str = ""
    grad: bool = False
    dropout: float = 0.0

    def describe(self) -> str:
        """All but dtype and head_dim, in words."""
        words = [self.mask or "no mask", self.layout]
        words += [f"head_dim_v {self.head_dim_v}"] if self.head_dim_v else []
        words += [f"{self.seqlen_q} query row"] if self.seqlen_q != SEQLEN else []
        words += [f"GQA {HEADS}/{HEADS // self.group_size}"] if self.group_size > 1 else []
        words += ["requires_grad"] if self.grad else []
        words += [f"dropout_p {self.dropout}"] if self.dropout else []
        return ", ".join(filter(None, words))


def _additive(case: Case, *lead: int, columns: int = SEQLEN, **options: Any) -> Tensor:
    return torch.zeros(*lead, case.seqlen_q, columns, **{"dtype": getattr(torch, case.dtype), **options})


# Whose content changes nothing in what torch takes: zeros add nothing, ones hide nothing.
MASKS: dict[str, Callable[[Case, str], Tensor]] = {
    "bool mask": lambda case, on: _additive(case, 1, 1, dtype=torch.bool, device=on).logical_not(),
    "additive mask": lambda case, on: _additive(case, 1, 1, device=on),
    "float32 mask": lambda case, on: _additive(case, 1, 1, dtype=torch.float32, device=on),
    "mask requires grad": lambda case, on: _additive(case, 1, 1, device=on, requires_grad=True),
    "mask expanded": lambda case, on: _additive(case, 1, 1, device=on).expand(BATCH, HEADS, -1, -1),
    "mask rows unaligned": lambda case, on: _additive(case, 1, 1, columns=SEQLEN + 1, device=on)[..., :SEQLEN],
    "mask of 3 dims": lambda case, on: _additive(case, HEADS, device=on),
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "[b, n, h, d] transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last dim strided": lambda x: torch.stack((x, x), -1)[..., 0],
    "storage off by 1": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x),
    "3 dims, no batch": lambda x: x[0],
}


def build(case: Case, device: str) -> dict[str, Any]:
    """The arguments of ``scaled_dot_product_attention``, by the names of its signature."""
    sizes = (
        (HEADS, case.seqlen_q, case.head_dim),
        (HEADS // case.group_size, SEQLEN, case.head_dim),
        (HEADS // case.group_size, SEQLEN, case.head_dim_v or case.head_dim),
    )
    options: Any = {"dtype": getattr(torch, case.dtype), "device": device}
    q, k, v = (LAYOUTS[case.layout](torch.zeros(BATCH, *size, **options)).requires_grad_(case.grad) for size in sizes)
    return {
        "query": q,
        "key": k,
        "value": v,
        "attn_mask": MASKS[case.mask](case, device) if case.mask in MASKS else None,
        "dropout_p": case.dropout,
        "is_causal": case.mask == "is_causal",
        "enable_gqa": case.group_size > 1,
    }


def _cases() -> Iterator[Case]:
    for dtype in ("float32", "float16", "bfloat16"):
        yield from (Case(dtype, head_dim) for head_dim in (64, 65, 80, 96, 128, 256, 512))
    yield Case("float64")
    for dtype in ("float32", "bfloat16"):
        yield from (Case(dtype, mask=mask) for mask in ("is_causal", *MASKS) if (dtype, mask) != _SAME_TWICE)
        yield from (Case(dtype, group_size=4, mask=mask) for mask in ("", "is_causal", "bool mask"))
        yield from (Case(dtype, layout=layout) for layout in LAYOUTS if layout)
        yield Case(dtype, grad=True)
        yield Case(dtype, dropout=0.1)
        yield Case(dtype, 128, head_dim_v=64)
    yield from (Case(seqlen_q=1, mask=mask) for mask in ("", "is_causal", "bool mask"))
    yield from (Case(seqlen_q=1, mask=mask, group_size=4) for mask in ("", "bool mask"))
    yield from (Case(mask=mask, grad=True) for mask in ("bool mask", "additive mask"))
    yield Case(group_size=4, grad=True)
    yield Case("bfloat16", 192, head_dim_v=128)


_SAME_TWICE = ("float32", "float32 mask")  # is its additive mask
CASES = tuple(_cases())


class Remedy(NamedTuple):
    """A change of a call that may bring it to a fused kernel.

    Args:
        text: what to change.
        applies: whether there is that to change.
        change: the fields of the case after it.
    """

    text: str
    applies: Callable[[Case], bool]
    change: Callable[[Case], dict[str, Any]]


REMEDIES = (
    Remedy("dropout_p=0", lambda case: case.dropout > 0, lambda _: {"dropout": 0.0}),
    Remedy(
        "detach the mask, if nothing trains it",
        lambda case: case.mask == "mask requires grad",
        lambda _: {"mask": "additive mask"},
    ),
    Remedy(
        "mask.unsqueeze(0): 2 or 4 dims",
        lambda case: case.mask == "mask of 3 dims",
        lambda _: {"mask": "mask expanded"},
    ),
    Remedy(
        "is_causal=True instead of the mask, if it is causal",
        lambda case: case.mask in MASKS and case.seqlen_q == SEQLEN,
        lambda _: {"mask": "is_causal"},
    ),
    Remedy(
        "no is_causal for one query row that sees every key",
        lambda case: case.mask == "is_causal" and case.seqlen_q == 1,
        lambda _: {"mask": ""},
    ),
    Remedy(
        "contiguous(): the last dim of q, k and v needs stride 1",
        lambda case: case.layout == "last dim strided",
        lambda _: {"layout": ""},
    ),
    Remedy("unsqueeze(0): q, k and v of 4 dims", lambda case: "3 dims" in case.layout, lambda _: {"layout": ""}),
    Remedy("clone(): storage that begins aligned", lambda case: "storage" in case.layout, lambda _: {"layout": ""}),
    Remedy(
        "pad head_dim_v with zeros to head_dim and cut the output",
        lambda case: 0 < case.head_dim_v < case.head_dim,
        lambda _: {"head_dim_v": 0},
    ),
    Remedy(
        "pad head_dim with zeros to a multiple of 8, with the scale of the old one",
        lambda case: case.head_dim % 8 > 0,
        lambda case: {"head_dim": case.head_dim + -case.head_dim % 8},
    ),
    Remedy(
        "repeat_interleave K and V instead of enable_gqa, at the cost of the copies",
        lambda case: case.group_size > 1,
        lambda _: {"group_size": 1},
    ),
    Remedy(
        "cast to bfloat16, if its precision is enough",
        lambda case: case.dtype in ("float32", "float64"),
        lambda _: {"dtype": "bfloat16"},
    ),
)
