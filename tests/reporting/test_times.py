"""Times of attentions: taken on request alone, by a clock of the test's own, and told in shares of each phase."""

from types import SimpleNamespace

import pytest
import torch

import attnpatch
from attnpatch import Report, dispatch, timing
from attnpatch.reporting import DispatchReport, PhaseTime, timed
from attnpatch.reporting.text import milliseconds, percent
from attnpatch.timing import Watch

CPU_CALL = SimpleNamespace(q=SimpleNamespace(device=torch.device("cpu")))


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for ``clock.passes(seconds)``."""
    clock = SimpleNamespace(time=100.0)
    clock.passes = lambda seconds: setattr(clock, "time", clock.time + seconds)
    monkeypatch.setattr(timing, "now", lambda: clock.time)
    return clock


def test_watch(clock):
    """Each attention from its begin to its end, the run with all that is between them."""
    watch = Watch()
    clock.passes(1)
    assert watch.attention(lambda call: clock.passes(2) or "first", CPU_CALL) == "first"
    clock.passes(4)
    watch.attention(lambda call: clock.passes(8), CPU_CALL)
    clock.passes(16)
    assert watch.stop()
    assert (watch.attentions, watch.whole) == ([2, 8], 31)


class FakeEvent:
    """An event of a device on which a second passes between any two."""

    made = 0

    def __init__(self, enable_timing):
        assert enable_timing
        self.stream = None

    def record(self, stream):
        FakeEvent.made += 1
        self.stream, self.at = stream, FakeEvent.made

    def elapsed_time(self, end):
        assert self.stream == end.stream == "stream of cuda:1"
        return (end.at - self.at) * 1e3


@pytest.fixture
def cuda(monkeypatch):
    """CUDA as :mod:`attnpatch.timing` sees it; ``.waits`` are the devices waited for, ``.captures`` may be set."""
    state = SimpleNamespace(waits=[], captures=False)
    fakes = {
        "Event": FakeEvent,
        "current_stream": lambda device: f"stream of {device}",
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: state.captures,
        "synchronize": lambda device=None: state.waits.append(device),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return state


GPU_CALL = SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda", 1)))


def test_watch_on_a_device(clock, cuda):
    """By events, on the stream of the call's device; the device is waited for at both ends and not in between."""
    watch = Watch()
    for _ in range(2):
        watch.attention(lambda call: clock.passes(5), GPU_CALL)
    assert cuda.waits == [None]
    assert watch.stop()
    assert cuda.waits == [None, torch.device("cuda", 1)]
    assert (watch.attentions, watch.whole) == ([1, 1], 10)


def test_a_captured_attention_has_no_time(clock, cuda):
    cuda.captures = True
    watch = Watch()
    assert watch.attention(lambda call: "result", GPU_CALL) == "result"
    assert not watch.stop()
    assert (watch.attentions, cuda.waits) == ([], [])


def test_no_watch_unless_asked_for(monkeypatch):
    monkeypatch.setattr(dispatch, "Watch", lambda: pytest.fail("a watch was made"))
    with dispatch.recording() as recorded:
        assert recorded.watch is None


def test_asking_ends_with_the_block():
    with pytest.raises(KeyError), timed(), timed():
        raise KeyError
    with dispatch.recording() as recorded:
        assert recorded.watch is None


def test_a_run_with_another_inside_is_not_timed(clock):
    """Such as one that captures its next call: its time would be that of both."""
    with timed(), dispatch.recording() as outer, dispatch.recording() as inner:
        clock.passes(3)
    assert outer.watch is None
    assert inner.watch.whole == 3


class Two(torch.nn.Module):
    """Two attentions, the second with three times as many heads."""

    def forward(self, q, k, v):
        first = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        q, k, v = (x.repeat(1, 3, 1, 1) for x in (q, k, v))
        return first, (q @ k.transpose(-1, -2)).softmax(-1) @ v


@pytest.fixture(scope="module")
def model():
    torch._dynamo.reset()
    return attnpatch.patch(Two())


@pytest.fixture
def ticking(clock, monkeypatch):
    """Every attention takes as many seconds as it has heads."""

    def load(name, real=dispatch.load_backend):
        def run(call):
            clock.passes(call.num_heads)
            return backend.run(call)

        backend = real(name)
        return backend._replace(run=run)

    real_planned = dispatch.planned

    def planned(make, call, names):
        backend, *rest = real_planned(make, call, names)
        return load(backend.name), *rest

    monkeypatch.setattr(dispatch, "planned", planned)
    return clock


def test_a_model_is_timed_on_request_alone(model, ticking):
    """Outputs and calls are those of a run without; shares are of all sites of a phase."""
    inputs = [torch.randn(1, 2, 12, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    with torch.no_grad():
        plain = model(*inputs)
        before = attnpatch.report(model)
        with timed():
            timed_outputs = model(*inputs)
        model(*inputs)
    after = attnpatch.report(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, timed_outputs, strict=True))
    assert before.times == []
    assert [(d.calls, d.timed_calls, d.seconds) for site in before.sites for d in site.dispatches] == [(1, 0, None)] * 2
    assert after.times == [PhaseTime("prefill", 1, 8.0)]
    ways = [(d.calls, d.timed_calls, d.seconds) for site in after.sites for d in site.dispatches]
    assert ways == [(3, 1, 2.0), (3, 1, 6.0)]
    assert " time" not in str(before)
    assert "prefill: 8,000 ms per run, of which attention 100% (1 timed)" in str(after)


@pytest.fixture
def timed_report(site, report_of):
    """Four layers, of which two took 10 and 30 of 80 seconds of one prefill, and none is timed in its replays."""

    def make(*seconds):
        return [
            site(
                f"layers.{i}",
                dispatches=[
                    DispatchReport("prefill", "triton.prefill", 3, False, "first choice", "causal", 2, s),
                    DispatchReport("decode", "triton.decode", 4, False, "first choice", "none", 1, 0.5),
                    DispatchReport("decode", "triton.decode", 9, True, "first choice", "none"),
                ],
            )
            for i, s in enumerate(seconds)
        ]

    report = report_of(*make(10.0, 30.0))
    report.times = [PhaseTime("prefill", 2, 80.0), PhaseTime("decode", 1, 4.0)]
    return report


def test_layers_that_differ_in_time_alone_are_one_row_with_the_share_of_all(timed_report):
    lines = str(timed_report).splitlines()
    (row,) = [line for line in lines if "layers.0-1 " in line]
    assert row.split()[-2:] == ["prefill", "50%"]
    assert any(line.rstrip().endswith("decode 25%") for line in lines)
    assert "prefill: 40,000 ms per run, of which attention 50% (2 timed)" in lines
    assert "decode: 4,000 ms per run, of which attention 25% (1 timed)" in lines


def test_the_page_has_the_time_of_each_phase(timed_report, tmp_path):
    timed_report.to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    cells = [part.split("</td>")[0] for part in text.split("<td>")[1:]]
    per_phase = cells[cells.index("attention on triton.prefill") - 1 :]
    assert per_phase[:24] == [
        *("prefill", "attention on triton.prefill", "20,000 ms", "50%"),
        *("prefill", "all else", "20,000 ms", "50%"),
        *("prefill", "whole run", "40,000 ms", "100%"),
        *("decode", "attention on triton.decode", "1,000 ms", "25%"),
        *("decode", "all else", "3,000 ms", "75%"),
        *("decode", "whole run", "4,000 ms", "100%"),
    ]
    assert per_phase[24:] == [
        *("prefill", "triton.prefill", "3", "10,000 ms", "causal", "first choice"),
        *("decode", "triton.decode", "4", "500 ms", "none", "first choice"),
        *("decode", "triton.decode", "9 replayed by a CUDA graph", "not timed", "none", "first choice"),
    ]


def test_an_untimed_page_has_no_times(site, report_of, tmp_path):
    report_of(site()).to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "Time per phase" not in text
    assert "time per call" not in text


def test_times_in_a_file(timed_report, tmp_path):
    timed_report.to_json(tmp_path / "report.json")
    loaded = Report.from_json(tmp_path / "report.json")
    assert loaded.times == timed_report.times
    assert (loaded.sites, str(loaded)) == (timed_report.sites, str(timed_report))


def test_times_are_no_difference(timed_report, site, report_of):
    untimed = report_of(*timed_report.sites)
    assert not untimed.diff(timed_report)


@pytest.mark.parametrize(
    ("part", "said"), [(1, "100%"), (0.123, "12%"), (0.0996, "10%"), (0.0994, "9.9%"), (0.004, "0.4%"), (0, "0.0%")]
)
def test_percent(part, said):
    assert percent(part) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 ms"), (1.5e-6, "0.00150 ms"), (0.000307, "0.307 ms"), (0.0123, "12.3 ms"), (1.2, "1,200 ms")],
)
def test_milliseconds(seconds, said):
    assert milliseconds(seconds) == said


def test_two_that_time_at_once():
    """Who leaves first does not end the other's timing, who leaves last ends all."""
    first, second = dispatch.timed(), dispatch.timed()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with dispatch.recording() as recorded:
        assert recorded.watch is not None
    second.__exit__(None, None, None)
    with dispatch.recording() as recorded:
        assert recorded.watch is None
