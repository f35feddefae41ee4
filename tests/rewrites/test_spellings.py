"""Scale, softmax, softcap, layout and output tail in every spelling: fused, and the same numbers."""

import math

import pytest
import torch
import torch.nn.functional as F

from attnpatch.testing.recording import check_rewrite
from tests.combinations import in_turn

B, H, S, D = 2, 4, 12, 16


def qkv(dtype=torch.float32, seqlen_q=S, seqlen_k=S, head_dim_v=D, shape=(B, H)):
    sizes = ((seqlen_q, D), (seqlen_k, D), (seqlen_k, head_dim_v))
    return tuple(torch.randn(*shape, n, d).to(dtype) for n, d in sizes)


def probabilities(scores):
    return scores.softmax(dim=-1)


def fused(function, *args, **kwargs):
    """The one site of ``function``, fused and equal."""
    recording = check_rewrite(function, *args, **kwargs)
    assert recording.reasons == []
    assert len(recording.masks) == 1
    assert len(recording.named("attention")) == 1
    assert recording.named("softmax", "scaled_dot_product_attention") == []
    assert recording.square_nodes(args[0].shape[-2], args[1].shape[-2]) == []
    return recording


SCALES = {
    "none": lambda q, k: q @ k.transpose(-1, -2),
    "scores_mul": lambda q, k: q @ k.transpose(-1, -2) * 0.25,
    "scores_mul_left": lambda q, k: 0.25 * (q @ k.transpose(-1, -2)),
    "scores_torch_mul": lambda q, k: torch.mul(torch.matmul(q, k.transpose(2, 3)), 0.3),
    "scores_div": lambda q, k: torch.matmul(q, k.transpose(-2, -1)) / 4.0,
    "scores_div_sqrt": lambda q, k: (q @ k.mT) / math.sqrt(q.size(-1)),
    "scores_itruediv": lambda q, k: _in_place_div(q @ k.transpose(-1, -2)),
    "scores_mul_": lambda q, k: (q @ k.transpose(-1, -2)).mul_(0.2),
    "scores_twice": lambda q, k: (q @ k.transpose(-1, -2)) * 0.5 / 3.0,
    "q_mul": lambda q, k: (q * 0.25) @ k.transpose(-1, -2),
    "q_div": lambda q, k: (q / 3.0) @ k.transpose(-1, -2),
    "q_then_scores_one": lambda q, k: (q * 0.25) @ k.transpose(-1, -2) * 1.0,
    "k_mul": lambda q, k: q @ (k * 0.25).transpose(-1, -2),
    "k_transposed_mul": lambda q, k: q @ (k.transpose(-1, -2) * 0.25),
    "k_transposed_div": lambda q, k: q @ (k.transpose(-1, -2) / 5.0),
    "both_sides": lambda q, k: (q * 0.5) @ (k.transpose(-1, -2) * 0.5),
    "negative_on_q": lambda q, k: (q * -0.25) @ k.transpose(-1, -2),
    "tensor_constant_mul": lambda q, k: (q @ k.transpose(-1, -2)) * torch.tensor(0.25),
    "tensor_constant_div": lambda q, k: (q @ k.transpose(-1, -2)) / torch.tensor(4.0),
    "tensor_sqrt": lambda q, k: (q @ k.transpose(-1, -2)) / torch.sqrt(torch.tensor(float(D))),
}


def _in_place_div(scores):
    scores /= 4.0
    return scores


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_scale(scale):
    q, k, v = qkv()
    fused(lambda q, k, v: probabilities(scale(q, k)) @ v, q, k, v)


def test_scale_by_a_one_element_tensor():
    q, k, v = qkv()
    fused(lambda q, k, v, t: probabilities((q @ k.transpose(-1, -2)) / t) @ v, q, k, v, torch.tensor([[3.0]]))


def test_scale_as_symfloat():
    def attend(q, k, v):
        return probabilities((q @ k.transpose(-1, -2)) * q.size(-1) ** -0.5) @ v

    fused(attend, *qkv(), dynamic=True)


RUN_TIME_SCALES = {
    "alone": lambda scores, t: scores * t,
    "divided": lambda scores, t: scores / t,
    "under_a_mask": lambda scores, t: scores * t + torch.full((S, S), -1e9).triu(1),
    "under_a_fill": lambda scores, t: (scores * t).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -1e9),
    "under_a_softcap": lambda scores, t: torch.tanh(scores * t / 5.0) * 5.0,
    "with_constants": lambda scores, t: (scores * 0.5) / t * 2.0,
}


@pytest.mark.parametrize("scale", RUN_TIME_SCALES.values(), ids=RUN_TIME_SCALES)
def test_scale_known_at_run_time(scale):
    def attend(q, k, v, t):
        return probabilities(scale(q @ k.transpose(-1, -2), t)) @ v

    fused(attend, *qkv(), torch.tensor(0.3))


def test_symfloat_scale_under_a_mask():
    def attend(q, k, v):
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        keep = torch.arange(k.size(-2)) <= torch.arange(q.size(-2))[:, None]
        return probabilities(scores.masked_fill(~keep, -torch.inf)) @ v

    assert fused(attend, *qkv(), dynamic=True).masks == ["causal"]


def test_scale_by_a_matrix_of_equal_constants():
    q, k, v = qkv()
    fused(lambda q, k, v: probabilities((q @ k.transpose(-1, -2)) * torch.full((S, S), 0.5)) @ v, q, k, v)


def test_scale_under_a_causal_mask_applies_to_the_scores_only():
    def attend(q, k, v):
        hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
        return probabilities((q @ k.transpose(-1, -2)).masked_fill(hidden, -1e9) * 0.25) @ v

    assert fused(attend, *qkv()).masks == ["causal"]


SOFTMAXES = {
    "tensor_method": lambda s: s.softmax(-1),
    "torch_function": lambda s: torch.softmax(s, dim=-1),
    "functional": lambda s: F.softmax(s, dim=-1),
    "positive_dim": lambda s: F.softmax(s, dim=3),
    "module": lambda s: torch.nn.Softmax(dim=-1)(s),
    "float32_and_back": lambda s: F.softmax(s, dim=-1, dtype=torch.float32).to(s.dtype),
    "float_first": lambda s: F.softmax(s.float(), dim=-1).to(s.dtype),
    "float_type_as": lambda s: F.softmax(s.float(), dim=-1).type_as(s),
    "type": lambda s: s.softmax(-1).type(s.dtype),
    "dropout_not_training": lambda s: F.dropout(s.softmax(-1), p=0.1, training=False),
    "dropout_zero_training": lambda s: F.dropout(s.softmax(-1), p=0.0, training=True),
    "dropout_positional": lambda s: F.dropout(s.softmax(-1), 0.1, False, False),
}


@pytest.mark.parametrize(("softmax", "dtype"), in_turn(SOFTMAXES, [torch.bfloat16, torch.float16]))
def test_softmax(softmax, dtype):
    q, k, v = qkv(dtype)
    fused(lambda q, k, v: softmax(q @ k.transpose(-1, -2) * 0.25) @ v, q, k, v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_and_keys_upcast_to_float32(dtype):
    """GPT-J: q and k are cast up before the product, probabilities down after the softmax."""

    def attend(q, k, v):
        scores = q.to(torch.float32) @ k.to(torch.float32).transpose(-1, -2) / 4.0
        return F.softmax(scores, dim=-1).to(v.dtype) @ v

    recording = fused(attend, *qkv(dtype))
    assert recording.sites[0].dtype == str(dtype).removeprefix("torch.")


CAPS = {
    "div_tanh_mul": lambda s: torch.tanh(s / 5.0) * 5.0,
    "mul_tanh_mul": lambda s: 5.0 * torch.tanh(s * 0.2),
    "method": lambda s: (s / 5.0).tanh() * 5.0,
    "unequal_factors": lambda s: torch.tanh(s / 3.0) * 7.0,
}


@pytest.mark.parametrize(("cap", "masked"), in_turn(CAPS, [False, True]))
def test_softcap(cap, masked):
    def attend(q, k, v):
        scores = cap(q @ k.transpose(-1, -2) * 2.0)
        if masked:
            scores = scores + torch.full((S, S), -torch.inf).triu(1)
        return probabilities(scores) @ v

    recording = fused(attend, *qkv())
    assert recording.masks == ["causal" if masked else "none"]
    assert recording.named("tanh") == []


TRANSPOSES = {
    "transpose_2_3": lambda k: k.transpose(2, 3),
    "transpose_minus": lambda k: k.transpose(-1, -2),
    "mT": lambda k: k.mT,
    "permute": lambda k: k.permute(0, 1, 3, 2),
    "permute_tuple": lambda k: torch.permute(k, (0, 1, -1, -2)),
    "swapaxes": lambda k: k.swapaxes(-1, -2),
    "contiguous": lambda k: k.transpose(-1, -2).contiguous(),
}


@pytest.mark.parametrize("transpose", TRANSPOSES.values(), ids=TRANSPOSES)
def test_transpose_of_keys(transpose):
    q, k, v = qkv()
    fused(lambda q, k, v: probabilities(q @ transpose(k)) @ v, q, k, v)


def test_keys_stored_transposed():
    """GPT-Neo-like caches keep k as [batch, heads, head_dim, seqlen]."""
    q, k, v = qkv()

    def attend(q, kt, v):
        return probabilities(q @ kt * 0.25) @ v

    recording = check_rewrite(attend, q, k.transpose(-1, -2).contiguous(), v)
    assert recording.masks == ["none"]


@pytest.mark.parametrize("heads", [S, H], ids=["heads_equal_tokens", "heads_differ"])
def test_layout_batch_seqlen_heads(heads):
    """pytorch#195320: any permute taken for the transpose of the last two dimensions."""
    q, k, v = (torch.randn(B, S, heads, D) for _ in range(3))

    def attend(q, k, v):
        q, v = q.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
        return probabilities(q @ k.permute(0, 2, 3, 1) * 0.25) @ v

    recording = check_rewrite(attend, q, k, v)
    assert recording.masks == ["none"]


def test_product_over_the_heads_is_not_taken_for_keys():
    """With as many heads as tokens, k.permute(0, 2, 1, 3) as "k^T" has the right shape and another meaning."""
    q, k, v = (torch.randn(B, D, D, D) for _ in range(3))
    recording = check_rewrite(lambda q, k, v: probabilities(q @ k.permute(0, 2, 1, 3)) @ v, q, k, v)
    assert len(recording.sites) == 1


@pytest.mark.parametrize("product", [torch.bmm, torch.matmul], ids=["bmm", "matmul"])
def test_three_dimensions(product):
    q, k, v = (torch.randn(B * H, S, D) for _ in range(3))
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)

    def attend(q, k, v, hidden):
        scores = product(q, k.transpose(1, 2)) * 0.25
        return product(probabilities(scores.masked_fill(hidden, -torch.inf)), v)

    recording = check_rewrite(attend, q, k, v, hidden)
    assert recording.masks == ["streamed mask [12, 12]"]
    assert recording.sites[0].num_heads == 1


def test_three_dimensions_causal():
    def attend(q, k, v):
        scores = torch.bmm(q, k.transpose(1, 2)) + torch.full((S, S), -torch.inf).triu(1)
        return torch.bmm(probabilities(scores), v)

    assert fused(attend, *(torch.randn(B * H, S, D) for _ in range(3))).masks == ["causal"]


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim_v"),
    [(12, 12, 8), (12, 12, 24), (5, 12, 16), (12, 5, 16), (1, 12, 16), (1, 1, 16), (3, 9, 24)],
    ids=lambda n: str(n),
)
def test_sizes(seqlen_q, seqlen_k, head_dim_v):
    q, k, v = qkv(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim_v=head_dim_v)
    recording = check_rewrite(lambda q, k, v: probabilities(q @ k.transpose(-1, -2) * 0.25) @ v, q, k, v)
    assert recording.masks == ["none"]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("tail", ["transpose_contiguous_reshape", "permute_view", "transpose_flatten"])
def test_output_tail(tail, dynamic):
    """What models do to the output sees the operator's strides; the values must come out right."""
    tails = {
        "transpose_contiguous_reshape": lambda o: o.transpose(1, 2).contiguous().reshape(B, S, -1).contiguous(),
        "permute_view": lambda o: o.permute(0, 2, 1, 3).contiguous().view(B, S, H * D),
        "transpose_flatten": lambda o: o.transpose(1, 2).flatten(2),
    }

    def attend(q, k, v):
        return tails[tail](probabilities(q @ k.transpose(-1, -2) * 0.25) @ v)

    recording = check_rewrite(attend, *qkv(), dynamic=dynamic)
    assert recording.masks == ["none"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_layer_is_a_site(count):
    def layers(x, mask):
        for _ in range(count):
            x = probabilities(x @ x.transpose(-1, -2) * 0.25 + mask) @ x
        return x

    recording = check_rewrite(layers, torch.randn(B, H, S, D), torch.randn(S, S))
    assert recording.masks == ["streamed bias [12, 12]"] * count
    assert len(recording.named("attention")) == count


def test_keys_and_values_that_are_also_outputs_stay():
    """pytorch#119760: GPT-2 returns k and v."""

    def attend(q, k, v):
        k, v = k * 2.0, v + 1.0
        return torch.cat([probabilities(q @ k.transpose(-1, -2)) @ v, k, v], dim=-1)

    assert check_rewrite(attend, *qkv()).masks == ["none"]


def test_non_contiguous_and_expanded_operands():
    def attend(q, k, v):
        return probabilities(q[:, :, ::2] @ k.expand(B, H, S, D).transpose(-1, -2)) @ v.expand(B, H, S, D)

    recording = check_rewrite(attend, torch.randn(B, H, 2 * S, D), torch.randn(B, 1, S, D), torch.randn(1, 1, S, D))
    assert len(recording.masks) == 1


def test_nothing_to_match_leaves_the_graph_as_it_was():
    recording = check_rewrite(lambda x, w: F.gelu(x @ w).softmax(-1), torch.randn(B, S, D), torch.randn(D, D))
    assert recording.sites == []
    assert recording.after == recording.before
