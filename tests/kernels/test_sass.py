"""The machine code of every shipped configuration, compiled for compute capability 9.0 without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from attnpatch.kernels.decode.configs import MANY_ROWS_BYTES
from tests.kernels.uniform_registers import unset

HERE = Path(__file__).parent
NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
SHARED_MEMORY = 232448  # what one program may use at 9.0
SMALLEST_SHARED_MEMORY = 101376  # and on the smallest chips from 8.0 on
FEW_SPILLS = 16
PARKED = {
    "decode 64 rows 256": 93,
    "decode 64 rows, packed 256": 159,
    "decode 64 rows 128 8 bit, padding": 49,
    "decode 128 rows 256": 93,
    "decode small 64 rows 256": 76,
    "decode 4 bit 256": 2,
    "decode 4 bit, groups of 32 128": 2,
    "decode 4 bit, 64 rows 256": 28,
    "decode codes, 4 rows, long 128": 6,
    "decode codes, 8 rows 64": 4,
    "decode codes, 8 rows 128": 6,
    "decode codes, 8 rows 256": 12,
    "decode codes, 16 rows 256": 14,
    "decode codes, 64 rows 256": 36,
    "decode codes in bytes 128": 12,
}
IN_LOOPS = {"decode codes, 64 rows 256": 3}
"""Of those, the most within loops."""
NARROW_LOADS = {"decode codes, 16 rows 256": 4}
"""Loads of 2 bytes in a loop: of 32 norms, a lane of the one warp has one each."""

SPILLS_OF_HOPPER = {
    "hopper descriptor 128 causal, offset on the device": 5,
    "hopper descriptor 256 causal, offset on the device": 4,
    "hopper descriptor 128 packed": 10,
    "hopper descriptor 256 packed": 16,
    "hopper descriptor 128 packed, every term": 20,
    "hopper descriptor 256 bounds, padding and offset": 67,
    "hopper descriptor 256 bounds and mask": 56,
}
"""Of triton.prefill_hopper, the most where there are any."""

SPILLS_OF_REST = {
    "hopper descriptor 64 bounds, padding and offset, rest": (0, 0),
    "hopper descriptor 64 bounds and mask, rest": (33, 0),
    "hopper descriptor 128 bounds, padding and offset, rest": (15, 0),
    "hopper descriptor 128 bounds and mask, rest": (40, 0),
    "hopper descriptor 256 bounds, padding and offset, rest": (96, 13),
    "hopper descriptor 256 bounds and mask, rest": (212, 78),
}
"""Of triton.prefill on the tiles that are left to it: the most, and within loops over keys."""

pytestmark = pytest.mark.skipif(not NVDISASM.exists(), reason="this Triton ships no nvdisasm")


@pytest.fixture(scope="module")
def rows():
    """Facts of each compiled kernel, by row name."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(HERE.parents[1])}
    run = [sys.executable, str(HERE / "compile_for_hopper.py")]
    return json.loads(subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout)


def named(rows, *words):
    selected = {name: row for name, row in rows.items() if all(word in name.split() for word in words)}
    assert selected
    return selected


def many_rows(name):
    """Whether a tile has rows for a warpgroup."""
    return "64 rows" in name or "128 rows" in name


def test_spills(rows):
    """None, but that a masked block, of which a query tile has one or two, may park a few registers."""
    for name, row in rows.items():
        if name not in PARKED and "hopper" not in name and ("prefill" not in name or "bounds" not in name):
            masked = "descriptor" in name and "full" not in name
            assert row["spills"] <= (FEW_SPILLS if masked else 0), name


def test_spills_beside_bounds(rows):
    """None; at 256 only in the masked blocks at both ends of a tile's keys, not in those between."""
    for name, row in named(rows, "prefill", "bounds").items():
        assert row["spills by run"][-1] <= 1 if "256" in name else row["spills"] == 0, name


def test_spills_of_hopper(rows):
    """None, but where rows of V are cleaned while a block waits, and what packed sequences read once per tile."""
    for name, row in named(rows, "hopper").items():
        if name not in SPILLS_OF_REST:
            assert row["spills"] <= SPILLS_OF_HOPPER.get(name, 0), (name, row["spills"])


def test_8_bit_probabilities_stay_where_they_are(rows):
    """All products are of 8 bits, and between two of them nothing goes through shared memory or from byte to byte."""
    for name, row in named(rows, "hopper", "fp8").items():
        assert row["8 bit wgmma"] == row["wgmma"] > 0, name
        assert row["byte moves"] <= 48, (name, row["byte moves"])
        assert row["shared stores"] <= 8, (name, row["shared stores"])


def test_spills_of_what_hopper_leaves(rows):
    """What a program keeps from tile to tile waits outside of the loops over keys; at 256 not all of it."""
    for name, (most, in_loops) in SPILLS_OF_REST.items():
        assert rows[name]["spills"] <= most, (name, rows[name]["spills"])
        assert sum(rows[name]["spills by run"]) <= in_loops, (name, rows[name]["spills by run"])


def test_parked_registers(rows):
    """Some wait in memory while the masked loop, which comes first, runs; inside of the loops none is, but IN_LOOPS."""
    for name, most in PARKED.items():
        assert 0 < rows[name]["spills"] <= most, (name, rows[name]["spills"])
        assert sum(rows[name]["spills by run"]) <= IN_LOOPS.get(name, 0), name


def test_shared_memory(rows):
    for name, row in rows.items():
        words = set(name.split())
        most = (
            SHARED_MEMORY if "descriptor" in words else MANY_ROWS_BYTES if many_rows(name) else SMALLEST_SHARED_MEMORY
        )
        assert row["shared"] <= (SMALLEST_SHARED_MEMORY if "small" in words else most), name


def test_registers_are_set_before_they_are_read(rows):
    """Uniform ones, which ptxas forgets where K and V unpack into different planes: unpack.unpacks_alike."""
    for name, row in rows.items():
        assert not row["reads of unset registers"], (name, row["reads of unset registers"])


CODE = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/               @P0 BRA `(.L_x_0) ;
        /*0020*/                   R2UR UR6, R2 ;
.L_x_0:
        /*0030*/                   UIADD3 UR8, UP0, UR6, 0x40, URZ ;
        /*0040*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0050*/                   HGMMA.64x32x16.F32 R24, R8, gdesc[UR8].tnspB, R24 ;
        /*0060*/                   EXIT ;
"""


def test_unset_registers_are_found():
    """UR6 is set on one of two paths; of UR8 to UR11 a product with its left operand in registers reads two."""
    assert [line.split()[1] for line in unset(CODE)] == ["UIADD3", "HGMMA.64x32x16.F32"]
    repaired = CODE.replace("R2UR UR6, R2", "R2UR UR10, R2").replace("UR6, 0x40", "UR5, 0x40")
    assert [line.split()[1] for line in unset(repaired)] == ["HGMMA.64x32x16.F32"]
    assert not unset(repaired.replace("@P0 BRA `(.L_x_0)", "UMOV UR11, 0x40000040"))


def test_prefill_multiplies_by_warpgroup(rows):
    for name, row in {**named(rows, "descriptor"), **named(rows, "prefill", "pointer")}.items():
        assert row["wgmma"] > 0, name


def test_products_are_not_serialised(rows):
    """A product is several wgmma and one wait; ptxas falls back to a wait after each when it loses track."""
    many = {name: row for name, row in rows.items() if many_rows(name)}
    for name, row in {**named(rows, "descriptor"), **named(rows, "prefill", "pointer"), **many}.items():
        assert 2 * row["wgmma waits"] <= row["wgmma"], name


def test_descriptors_become_bulk_loads(rows):
    for name, row in named(rows, "descriptor").items():
        assert row["tma loads"] > 0, name


def test_decode_multiplies_on_tensor_cores(rows):
    for name, row in named(rows, "decode").items():
        if "float32" not in name:
            by_warp = row["mma"] + row["int8 mma"]
            assert (row["wgmma"] if many_rows(name) else by_warp) > 0, name
            assert (by_warp if many_rows(name) else row["wgmma"]) == 0, name


def test_few_rows_have_int8_products_with_codes(rows):
    """More rows have float16 products."""
    for name, row in rows.items():
        few = name.startswith(("decode codes, 4 rows", "decode codes, 8 rows"))
        assert (row["int8 mma"] > 0) == few, name
        assert not (few and row["mma"]), name


def test_codes_and_norms_load_asynchronously(rows):
    for name, row in named(rows, "codes,").items():
        assert row["async loads"] > 0, name
        assert max(row["narrow loads by run"]) <= NARROW_LOADS.get(name, 0), name


def test_linear_layers_read_ahead(rows):
    """In words of 16 bytes, and once more before the wait for the kernel before; each weight has a loop of its own."""
    weights = {"linear qkv": 3, "linear gated": 1, "linear residual": 1}
    for name, row in named(rows, "linear").items():
        assert row["wide loads"] > 0, name
        assert row["waits for the kernel before"] == weights[name], name


def test_float32_never_does(rows):
    """Exact products: tensor cores would round float32 to TF32."""
    for name, row in named(rows, "float32").items():
        assert row["mma"] == row["wgmma"] == 0, name
