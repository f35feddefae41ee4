"""cuda_graphs="auto", the default: replays where there can be some, and not a word where there are none."""

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnpatch
from attnpatch import backend
from attnpatch.options import Options, from_compile
from attnpatch.replaying import Replays


def said(caplog):
    return [
        (r.levelno, r.getMessage())
        for r in caplog.records
        if "CUDA graph" in r.getMessage() or "cuda_graphs" in r.getMessage()
    ]


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", {True: True, "auto": False}), ("cuda", {True: True, "auto": True})]
)
def test_where_replays_are_tried(device, expected):
    with FakeTensorMode():
        inputs = [1, torch.empty(1), torch.empty(1, device=device)]
    for value, wanted in {**expected, False: False}.items():
        assert backend._may_be_replayed(inputs, Options(cuda_graphs=value)) is wanted
    assert Options().cuda_graphs == "auto"


def test_one_kind_of_cuda_graphs():
    assert not from_compile("reduce-overhead", {}).replays
    assert not from_compile(None, {"triton.cudagraphs": True}).replays
    assert from_compile("default", {}).replays


@pytest.mark.parametrize(("options", "level"), [({}, None), ({"cuda_graphs": True}, logging.WARNING)], ids=str)
def test_what_is_said_on_a_cpu(model_with, prompt, caplog, options, level):
    attnpatch.patch(model_with(num_hidden_layers=1), log_level="debug", **options)(**prompt())
    assert [x for x, _ in said(caplog)] == ([level] if level else [])


@pytest.mark.parametrize(("options", "level"), [({}, logging.DEBUG), ({"cuda_graphs": True}, logging.WARNING)], ids=str)
def test_what_is_said_of_a_step_that_cannot_be_captured(model_with, run, caplog, monkeypatch, options, level):
    def record(*_):
        raise RuntimeError("no capture here")

    monkeypatch.setattr(backend, "_may_be_replayed", lambda *_: True)
    model = attnpatch.patch(model_with(num_hidden_layers=1), log_level="debug", cache="buffered", **options)
    model._compiled_call_impl.collector.replays = Replays(record, "cpu")
    run(model, None)
    assert (level, "a step is not replayed from a CUDA graph: no capture here") in said(caplog)
    assert {x for x, _ in said(caplog)} == {level}
