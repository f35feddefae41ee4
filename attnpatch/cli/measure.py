"""Measure one model at one length in a process of its own: ``python -m attnpatch.cli.measure --help``.

Prefill time, peak memory above the loaded and warmed model, and decode speed. It prints one line of JSON.
A fresh process per measurement, because what an earlier run left in the allocator would hide the growth of a
later one.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

IMPLEMENTATIONS = ("eager", "sdpa", "attnpatch")
"""Hugging Face's two on a CPU, and the eager model after ``attnpatch.patch``."""

WARM_LENGTHS = (48, 80)
"""Two short prompts first: at the second length torch.compile makes the length dynamic."""

RUNS, ENOUGH_SECONDS = 4, 12.0
"""The first run, of which memory is measured, warms up for the others, unless it alone takes ENOUGH_SECONDS."""


class MeasurementFailed(RuntimeError):
    """The process that measured ended with an error."""


class Measurement(NamedTuple):
    """What :func:`measure` found.

    Args:
        implementation: one of IMPLEMENTATIONS.
        seqlen: tokens of the prompt.
        prefill_ms: median time of a forward over the prompt, ``logits_to_keep=1``.
        peak_bytes: growth of peak memory in that forward; None where the system cannot tell.
        decode_tokens_per_s: tokens per second of ``generate()`` after the prompt; None when not asked for.
    """

    implementation: str
    seqlen: int
    prefill_ms: float
    peak_bytes: int | None
    decode_tokens_per_s: float | None


def measure_in_child(
    implementation: str,
    seqlen: int,
    dtype: str = "float32",
    device: str = "cpu",
    new_tokens: int = 0,
    model: str | None = None,
    config: str | None = None,
) -> Measurement:
    """Run :func:`measure` in a fresh process, on what :func:`load` makes of ``model`` and ``config``.

    Raises:
        MeasurementFailed: the process failed; the message ends with what it printed last.
    """
    command = [sys.executable, "-m", "attnpatch.cli.measure", "--implementation", implementation]
    command += [
        "--seqlen",
        str(seqlen),
        "--dtype",
        dtype,
        "--device",
        device,
        "--new-tokens",
        str(new_tokens),
    ]
    command += ["--model", model] if model else []
    command += ["--config", config] if config else []
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise MeasurementFailed(f"measuring {implementation} at {seqlen} tokens failed:\n{child.stderr[-2000:]}")
    return Measurement(**json.loads(child.stdout.splitlines()[-1]))


def measure(model: Any, implementation: str, seqlen: int, new_tokens: int) -> Measurement:
    """Measure a loaded (and, for "attnpatch", patched) model on random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, seqlen), generator=generator).to(model.device)

    def prefill(length: int = seqlen) -> None:
        with torch.inference_mode():
            model(ids[:, :length], logits_to_keep=1)

    for length in WARM_LENGTHS:
        prefill(min(length, seqlen))
    times: list[float] = []
    peak = peak_growth(lambda: times.append(elapsed_ms(prefill, model.device)), model.device)
    while len(times) < RUNS and sum(times) < ENOUGH_SECONDS * 1e3:
        times.append(elapsed_ms(prefill, model.device))
    speed = decode_speed(model, ids, new_tokens) if new_tokens else None
    return Measurement(implementation, seqlen, statistics.median(times[1:] or times), peak, speed)


def elapsed_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds that ``run`` takes, by CUDA events on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def peak_growth(run: Callable[[], Any], device: torch.device) -> int | None:
    """Most bytes by which memory in use rose above its present level while ``run`` ran; None if unknown.

    On a GPU the allocator's count; on a CPU the process's resident set, as Linux keeps it.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with _freed_memory_returned():
        before, known = _resident("VmRSS"), _reset_resident_peak()
        run()
        return _resident("VmHWM") - before if known else None


@contextmanager
def _freed_memory_returned() -> Iterator[None]:
    """Let glibc return freed tensors to the system at once, so that a peak does not depend on holes in its heap.

    Three runs of one case differed by up to 100 MiB without this. It slows a prefill down by a third: afterwards the
    thresholds are those that glibc's own adjustment ends at.
    """
    libc = ctypes.CDLL(None)
    mallopt, trim = getattr(libc, "mallopt", lambda *_: 0), getattr(libc, "malloc_trim", lambda _: 0)
    mmap_threshold, trim_threshold = -3, -1
    mallopt(mmap_threshold, 2**20)
    trim(0)
    try:
        yield
    finally:
        mallopt(mmap_threshold, 2**25)
        mallopt(trim_threshold, 2**26)


def _reset_resident_peak() -> bool:
    """Make the present resident set the peak; False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    """VmRSS (resident now) or VmHWM (its peak) of this process, in bytes; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


class TokenClock:
    """A streamer for ``generate()`` that notes when each token arrives; the first call is the prompt."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []

    def put(self, _: Any) -> None:
        """Called by ``generate()`` with the prompt, then with every token."""
        self.arrivals.append(time.perf_counter())

    def end(self) -> None:
        """Called by ``generate()`` at the end."""

    def tokens_per_s(self) -> float:
        """From the median time between two tokens; the first comes from the prefill and does not count."""
        return 1 / statistics.median(later - sooner for sooner, later in pairwise(self.arrivals[1:]))


def decode_speed(model: Any, ids: torch.Tensor, new_tokens: int) -> float:
    """Tokens per second of greedy ``generate()`` after the prompt ``ids``, compiled graphs warm."""
    for _ in range(2):
        clock = TokenClock()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            streamer=clock,
        )
    return clock.tokens_per_s()


def load(model: str | None, config: str | None, dtype: torch.dtype, attn_implementation: str, device: str) -> Any:
    """The causal language model at ``model`` (None: SmolLM2), or of random weights after the config at ``config``.

    Raises:
        CheckpointMissing: a package or the checkpoint is not installed.
        OSError: there is no such path, or no checkpoint there that can be read.
        ValueError: it is of no causal language model.
    """
    from attnpatch.cli.checkpoint import CheckpointMissing, load_model, plain_errors

    if config is None:
        return load_model(model, dtype, attn_implementation, device)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise CheckpointMissing("transformers is not installed: pip install 'attnpatch[hf]'") from None
    if not Path(config).exists():  # transformers would look for it on its hub
        raise FileNotFoundError(f"--config {config}: there is no such file or folder")
    torch.manual_seed(0)
    with plain_errors(config), torch.device(device):  # billions of random numbers take a CPU a minute
        found = AutoConfig.from_pretrained(config)
        made = AutoModelForCausalLM.from_config(found, dtype=dtype, attn_implementation=attn_implementation)
    return made.to(device).eval()


def load_implementation(
    implementation: str, model: str | None, config: str | None, dtype: torch.dtype, device: str
) -> Any:
    """Load Hugging Face's eager or sdpa model, or (attnpatch) the eager one, patched."""
    loaded = load(model, config, dtype, "eager" if implementation == "attnpatch" else implementation, device)
    if implementation == "attnpatch":
        import attnpatch

        attnpatch.patch(loaded)
    return loaded


def main() -> None:
    """Measure what the arguments say and print it as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m attnpatch.cli.measure", description=__doc__)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, required=True)
    parser.add_argument("--seqlen", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=0)
    parser.add_argument("--model", help="path of a checkpoint; default SmolLM2-135M-Instruct")
    parser.add_argument("--config", help="path of a config, for random weights instead")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    model = load_implementation(args.implementation, args.model, args.config, dtype, args.device)
    print(json.dumps(measure(model, args.implementation, args.seqlen, args.new_tokens)._asdict()))


if __name__ == "__main__":
    main()
