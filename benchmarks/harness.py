"""Timing that does not fool itself: CUDA graphs over rotated buffers, interleaved rounds, two clocks, medians.

A power-capped GPU runs a short burst faster than a long load, so each figure says which of the two it is:

    burst   right after a pause, for BURST_MS
    hot     after LOAD_MS of the same work, for HOT_MS
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Of all inputs; a CPU only runs each case once, to test it."""

ROUNDS = 3
PAUSE_S = 0.15
BURST_MS, LOAD_MS, HOT_MS = 6, 110, 40
PAST_L2 = 256 << 20
"""Bytes that one graph touches, so that no call finds its data in L2."""


class Captured:
    """``function`` over each of ``inputs`` in turn, as one CUDA graph."""

    def __init__(self, function: Callable[[Any], Any], inputs: Sequence[Any]) -> None:
        self.calls = len(inputs)
        self.graph = torch.cuda.CUDAGraph()
        function(inputs[0])  # compiles, and lets libraries choose their plans, outside of the capture
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for x in inputs:
                function(x)

    def time(self, budget_ms: float) -> float:
        """Milliseconds per call, from as many replays as take about ``budget_ms``."""
        once = self._time(1) * self.calls
        return self._time(max(1, round(budget_ms / once)))

    def _time(self, replays: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            self.graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / replays / self.calls


def interleave(captured: dict[str, Captured], rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Median ms of each, by clock: ``{name: {"burst": ms, "hot": ms}}``; a new random order each round."""
    times: dict[str, dict[str, list[float]]] = {name: {"burst": [], "hot": []} for name in captured}
    for round_ in range(rounds):
        for name in random.Random(round_).sample(sorted(captured), len(captured)):
            time.sleep(PAUSE_S)
            times[name]["burst"].append(captured[name].time(BURST_MS))
            captured[name].time(LOAD_MS)
            times[name]["hot"].append(captured[name].time(HOT_MS))
    return {name: {clock: statistics.median(ms) for clock, ms in by.items()} for name, by in times.items()}


def environment(commit: str | None) -> dict[str, str]:
    """What the figures were measured with; ``commit`` for a copy of the tree without its history."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "cudnn": str(torch.backends.cudnn.version()),
        "flashinfer": _version("flashinfer-python"),
        "fa3": _version("fa3-fwd"),
        "commit": commit or _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    run = subprocess.run(git, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def write_results(folder: Path, env: dict[str, str], rows: list[dict[str, Any]]) -> Path:
    """Write ``<date>-<gpu>.json``; rows of other suites that the file already holds stay."""
    gpu = re.sub(r"[^a-z0-9]+", "-", env["gpu"].lower().removeprefix("nvidia ")).strip("-")
    path = folder / f"{env['date']}-{gpu}.json"
    measured = {row["suite"] for row in rows}
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in before if row["suite"] not in measured]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"env": env, "rows": kept + rows}, indent=1) + "\n")
    return path
