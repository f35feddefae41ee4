"""Equal layers as one row, in the table and on the page; others apart."""

import pytest

from attnpatch.reporting import DispatchReport
from attnpatch.reporting.folding import folded, ranges


def rows(*sites):
    return [(row.label, row.count) for row in folded(sites)]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([0, 1], "0-1"),
        (range(30), "0-29"),
        ([0, 1, 2, 3, 7], "0-3,7"),
        ([0, 2, 4], "0,2,4"),
        ([0, 2, 4, 6, 8], "0,2,..,8"),
        ([5, 11, 17, 23], "5,11,..,23"),
        ([0, 1, 2, 4, 5, 6], "0-2,4-6"),
    ],
)
def test_ranges(numbers, text):
    assert ranges(list(numbers)) == text


def test_alternating_layers_are_two_rows(site):
    sites = [site(f"model.layers.{i}.attn", mask="none" if i % 2 else "causal") for i in range(8)]
    assert rows(*sites) == [("model.layers.0,2,..,6.attn", 4), ("model.layers.1,3,..,7.attn", 4)]


def test_rows_keep_the_order_of_their_first_sites(site):
    assert rows(site("b.1"), site("a.0"), site("b.0"), site("c")) == [("b.0-1", 2), ("a.0", 1), ("c", 1)]


def test_stages_of_blocks_fold_by_both_numbers(site):
    sites = [site(f"stages.{s}.blocks.{b}.attn", num_heads=4 * 2**s) for s in range(2) for b in range(3)]
    assert rows(*sites) == [("stages.0.blocks.0-2.attn", 3), ("stages.1.blocks.0-2.attn", 3)]
    assert rows(*(site(f"s.{s}.b.{b}") for s in range(2) for b in range(3))) == [("s.0-1.b.0-2", 6)]


def test_stages_of_different_depth_do_not_fold_into_what_is_not_there(site):
    """Stage 0 has one block, stage 1 two: ``s.0-1.b.0-1`` would name four."""
    assert rows(site("s.0.b.0"), site("s.1.b.0"), site("s.1.b.1")) == [("s.0-1.b.0", 2), ("s.1.b.1", 1)]


def test_two_sites_of_one_module_are_two_rows(site):
    sites = [site(f"layers.{i}") for i in (0, 0, 1, 1)]
    assert rows(*sites) == [("layers.0-1", 2), ("layers.0-1", 2)]


@pytest.mark.parametrize(
    "fields",
    [
        {"mask": "none"},
        {"rule": "sdpa_call"},
        {"head_dim": 16},
        {"dtype": "bfloat16"},
        {"kv_bytes_avoided": 1},
        {"status": "refused", "reason": "why"},
        {"dispatches": [DispatchReport("prefill", "triton.prefill", 2, False, "")]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_differs_stays_apart(fields, site):
    assert len(rows(site("layers.0"), site("layers.1", **fields))) == 2


def test_names_without_numbers_and_the_top_level(site):
    assert rows(site("encoder"), site("decoder"), site("")) == [("encoder", 1), ("decoder", 1), ("(top level)", 1)]


def test_the_table_shows_phases_masks_and_advice(site, refused, report_of):
    text = str(report_of(site("layers.0"), site("layers.1"), refused("layers.2", "dropout with p=0.5 [b, 1]")))
    for words in (
        "layers.0-1 ",
        "causal | none",
        "prefill: triton.prefill (1)",
        "decode: triton.decode (4)",
        "refused: dropout with p=0.5 [b, 1]",
        "try: call model.eval()",
        "2 of 3 sites fused, 1 refused",
    ):
        assert words in text
