"""Masks that one device makes for attention on another, as a model over several GPUs does. The second here is meta."""

import pytest
import torch
from torch import nn

import attnpatch
from attnpatch.graph import value

B, H, S, D = 2, 4, 12, 8
FIRST, SECOND = torch.device("cpu"), torch.device("meta")


class TwoLayers(nn.Module):
    """A mask made on the first device, and an attention on each of both."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x, y, ids, slopes):
        mask = self.mask(ids, slopes)
        moved = mask.to(SECOND)
        return self.attend(x, mask), self.attend(y, moved), self.attend(y * 2, moved)

    def attend(self, x, mask):
        scores = x @ x.transpose(2, 3) * 0.1
        scores = scores + mask if mask.dtype == torch.float32 else scores.masked_fill(~mask, -torch.inf)
        return torch.softmax(scores, -1) @ x


def rows():
    return torch.arange(S, device=FIRST)


def padding(ids, slopes):
    return (rows()[:, None] >= rows()[None, :])[None, None] & (ids != 0)[:, None, None, :]


def documents(ids, slopes):
    return (ids[:, None, :, None] == ids[:, None, None, :]) & (rows()[:, None] >= rows()[None, :])


def lengths(ids, slopes):
    return rows()[None, None, None, :] < ids[:, 0, None, None, None]


def bias(ids, slopes):
    return slopes[:, None, None] * 1.0 + torch.randn(S, S, device=FIRST)


def alibi(ids, slopes):
    return slopes[None, :, None, None] * (rows()[None, :] - rows()[:, None])


def offset(ids, slopes):
    return rows()[None, :] <= rows()[:, None] + ids[0, 0]


def rewritten(mask):
    """The graph that Dynamo makes of the layers, rewritten."""
    found = []

    def backend(gm, example_inputs):
        found.extend(attnpatch.rewrite(gm, example_inputs))
        return gm.forward

    x, y = (torch.empty(B, H, S, D, device=device) for device in (FIRST, SECOND))
    with torch.no_grad():
        torch.compile(TwoLayers(mask), backend=backend, fullgraph=True)(x, y, torch.ones(B, S).long(), torch.ones(H))
    return found


@pytest.mark.parametrize("mask", [padding, documents, lengths, bias, alibi, offset], ids=lambda f: f.__name__)
def test_terms_are_where_their_attention_is(mask):
    gm, report = rewritten(mask)
    assert (report.summary["fused"], report.summary["refused"]) == (3, 0), report.sites
    operators = [n for n in gm.graph.nodes if n.target is torch.ops.attnpatch.attention.default]
    devices = [{value(x).device for x in n.all_input_nodes if isinstance(value(x), torch.Tensor)} for n in operators]
    assert devices == [{FIRST}, {SECOND}, {SECOND}]
    moved = [n.args[0] for n in gm.graph.nodes if n.target == "to" and SECOND in n.args]
    assert moved
    assert len(moved) == len(set(moved)), "once for all layers of a device"
