"""Hand-written attention in the styles of known code: fused under strict, and the same function."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from attnpatch.testing.recording import clones, record
from attnpatch.testing.tolerance import assert_same_function, run_float64

from . import (
    handwritten,
    handwritten_biases,
    handwritten_caches,
    handwritten_heads,
    handwritten_masks,
    handwritten_torch,
)

STYLES = {
    **handwritten.STYLES,
    **handwritten_heads.STYLES,
    **handwritten_masks.STYLES,
    **handwritten_biases.STYLES,
    **handwritten_caches.STYLES,
    **handwritten_torch.STYLES,
}


def checked(style, **options):
    """The recording of a style; its outputs are those of the module."""
    inputs = style.inputs()
    module = style.module().eval().to(inputs[0].dtype)
    recording = record(module, *inputs, strict=True, **options)
    assert len(recording.masks) == len(recording.named("attention", "attention_lse")) == style.sites
    assert recording.named("softmax", "log_softmax") == []
    with torch.no_grad():
        original = module(*clones(inputs))
    expected = run_float64(module, *clones(inputs))
    for y, eager, y64 in zip(*map(tree_leaves, (recording.output, original, expected)), strict=True):
        assert (y.shape, y.dtype) == (eager.shape, eager.dtype)
        assert_same_function(y, eager, y64)
    return recording


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_fused_and_the_same_function(style):
    recording = checked(style)
    assert style.mask is None or set(recording.masks) == {style.mask}
    assert style.kv_heads is None or {s.num_kv_heads for s in recording.sites} == {style.kv_heads}


SYMBOLIC = [
    "timm_vit",
    "nano_gpt",
    "einsum_tokens_then_heads",
    "guided_diffusion",
    "torch_docs",
    "llama_reference",
    "groups_by_einsum",
    "manual_softmax",
    "sink_by_cat",
    "triu_of_inf",
    "x_transformers",
    "documents",
    "chunks",
    "fairseq",
    "opt",
    "alibi",
    "cache_by_cat_causal",
    "static_cache",
    "logsumexp_beside",
    "decode_without_rows",
]


@pytest.mark.parametrize("name", SYMBOLIC)
def test_with_symbolic_sizes(name):
    checked(STYLES[name], dynamic=True)
