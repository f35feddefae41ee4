"""Tile shapes of the flash-decode kernels, and how keys are shared among programs."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.common.support import padded_width, width_of_groups
from attnpatch.kernels.decode.codes import BYTES
from attnpatch.kernels.decode.integers import INTEGER_WORDS, INTEGERS
from attnpatch.kernels.decode.unpack import forms_of, unpacks_alike

MAX_SPLITS = 264
"""Most splits of a tile; more would only make the merge longer."""

MERGED_AT_ONCE = 128
"""Splits that a program of the merge holds at a time; sequences of different lengths have no more."""

SHARES_PER_SM = 12
"""Shares to cut the work of sequences of different lengths into, per multiprocessor. H200, 32 sequences of 128 to
32768 keys, 8 KV heads of 128: 4.04 TB/s at 12, 3.98 at 6, 4.01 at 20; with tiles of 32 keys 3.96 (2026-11-30)."""

SPLIT_KEYS = 256
"""A split this long is worth its share of the merge."""

FEW_PER_SM = 4
"""Programs per multiprocessor, one for each of its schedulers, up to which shorter splits are worth theirs."""

INVARIANT_SPLIT_KEYS = 1024
"""Keys of a split under ``batch_invariant``, whatever the batch."""

ANY_SHARE = 1 << 30


class DecodeConfig(NamedTuple):
    """Launch configuration: rows and keys per tile, warps, pipeline stages, programs to start per multiprocessor.

    ``max_registers`` of a thread, None for as many as the compiler takes, make room for that many programs.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    max_registers: int | None = None


class Plan(NamedTuple):
    """How the keys are shared among programs; see :mod:`attnpatch.kernels.decode.plan`.

    Args:
        programs: how many to start.
        num_splits: most splits of a tile of rows: what partial results are allocated for.
        merges: whether partial results are merged; False only for a single split.
        parts: shares per KV head that the keys of sequences of different lengths are cut into.
        least_share: fewest keys of a share.
        most_share: most keys of a share.
        block_b: sequences that a program looks at to find its own, a power of two; 0 where all are alike.
    """

    programs: int
    num_splits: int
    merges: bool
    parts: int
    least_share: int
    most_share: int
    block_b: int


CROWDED = 3
"""KV heads of all sequences per multiprocessor from which on more and smaller programs are faster. H200, 64 sequences
of 1024 keys, 8 KV heads of 128: 65.1 us with 4 programs of 2 warps per multiprocessor, 66.3 with 2 of 4 warps; 32 of
4096 keys: 132.7 and 122.9 (2026-11-30)."""

LONG = 12288
"""Keys of all KV heads per multiprocessor from which on 16 programs of codes are faster than 12. H200, 8 KV heads of
128: 87 and 91 us at 15888 keys, 61 and 53 at 7944, 65 and 60 at 7944 of 32 sequences (2026-11-30)."""

MANY_ROWS_BYTES = 147456
"""Shared memory that the widest tile of many rows takes."""

MANY_ROWS = 64
"""Fewest rows that wgmma takes."""

INTERPRETED = DecodeConfig(16, 64, 4, 1)

CONFIGS = {
    "16 bit": {
        64: DecodeConfig(16, 128, 4, 3),
        128: DecodeConfig(16, 32, 4, 4),
        256: DecodeConfig(16, 32, 4, 3),
    },
    "16 bit, crowded": {
        64: DecodeConfig(16, 128, 4, 3),
        128: DecodeConfig(16, 32, 2, 3, 4),
        256: DecodeConfig(16, 32, 4, 3),
    },
    "16 bit, ragged": {
        64: DecodeConfig(16, 128, 4, 3),
        128: DecodeConfig(16, 64, 4, 3),
        256: DecodeConfig(16, 32, 4, 3),
    },
    "pages": {
        64: DecodeConfig(16, 64, 2, 3, 4),
        128: DecodeConfig(16, 32, 2, 3, 4),
        256: DecodeConfig(16, 32, 4, 3),
    },
    "pages, a program per head": {
        64: DecodeConfig(16, 128, 4, 3),
        128: DecodeConfig(16, 64, 4, 3),
        256: DecodeConfig(16, 32, 4, 3),
    },
    "8 bit": {
        64: DecodeConfig(16, 128, 2, 3, 4),
        128: DecodeConfig(16, 64, 2, 3, 4),
        256: DecodeConfig(16, 32, 2, 3, 4),
    },
    "4 bit": {
        64: DecodeConfig(16, 64, 1, 3, 8),
        128: DecodeConfig(16, 32, 1, 3, 8),
        256: DecodeConfig(16, 16, 1, 3, 8),
    },
    "4 bit, 64 rows": {
        64: DecodeConfig(64, 64, 4, 2, 2),
        128: DecodeConfig(64, 64, 4, 2, 2),
        256: DecodeConfig(64, 32, 8, 2, 1),
    },
    "codes, 4 rows": {
        64: DecodeConfig(4, 64, 1, 3, 16, 128),
        128: DecodeConfig(4, 64, 1, 3, 12, 168),
        256: DecodeConfig(4, 64, 1, 2, 16),
    },
    "codes, 4 rows, long": {
        64: DecodeConfig(4, 64, 1, 3, 16, 128),
        128: DecodeConfig(4, 64, 1, 3, 16, 128),
        256: DecodeConfig(4, 64, 1, 2, 16),
    },
    "codes, 8 rows": {
        64: DecodeConfig(8, 64, 1, 3, 16, 128),
        128: DecodeConfig(8, 64, 1, 3, 8),
        256: DecodeConfig(8, 64, 1, 2, 8),
    },
    "codes, 16 rows": {
        64: DecodeConfig(16, 64, 1, 3, 8),
        128: DecodeConfig(16, 128, 2, 3, 4),
        256: DecodeConfig(16, 32, 1, 3, 8),
    },
    "codes, 64 rows": {
        64: DecodeConfig(64, 64, 4, 2, 2),
        128: DecodeConfig(64, 64, 4, 2, 2),
        256: DecodeConfig(64, 32, 4, 2, 1),
    },
    "codes in bytes": {
        64: DecodeConfig(16, 32, 4, 2),
        128: DecodeConfig(16, 32, 4, 2),
        256: DecodeConfig(16, 16, 4, 2),
    },
    "64 rows": {
        64: DecodeConfig(64, 64, 4, 3, 1),
        128: DecodeConfig(64, 64, 4, 4, 1),
        256: DecodeConfig(64, 32, 4, 3, 1),
    },
    "64 rows, packed": {  # H200, 28 decodes, 2 appends and 2 prefills: 661 us, 814 with four stages (2026-11-30)
        64: DecodeConfig(64, 64, 4, 3, 1),
        128: DecodeConfig(64, 64, 4, 3, 1),
        256: DecodeConfig(64, 32, 4, 3, 1),
    },
    "128 rows": {
        64: DecodeConfig(128, 64, 8, 3, 1),
        128: DecodeConfig(128, 64, 8, 3, 1),
        256: DecodeConfig(64, 32, 4, 3, 1),
    },
    # Exact products run on the plain FMA units and hold whole rows of q and k in registers; larger tiles spill.
    "float32": {
        64: DecodeConfig(16, 64, 4, 2),
        128: DecodeConfig(16, 32, 8, 2),
        256: DecodeConfig(16, 16, 8, 2),
    },
}
"""Tile shapes by what is read, and by the wider of the padded head dims."""


def choose_config(call: AttentionCall, alignment: int = 16) -> DecodeConfig:
    """Tile shapes for ``call``, from its dtypes, widest head dim and rows; ``alignment`` as in ``form_of``."""
    if call.q.device.type == "cpu":
        return INTERPRETED
    width = max(64, width_of_groups(call.k, call.k_shift), width_of_groups(call.v, call.v_shift))
    kind = _codes_kind(call, alignment) if any(call.tbq4) else _kind(call, alignment)
    if kind in ("64 rows", "64 rows, packed", "128 rows") and shared_memory(call.q.device) < MANY_ROWS_BYTES:
        return CONFIGS["64 rows"][width]._replace(num_stages=2)
    return CONFIGS[kind][width]


def _kind(call: AttentionCall, alignment: int) -> str:
    forms = forms_of(call, alignment, 16)
    if any(form.unpack == INTEGERS.value for form in forms):
        return "codes in bytes"
    if call.q.dtype == torch.float32:
        return "float32"
    rows = call.q.shape[2] * call.group_size
    if any(form.unpack in INTEGER_WORDS.values() for form in forms):
        many = call.cu_seqlens_q is not None or rows > 16
        return "4 bit, 64 rows" if many and unpacks_alike(call) else "4 bit"
    if call.cu_seqlens_q is not None:
        return "64 rows, packed"  # of a sequence, nobody here knows how many
    if rows > 16:
        return "64 rows" if rows <= 64 else "128 rows"
    if call.k_scale is not None or call.v_scale is not None:
        return "8 bit"
    kind = "16 bit" if call.block_table is None else "pages"
    if call.batch_invariant:
        return kind
    if kind == "16 bit" and _lengths_differ(call):
        return "16 bit, ragged"
    heads_per_sm = call.batch * call.num_kv_heads / multiprocessors(call.q.device)
    if heads_per_sm >= CROWDED:
        return "16 bit, crowded" if kind == "16 bit" else kind
    return "pages, a program per head" if kind == "pages" and heads_per_sm >= 1 else kind


def _codes_kind(call: AttentionCall, alignment: int) -> str:
    """Kind of a call with K or V in TBQ4 codes."""
    if any(form.unpack == BYTES.value for form in forms_of(call, alignment, 16)):
        return "codes in bytes"
    rows = call.q.shape[2] * call.group_size
    many = call.cu_seqlens_q is not None or rows > 16
    if many and unpacks_alike(call):
        return "codes, 64 rows"
    if many or rows > 8 or not call.tbq4[0]:
        return "codes, 16 rows"
    if rows > 4:
        return "codes, 8 rows"
    keys_per_sm = call.batch * call.num_kv_heads * most_visible_keys(call) / multiprocessors(call.q.device)
    return "codes, 4 rows, long" if keys_per_sm >= LONG else "codes, 4 rows"


def choose_plan(call: AttentionCall, config: DecodeConfig, num_splits: int = 0) -> Plan:
    """How many programs share the keys, from shapes alone: never from a length on the device."""
    if _lengths_differ(call):
        return _ragged_plan(call, config, num_splits)
    tiles = -(-call.q.shape[2] * call.group_size // config.BLOCK_M)
    least_share, most_share = 1, ANY_SHARE
    if call.batch_invariant:
        least_share = most_share = INVARIANT_SPLIT_KEYS
        num_splits = -(-call.seqlen_k // INVARIANT_SPLIT_KEYS)
    num_splits = num_splits or _even_splits(call, config, tiles)
    programs = call.batch * call.num_kv_heads * tiles * num_splits
    return Plan(programs, num_splits, _merges(call, num_splits), num_splits, least_share, most_share, 0)


def _merges(call: AttentionCall, num_splits: int) -> bool:
    """Whether there is a merge, which also rotates back what came of V in codes."""
    return num_splits > 1 or call.batch_invariant or any(call.tbq4)


def _lengths_differ(call: AttentionCall) -> bool:
    if call.cu_seqlens_q is not None:
        return True
    offset = call.q_offset
    differ = isinstance(offset, torch.Tensor) and offset.numel() > 1 and call.is_banded
    return differ and call.key_bounds is None


def _even_splits(call: AttentionCall, config: DecodeConfig, tiles: int) -> int:
    """Splits per tile of rows where every sequence is as long: enough programs for the device, of equal shares."""
    groups = call.batch * call.num_kv_heads * tiles
    blocks = -(-most_visible_keys(call) // config.BLOCK_N)
    sms = multiprocessors(call.q.device)
    long_splits = blocks * config.BLOCK_N // SPLIT_KEYS
    programs = min(config.programs_per_sm * sms, max(FEW_PER_SM * sms, long_splits * groups))
    most = max(1, min(programs // max(1, groups), MAX_SPLITS))
    return max(1, -(-blocks // max(1, -(-blocks // most))))


def _ragged_plan(call: AttentionCall, config: DecodeConfig, num_splits: int) -> Plan:
    """Shares of equal size; a sequence has at most all of them, and at most one more program than whole shares."""
    block_b = 1 << (call.batch - 1).bit_length()
    tiles = -(-call.q.shape[2] * call.group_size // config.BLOCK_M)
    tiles = tiles + call.batch if call.cu_seqlens_q is not None else tiles * call.batch
    least_share, most_share = SPLIT_KEYS, ANY_SHARE
    parts = max(1, SHARES_PER_SM * multiprocessors(call.q.device) // call.num_kv_heads)
    most_splits = -(-most_visible_keys(call) // least_share)
    if call.batch_invariant:
        least_share = most_share = INVARIANT_SPLIT_KEYS
        num_splits = -(-call.seqlen_k // INVARIANT_SPLIT_KEYS)
        parts = tiles * num_splits
    num_splits = num_splits or max(1, min(parts + 1, most_splits, MERGED_AT_ONCE))
    programs = (tiles + min(parts, tiles * (num_splits - 1))) * call.num_kv_heads
    return Plan(programs, num_splits, _merges(call, num_splits), parts, least_share, most_share, block_b)


def most_visible_keys(call: AttentionCall) -> int:
    """Most keys the rows of a sequence may see: the window where both sides are bounded, else all of K."""
    if call.window_left is None or call.window_right is None:
        return call.seqlen_k
    return min(call.seqlen_k, call.window_left + call.window_right + call.seqlen_q)


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; the interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_merge(call: AttentionCall, plan: Plan) -> int:
    """How many splits a program of the merge takes at a time."""
    return MERGED_AT_ONCE if call.batch_invariant else min(MERGED_AT_ONCE, padded_width(plan.num_splits))


@cache
def shared_memory(device: torch.device) -> int:
    """Most bytes of shared memory of a program."""
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin
