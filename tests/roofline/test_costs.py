"""Costs against numbers worked out by hand and those of this project's own documents and caches."""

import pytest
import torch

from attnpatch import roofline, tbq4
from attnpatch.roofline import DEVICES, EIGHT_BIT, SEPARATE_DEQUANT, SIXTEEN_BIT, TBQ4, ModelShape, Weights

PUBLISHED = ModelShape(16, num_heads=24, num_kv_heads=4, head_dim=256, weights=Weights.of_bytes(17e9))
CONTEXT = 262_144


def shape(**changes) -> ModelShape:
    sizes = {"full_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "weights": Weights.of_bytes(0)}
    return ModelShape(**(sizes | changes))


def test_a_head_writes_2_gib_of_scores_at_32k():
    assert roofline.eager_score_bytes(shape(), 1, 32768) == 2 * 2**30
    assert roofline.eager_score_bytes(shape(full_layers=3, num_heads=4), 2, 32768) == 24 * 2 * 2**30


def test_cache_of_the_published_shape():
    per_token = roofline.decode_cost(PUBLISHED, 1, 1).kept_bytes
    assert per_token == 65_536
    assert roofline.decode_cost(PUBLISHED, 1, CONTEXT).kept_bytes == pytest.approx(17.2e9, rel=0.002)
    assert roofline.decode_cost(PUBLISHED, 1, CONTEXT, TBQ4).kept_bytes == pytest.approx(4.43e9, rel=0.001)


def test_a_separate_pass_moves_39_gb_and_keeps_no_more():
    cost = roofline.decode_cost(PUBLISHED, 1, CONTEXT, SEPARATE_DEQUANT)
    assert cost.kv_bytes == pytest.approx(4.4e9 + 17.2e9 + 17.2e9, rel=0.002)
    assert cost.kept_bytes == roofline.decode_cost(PUBLISHED, 1, CONTEXT, TBQ4).kept_bytes


def test_share_of_attention_beside_17_gb_of_weights():
    assert roofline.decode_cost(PUBLISHED, 1, CONTEXT, TBQ4).attention_share == pytest.approx(0.206, abs=0.002)
    assert roofline.decode_cost(PUBLISHED, 1, CONTEXT).attention_share == pytest.approx(0.503, abs=0.002)


def test_a_batch_of_32_at_32k_reads_137_gb_in_41_ms():
    cost = roofline.decode_cost(shape(full_layers=32, num_heads=32, num_kv_heads=8, head_dim=128), 32, 32768)
    assert cost.bytes == 2 * 32 * 32768 * 32 * 8 * 128 * 2 == pytest.approx(137e9, rel=0.005)
    assert cost.floor(DEVICES["h100-sxm"]) == pytest.approx(41e-3, rel=0.005)
    assert cost.limit(DEVICES["h100-sxm"]) == "bytes"
    assert cost.tokens_per_s(DEVICES["h100-sxm"]) == pytest.approx(32 / 41e-3, rel=0.005)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 128, 192, 256])
def test_tbq4_bytes_are_those_that_encode_makes(head_dim: int):
    codes, norms = tbq4.encode(torch.randn(1, head_dim))
    assert TBQ4.kept(head_dim) == codes.nbytes + norms.nbytes
    assert SEPARATE_DEQUANT.moved(head_dim) == codes.nbytes + norms.nbytes + 2 * 2 * head_dim


def test_eight_bits_have_a_float32_scale():
    assert (EIGHT_BIT.kept(128), EIGHT_BIT.moved(128)) == (132, 132)


def test_tbq4_is_left_out_where_it_cannot_be():
    assert roofline.formats_for(100) == (SIXTEEN_BIT, EIGHT_BIT)
    assert roofline.formats_for(104) == (SIXTEEN_BIT, EIGHT_BIT, TBQ4, SEPARATE_DEQUANT)
    with pytest.raises(ValueError, match="head_dim 100 is not a positive multiple of 8"):
        TBQ4.kept(100)


@pytest.mark.parametrize(("context", "window"), [(7, 3), (3, 7), (5, 5), (9, 1)])
def test_visible_pairs_are_those_of_a_causal_mask(context: int, window: int):
    distance = torch.arange(context)[:, None] - torch.arange(context)
    full, windowed = (distance >= 0).sum().item(), ((distance >= 0) & (distance < window)).sum().item()
    mixed = shape(full_layers=2, windowed_layers=3, window=window, linear_layers=4)
    assert mixed.visible_pairs(context) == 2 * full + 3 * windowed
    assert mixed.kept_keys(context) == 2 * context + 3 * min(context, window)


def test_flops_of_attention_are_torchs():
    """Of two products per head, as torch counts them; a prefill without what is masked is about half."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k = torch.randn(3, 4, 1, 16), torch.randn(3, 4, 50, 16)
    with FlopCounterMode(display=False) as counter:
        (q @ k.mT).softmax(-1) @ k
    assert roofline.decode_cost(shape(num_heads=4, head_dim=16), 3, 50).attention_flops == counter.get_total_flops()
    prefill = roofline.prefill_cost(shape(num_heads=4, head_dim=16), 3, 50).attention_flops
    assert prefill == pytest.approx(50 * counter.get_total_flops() / 2, rel=0.03)
    assert prefill > 50 * counter.get_total_flops() / 2


def test_a_prefill_reads_weights_once_and_applies_the_head_once_per_sequence():
    model = shape(weights=Weights(body=1000, head=100))
    cost = roofline.prefill_cost(model, 2, 50)
    assert cost.weight_flops == 2 * (2 * 50 * 1000 + 2 * 100)
    assert cost.weight_bytes == 2 * 1100
    assert cost.kv_bytes == cost.kept_bytes == roofline.decode_cost(model, 2, 50).kv_bytes


def test_the_limit_of_a_prefill_is_flops_and_that_of_a_large_batch_without_keys_too():
    assert roofline.prefill_cost(PUBLISHED, 1, 32768).limit(DEVICES["h200"]) == "FLOPs"
    assert roofline.decode_cost(PUBLISHED, 1, 1).limit(DEVICES["h200"]) == "bytes"
    crowd = roofline.decode_cost(PUBLISHED, 1024, 1)
    assert crowd.limit(DEVICES["h200"]) == "FLOPs"
    assert crowd.floor(DEVICES["h200"]) == crowd.flops_floor(DEVICES["h200"]) > crowd.bytes_floor(DEVICES["h200"])


def test_experts_that_a_batch_reads():
    weights = Weights(body=10, experts=800, active_share=1 / 8)
    assert weights.read_bytes(1) == pytest.approx(2 * (10 + 100))
    assert weights.read_bytes(2) == pytest.approx(2 * (10 + 800 * (1 - (7 / 8) ** 2)))
    assert weights.read_bytes(10_000) == pytest.approx(2 * (10 + 800))
    assert weights.flops(3, 3) == 2 * 3 * (10 + 100)


def test_weights_given_in_bytes():
    assert Weights.of_bytes(17e9).flops(1, 1) == 17e9
    assert Weights.of_bytes(17e9, 27e9).flops(1, 1) == 54e9
    assert Weights.of_bytes(17e9, 27e9).read_bytes(5) == pytest.approx(17e9)
    for bad in ((-1, None), (17e9, 0), (0, 27e9)):
        with pytest.raises(ValueError, match="give both above 0"):
            Weights.of_bytes(*bad)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "3 heads are no multiple of 2 K/V heads"),
        ({"head_dim": 0}, "head_dim is 0; give at least 1"),
        ({"full_layers": 0, "linear_layers": 4}, "layers with K/V is 0"),
        ({"windowed_layers": 1}, "window is 0; give at least 1"),
    ],
)
def test_shapes_that_cannot_be(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        shape(**changes)


@pytest.mark.parametrize("cost", [roofline.decode_cost, roofline.prefill_cost, roofline.eager_score_bytes])
def test_batches_and_contexts_begin_at_one(cost):
    with pytest.raises(ValueError, match="batch is 0; give at least 1"):
        cost(PUBLISHED, 0, 5)
    with pytest.raises(ValueError, match="context is -5; give at least 1"):
        cost(PUBLISHED, 1, -5)


def test_the_present_device_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = roofline.measured_device(seconds=0.01)
    assert 1e8 < device.bandwidth < 1e13
    assert 1e8 < device.flops < 1e15
    assert "256 MiB" in device.source
