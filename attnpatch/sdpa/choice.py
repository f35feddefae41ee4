"""What torch takes for a call, and why each other backend refuses it: by running the call, not by a table.

``torch._fused_sdp_choice`` and ``torch.backends.cuda.SDPAParams`` are not torch's public interface: they are looked
up when they are asked, and a torch without them costs a note.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from attnpatch.sdpa.apart import each_apart
from attnpatch.sdpa.cases import CASES, REMEDIES, Case, build

OPERATORS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "aten::_scaled_dot_product_attention_math": "math",
}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "overrideable": SDPBackend.OVERRIDEABLE,
    "math": SDPBackend.MATH,
}
FUSED = {"cpu": ("flash",), "cuda": ("flash", "efficient", "cudnn")}
# How torch begins its list of one backend's reasons when no backend is left.
HEADERS = {
    "Flash attention kernel not used because:": "flash",
    "Memory efficient kernel not used because:": "efficient",
    "CuDNN attention kernel not used because:": "cudnn",
}


class Choice(NamedTuple):
    """What became of a call.

    Args:
        case: the call.
        runs: the backend that the profiler saw, or the error.
        predicted: what ``torch._fused_sdp_choice`` says; None without it.
        others: of each other fused backend of the device, why not it.
        remedies: of a call that runs on math, every single change that was tried and brought it to a fused kernel.
    """

    case: Case
    runs: str
    predicted: str | None
    others: dict[str, str]
    remedies: tuple[str, ...]


class Choices(NamedTuple):
    """What became of every call on one torch and device; ``notes`` say what could not be asked or differs."""

    torch: str
    device: str
    notes: tuple[str, ...]
    choices: tuple[Choice, ...]


def examine(device: str, cases: tuple[Case, ...] = CASES) -> Choices:
    """Run every case on a device, ``"cpu"`` or ``"cuda"``."""
    run = each_apart if device == "cuda" else map  # torch may take a kernel that reads out of place
    choices = tuple(run(partial(_examine, device=device), cases))
    return Choices(torch.__version__, _name(device), tuple(_notes(choices, device)), choices)


def _examine(case: Case, device: str) -> Choice:
    call = build(case, device)
    predicted, runs = _predicted(call), _ran(call)
    if "CUDA error" in runs:  # then the device answers no more
        return Choice(case, runs, predicted, {}, ())
    others = {name: _reason(name, runs, case, call) for name in FUSED[device] if name != runs}
    return Choice(case, runs, predicted, others, tuple(_remedies(case, call, device)) if runs == "math" else ())


def _remedies(case: Case, call: dict[str, Any], device: str) -> Iterator[str]:
    """Every single change that brings a call from math to a fused kernel, tried here."""
    for name in FUSED[device]:
        if not _forced(name, call)[0]:
            yield f"with sdpa_kernel(SDPBackend.{BACKENDS[name].name}): it can, and comes after math in torch's order"
    for text, applies, change in REMEDIES:
        if applies(case) and _ran(build(case._replace(**change(case)), device)) in FUSED[device]:
            yield text


def _ran(call: dict[str, Any]) -> str:
    """The backend that the call runs on, as the profiler sees it."""
    try:
        with _captured_stderr([]), profile(activities=[ProfilerActivity.CPU]) as trace:
            _attend(call)
    except RuntimeError as error:
        return f"fails: {_sentence(str(error))}"
    return next((OPERATORS[event.name] for event in trace.events() or () if event.name in OPERATORS), "unknown")


def _attend(call: dict[str, Any]) -> None:
    """Run the call to its end: errors of a GPU come later than the call that made them."""
    F.scaled_dot_product_attention(**call)
    if call["query"].is_cuda:
        torch.cuda.synchronize()


def _predicted(call: dict[str, Any]) -> str | None:
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return None
    number = choose(**call)
    return next((name for name, backend in BACKENDS.items() if backend.value == number), f"backend {number}")


def _reason(name: str, runs: str, case: Case, call: dict[str, Any]) -> str:
    """Why a call does not run on a backend."""
    on_cuda = call["query"].is_cuda and _can_use(name) is not None
    refused, texts = _asked(name, call) if on_cuda else _forced(name, call)
    if not refused:
        return f"could run, after {runs} in torch's order"
    return " ".join(map(_sentence, texts)) or _documented(case)


def _documented(case: Case) -> str:
    """The one refusal without a text: check_attn_mask_shape in torch's sdp_utils_cpp.h."""
    if case.mask == "mask requires grad":
        return "torch gives no reason; its sdp_utils_cpp.h refuses a mask that requires a gradient"
    return "torch gives no reason"


def _can_use(name: str) -> Any:
    """``torch.backends.cuda.can_use_..._attention``; None where it or its parameters are missing."""
    if not hasattr(torch.backends.cuda, "SDPAParams"):
        return None
    return getattr(torch.backends.cuda, f"can_use_{name}_attention", None)


def _asked(name: str, call: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether ``can_use_..._attention`` refuses, and what it warns of."""
    parameters = torch.backends.cuda.SDPAParams(*call.values())  # in the order of sdpa's signature
    with _captured_warnings() as texts:
        refused = not _can_use(name)(parameters, True)
    return refused, texts


def _forced(name: str, call: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether a call that may run on one backend alone fails, and torch's reasons for that backend."""
    with _captured_warnings() as texts, sdpa_kernel([BACKENDS[name]]):
        try:
            _attend(call)
            return False, []
        except RuntimeError as error:
            failure = str(error)
    if "No available kernel" in failure:
        return True, _reasons_of(name, texts)
    return True, [failure]


def _reasons_of(name: str, texts: list[str]) -> list[str]:
    """The texts between one backend's header and the next."""
    found, current = [], None
    for text in texts:
        header = HEADERS.get(text.strip())
        current = header or current
        if current == name and not header:
            found.append(text)
    return found


@contextmanager
def _captured_warnings() -> Iterator[list[str]]:
    """Fills a list with torch's warnings: Python's, and those of bindings that write theirs to stderr."""
    texts: list[str] = []
    written: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _captured_stderr(written):
            yield texts
    texts += [re.sub(r" ?\(Triggered internally at .*", "", str(warning.message)) for warning in caught]
    texts += re.findall(r"^\[W.*?\] Warning: (.*?)(?: \(function .*\))?$", "".join(written), re.MULTILINE)


@contextmanager
def _captured_stderr(written: list[str]) -> Iterator[None]:
    """What C++ writes to stderr goes into a list: the profiler writes there, too."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            written.append(file.read().decode(errors="replace"))


def _sentence(text: str) -> str:
    """Torch's text without the sizes of this call, which the row has."""
    first = text.strip().partition("\n")[0]
    return re.split(r"\b(?:but )?(?:[Gg]ot|Query\.sizes)\b", first)[0].strip(" .,:") + "."


def _notes(choices: tuple[Choice, ...], device: str) -> Iterator[str]:
    """What this torch could not be asked, and where its own prediction is wrong."""
    if not hasattr(torch, "_fused_sdp_choice"):
        yield "this torch has no torch._fused_sdp_choice: the choice is what the profiler saw, alone"
    if device == "cuda" and any(_can_use(name) is None for name in FUSED[device]):
        yield "this torch lacks SDPAParams or a can_use_..._attention: reasons are those of a call forced to a backend"
    wrong = [choice for choice in choices if choice.predicted not in (None, choice.runs)]
    if wrong:
        yield f"torch._fused_sdp_choice says otherwise for {len(wrong)} calls, first: {wrong[0].case.describe()}"


def _name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    with suppress(OSError), open("/proc/cpuinfo") as file:
        names = re.findall(r"^model name\s*: (.*)$", file.read(), re.MULTILINE)
        return f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return platform.processor() or platform.machine()
