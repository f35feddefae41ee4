"""What to change: given for the sentences that rules really say, and for no others."""

import re
from pathlib import Path

import pytest

from attnpatch.reporting import advice

ROOT = Path(__file__).parents[2]


def sentences():
    """Source of everything that refuses, without the file under test."""
    files = [*ROOT.glob("rewrites/*.py"), *ROOT.glob("attnpatch/*.py")]
    return "\n".join(path.read_text() for path in files)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("dropout with p=0.5 is active in training; fused attention has none", "model.eval()"),
        ("dropout_p=0.1 is active; fused attention has no dropout", "model.eval()"),
        (
            "the attention probabilities are also read by the caller: they are returned (output_attentions)",
            "do not ask",
        ),
        ("the attention probabilities are also read by sum (model.py:3 in forward)", "take out that reader"),
        ("the scores are also read by amax (model.py:3); returning them needs their memory", "take out that reader"),
        ("k is written in place (model.py:3 in forward) before attention ends", "x = x + y"),
        (
            "_transformer_encoder_layer_fwd runs the whole layer as one operator (torch's fast path for inference; ..)",
            "torch.backends.mha.set_fastpath_enabled(False)",
        ),
        ("the softcap is known only at run time (model.py:3)", "a Python number"),
        ("a mask is applied before a scale that is known only at run time (model.py:3)", "a Python number"),
        ("hidden scores become -5.0 at model.py:3, which does not exclude them", "-inf"),
    ],
)
def test_advice(reason, words):
    assert words in advice.for_reason(reason)


@pytest.mark.parametrize(
    "reason",
    [
        "",
        "a dimension merges two sizes that are known only at run time",
        "multi_head_attention_forward runs the whole layer as one operator (sizes known only at run time keep it ...)",
        "mul reads the attention probabilities (model.py:3)",
        "a mask is applied before the softcap (model.py:3)",
        "einsum 'bij->b' takes a diagonal (model.py:3)",
    ],
)
def test_no_advice(reason):
    assert advice.for_reason(reason) == ""


def test_every_pattern_is_of_a_sentence_that_some_rule_says():
    text = sentences()
    for pattern in advice.REASONS:
        for part in re.split(r"\|(?![^(]*\))", pattern):
            assert re.search(part, text), part


def test_every_kind_of_gap_has_advice():
    kinds = re.findall(
        r'"(graph break|skipped frame|recompile limit)"', (ROOT / "attnpatch" / "patching.py").read_text()
    )
    assert set(kinds) == set(advice.GAPS)
    assert all(advice.for_gap(kind) for kind in kinds)
    assert advice.for_gap("another") == ""
