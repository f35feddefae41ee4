"""Gradients through patched models: those of the original, also under padding, a learned bias and checkpointing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnpatch


def gradients(model, *args, **kwargs):
    model.zero_grad()
    model(*args, **kwargs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, theirs):
    assert list(ours) == list(theirs)
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_training_step(llama_with, attn_implementation):
    """Left-padded batch. No loss on rows without a visible key: pads, and the last pad, which predicts a real token."""
    model = llama_with(attn_implementation=attn_implementation).train()
    ids = torch.randint(3, 60, (2, 10))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 4] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    theirs = gradients(model, **batch)
    attnpatch.patch(model, strict=True)
    assert_same_gradients(gradients(model, **batch), theirs)
    report = attnpatch.report(model)
    assert report.summary["fused"] == 2
    assert report.sites[0].mask == "causal, padding"


def test_optimizer_steps_follow_the_original(llama_with):
    losses = {}
    for patched in (False, True):
        model = llama_with(layers=1).double().train()
        if patched:
            attnpatch.patch(model)
        optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.arange(3, 15).view(2, 6)
        losses[patched] = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses[patched].append(loss.item())
    torch.testing.assert_close(losses[True], losses[False])
    assert losses[True][-1] < losses[True][0]


class Biased(nn.Module):
    """Attention with a learned relative bias, as in T5 and Swin."""

    def __init__(self, heads=2, seqlen=6, dim=4):
        super().__init__()
        self.table = nn.Parameter(torch.randn(heads, 2 * seqlen - 1))
        self.project = nn.Linear(dim, dim)
        self.checkpoint = False

    def attend(self, x):
        seqlen = x.shape[-2]
        index = torch.arange(seqlen)[:, None] - torch.arange(seqlen) + seqlen - 1
        q = self.project(x)
        scores = q @ x.transpose(-1, -2) + self.table[:, index]
        keep = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
        return scores.masked_fill(~keep, -torch.inf).softmax(-1) @ x

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False) if self.checkpoint else self.attend(x)


def biased_gradients(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    return {"x": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpoint"])
def test_learned_bias(checkpointed):
    model, x = Biased().double(), torch.randn(3, 2, 6, 4, dtype=torch.float64)
    theirs = biased_gradients(model, x)
    assert theirs["table"].abs().sum() > 0
    model.checkpoint = checkpointed
    attnpatch.patch(model, strict=True)
    assert_same_gradients(biased_gradients(model, x), theirs)
    (site,) = attnpatch.report(model).sites
    assert (site.status, site.mask) == ("fused", "causal, streamed bias [2, 6, 6]")


def test_gradient_checkpointing_of_a_hugging_face_model(llama_with):
    """Each layer is a nested graph; its site must be found, or the report must say that it was not."""
    model = llama_with().double().train()
    ids = torch.randint(3, 60, (2, 10))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    theirs = gradients(model, **batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    attnpatch.patch(model)
    assert_same_gradients(gradients(model, **batch), theirs)
    report = attnpatch.report(model)
    assert report.summary["fused"] == 2 or report.gaps


def test_sites_of_nested_graphs_dispatch_in_order():
    """A checkpointed attention between two plain ones: each row counts its own calls and its own mask."""

    def attend(x, mask):
        return (x @ x.transpose(-1, -2) + mask).softmax(-1) @ x

    class Model(nn.Module):
        def forward(self, x, a, b):
            x = attend(x, a)
            x = checkpoint(attend, x, b, use_reentrant=False)
            return attend(x, a)

    x = torch.randn(2, 2, 5, 4, requires_grad=True)
    args = x, torch.randn(5, 5), torch.randn(2, 1, 1, 5)
    model = Model()
    expected = model(*args)
    attnpatch.patch(model)
    torch.testing.assert_close(model(*args), expected)
    report = attnpatch.report(model)
    assert sorted(site.mask for site in report.sites) == ["streamed bias [2, 1, 1, 5]"] + ["streamed bias [5, 5]"] * 2
    assert all(sum(d.calls for d in site.dispatches) == 1 for site in report.sites)


def test_dropout_in_training_is_refused_and_still_trains(tiny_with, ids):
    model = attnpatch.patch(tiny_with(dropout=0.2).train())
    model(ids).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    reasons = {site.reason for site in attnpatch.report(model).sites}
    assert all("dropout with p=0.2 is active in training" in reason for reason in reasons)


def test_nothing_is_detached(tiny, ids):
    """LongLive#61: a kernel without a backward loses gradients in silence."""
    attnpatch.patch(tiny)(ids).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in tiny.named_parameters() if "head" not in n)


def test_sdpa_backward_with_grouped_heads():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    args = [torch.randn(2, h, 6, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    grad = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    ours = torch.autograd.grad(torch.compile(attend, backend="attnpatch")(*args), args, grad)
    for a, b in zip(ours, torch.autograd.grad(attend(*args), args, grad), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast(llama_with):
    """Attention is fused in bfloat16, and the loss and its gradients are right."""
    model, ids = llama_with().train(), torch.randint(3, 60, (2, 10))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(input_ids=ids, labels=ids).loss
        attnpatch.patch(model)
        loss = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    weight = model.model.layers[0].self_attn.q_proj.weight
    ours, theirs = (torch.autograd.grad(x, weight)[0] for x in (loss, expected))
    assert (ours - theirs).norm() < 4 * torch.finfo(torch.bfloat16).eps * theirs.norm()
    report = attnpatch.report(model)
    assert [(site.status, site.dtype) for site in report.sites] == [("fused", "bfloat16")] * 2
