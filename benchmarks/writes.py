"""Suite ``cache_write``: one token's K and V into caches, beside what a model writes with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from harness import DEVICE, PAST_L2, ROUNDS, Captured, interleave
from torch import Tensor

from attnpatch import ops

CASES = [f"B{batch} H8 S4096 D128{pages}" for batch in (1, 8, 32) for pages in ("", " page 16")]
"""H is key and value heads, S the capacity."""

STEPS = 64


class Write(NamedTuple):
    """Caches ``[batch, heads, capacity, head_dim]`` or pages with a table, one token per sequence, and its position."""

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor
    v: Tensor
    position: Tensor
    block_table: Tensor | None


def ours(x: Write) -> None:
    """One launch."""
    ops.cache_write(x.k_cache, x.v_cache, x.k, x.v, x.position, x.block_table)


def index_copy(x: Write) -> None:
    """What a static cache does."""
    for cache, token in ((x.k_cache, x.k), (x.v_cache, x.v)):
        cache.index_copy_(2, x.position[None], token)


def index_put(x: Write) -> None:
    """The same on pages."""
    assert x.block_table is not None
    page_size = x.k_cache.shape[2]
    pages = x.block_table[:, x.position[None] // page_size][:, 0]
    for cache, token in ((x.k_cache, x.k), (x.v_cache, x.v)):
        cache[pages, :, x.position % page_size] = token[:, :, 0]


def measure_write(name: str, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """Rows of a case. All must leave the very same caches.

    Raises:
        AssertionError: they do not.
    """
    steps, found = writes(name), implementations(name)
    check(steps[0], found)
    captured = {impl: Captured(run, steps) for impl, run in found.items()}
    moved = 2 * sum(x.numel() * x.element_size() for x in (steps[0].k, steps[0].v))
    for impl, by_clock in interleave(captured, rounds).items():
        for clock, ms in by_clock.items():
            row = {"suite": "cache_write", "case": name, "impl": impl, "ms": ms, "tbps": moved / ms / 1e9}
            yield {**row, "rel_err": 0.0, "clock": clock}


def run_write_once(name: str) -> None:
    """Compile, and check."""
    check(writes(name)[0], implementations(name))


def implementations(name: str) -> dict[str, Callable[[Write], None]]:
    """Ours first."""
    peer = {"torch.index_put_": index_put} if "page" in name else {"torch.index_copy_": index_copy}
    return {"attnpatch.cache_write": ours, **peer}


def check(x: Write, found: dict[str, Callable[[Write], None]]) -> None:
    """Assert that every implementation leaves the same caches, and not those of before."""
    after = []
    for run in found.values():
        copy = x._replace(k_cache=x.k_cache.clone(), v_cache=x.v_cache.clone())
        run(copy)
        after.append(copy)
    assert not torch.equal(after[0].k_cache, x.k_cache)
    for other in after[1:]:
        assert torch.equal(after[0].k_cache, other.k_cache)
        assert torch.equal(after[0].v_cache, other.v_cache)


def writes(name: str) -> list[Write]:
    """STEPS writes to other positions, of caches that are together larger than L2."""
    match = re.fullmatch(r"B(\d+) H(\d+) S(\d+) D(\d+)(?: page (\d+))?", name)
    assert match, name
    batch, heads, capacity, width = (int(group) for group in match.groups()[:4])
    page_size = int(match[5]) if match[5] else None
    count = min(STEPS, -(-PAST_L2 // (4 * batch * heads * capacity * width)))
    caches = [_caches(batch, heads, capacity, width, page_size) for _ in range(count)]
    positions = torch.randperm(capacity, generator=torch.Generator().manual_seed(0)).tolist()
    return [_write(caches[i % count], (batch, heads, 1, width), positions[i % capacity]) for i in range(STEPS)]


def _caches(batch: int, heads: int, capacity: int, width: int, page_size: int | None) -> tuple[Tensor, Tensor, Any]:
    """K, V and the block table, None without pages; every page is used."""
    shape, table = (batch, heads, capacity, width), None
    if page_size:
        shape = (batch * capacity // page_size, heads, page_size, width)
        table = torch.randperm(shape[0], device=DEVICE).view(batch, -1).to(torch.int32)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    return k, v, table


def _write(caches: tuple[Tensor, Tensor, Any], shape: tuple[int, ...], position: int) -> Write:
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    return Write(*caches[:2], k, v, torch.tensor(position, device=DEVICE), caches[2])
