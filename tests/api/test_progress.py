"""A call that compiles for long says so, and only such a call."""

import io
import logging
import time

import pytest
import torch
from rich.console import Console

import attnpatch
from attnpatch import progress


@pytest.fixture
def terminal(monkeypatch):
    """What is shown on a terminal whose user has no patience."""
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    stream = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=stream, force_terminal=True))
    return stream


def slow_backend(gm, example_inputs):
    time.sleep(0.4)
    return gm.forward


def call(compiled, x):
    with progress.shown("Llama"):
        return compiled(x)


def test_a_long_compilation(terminal, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "attnpatch")
    compiled = torch.compile(lambda x: x + 1, backend=slow_backend)
    call(compiled, torch.zeros(2))
    assert "attnpatch: Llama compiles for new shapes ..." in terminal.getvalue()
    assert [r.getMessage() for r in caplog.records if r.name == "attnpatch"] == ["Llama compiles for new shapes"]
    written = terminal.getvalue()
    monkeypatch.setattr(progress.threading, "Timer", None)  # nothing waits beside a call that compiles nothing
    call(compiled, torch.zeros(2))
    assert terminal.getvalue() == written


def test_what_fails_is_taken_away(terminal):
    def failing_backend(gm, example_inputs):
        time.sleep(0.1)
        raise RuntimeError("no")

    with pytest.raises(Exception, match="no"):
        call(torch.compile(lambda x: x * 3, backend=failing_backend), torch.zeros(2))
    assert "compiles" in terminal.getvalue()
    left = terminal.getvalue()
    time.sleep(0.3)
    assert terminal.getvalue() == left, "the spinner stopped"


def test_a_short_compilation_and_somebody_elses(terminal, monkeypatch):
    torch.compile(lambda x: x + 2, backend=slow_backend)(torch.zeros(2))
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    call(torch.compile(lambda x: x + 3, backend=slow_backend), torch.zeros(2))
    assert terminal.getvalue() == ""


def test_no_terminal(monkeypatch, terminal, capsys):
    monkeypatch.setattr(progress, "Console", Console)
    call(torch.compile(lambda x: x + 4, backend=slow_backend), torch.zeros(2))
    assert capsys.readouterr().err == ""


def test_a_patched_model_is_named(terminal):
    model = attnpatch.patch(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    model._compiled_call_impl.compiled = torch.compile(lambda module, x: module[0](x), backend=slow_backend)
    model(torch.zeros(2))
    assert "attnpatch: Sequential compiles for new shapes ..." in terminal.getvalue()
