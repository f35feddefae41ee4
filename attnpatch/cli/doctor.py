"""What attnpatch found on this machine, what is missing, and what that costs.

Every check returns findings; the exit code is 1 when one of them makes attnpatch unusable.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import attnpatch
from attnpatch import dispatch
from attnpatch.cli import checkpoint

OK, ABSENT, BROKEN = "[green]✓[/]", "[yellow]-[/]", "[red]✗[/]"


class Finding(NamedTuple):
    """One line of the table.

    Args:
        name: what was looked for.
        found: what is there.
        level: OK, ABSENT (works without it, at the stated cost) or BROKEN (attnpatch is unusable).
        cost: what its absence costs and how to get it; empty when it is there.
    """

    name: str
    found: str
    level: str = OK
    cost: str = ""


class Requirement(NamedTuple):
    """A package, the least version of it, and what it costs to be without (BROKEN or ABSENT)."""

    name: str
    minimum: tuple[int, ...]
    level: str
    cost: str


REQUIREMENTS = (
    Requirement("torch", (2, 11), BROKEN, "attnpatch needs torch 2.11 or newer"),
    Requirement("triton", (3, 6), ABSENT, "no Triton kernels: pip install 'triton>=3.6' (Linux)"),
    Requirement("transformers", (5, 17), ABSENT, "no Hugging Face models: pip install 'attnpatch[hf]'"),
    Requirement("accelerate", (0, 0), ABSENT, "no device_map and no demo: pip install 'attnpatch[hf]'"),
    Requirement("gguf", (0, 0), ABSENT, "the demo's checkpoint cannot be read: pip install 'attnpatch[demo]'"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``attnpatch doctor``."""
    parser.add_argument("--sdpa", action="store_true", help="instead: which backend torch's SDPA takes for which call")
    parser.add_argument("--json", metavar="FILE", help="with --sdpa: write what it found as JSON, too")


def run(arguments: argparse.Namespace) -> int:
    """Print every finding, 0 when attnpatch is usable here, else 1; or what torch's SDPA does here, and 0."""
    if arguments.sdpa:
        from attnpatch.sdpa import show

        return show.run(arguments.json)
    if arguments.json:
        raise SystemExit("attnpatch doctor: --json FILE goes with --sdpa")
    findings = inspect()
    console = Console()
    console.print(_table(findings))
    broken = [finding for finding in findings if finding.level == BROKEN]
    if broken:
        console.print(f"[red]attnpatch is not usable here[/]: {', '.join(finding.name for finding in broken)}")
    else:
        console.print("[green]attnpatch is usable here[/]")
    return 1 if broken else 0


def inspect() -> list[Finding]:
    """All findings, in the order they are printed."""
    findings = [Finding("python", platform.python_version()), _installation(), _entry_point()]
    findings += [_package(requirement) for requirement in REQUIREMENTS]
    findings += [_gpu(), _cudnn(), _compiler(), _interpreter(), _checkpoint()]
    return findings + list(_backends())


def _table(findings: list[Finding]) -> Table:
    table = Table(title="attnpatch doctor", title_justify="left", title_style="bold")
    for header in ("", "what", "found", "what its absence costs"):
        table.add_column(header, overflow="fold")
    backends = [finding for finding in findings if finding.name in dispatch.BACKEND_MODULES]
    for finding in findings:
        if backends and finding is backends[0]:
            table.add_section()
        table.add_row(finding.level, finding.name, escape(finding.found), escape(finding.cost))
    return table


def _package(requirement: Requirement) -> Finding:
    """Whether a package is importable and new enough."""
    name, minimum = requirement.name, requirement.minimum
    if importlib.util.find_spec(name) is None:
        return Finding(name, "not installed", requirement.level, requirement.cost)
    version = _version(name) or "unknown"
    if _release(version) < minimum:
        return Finding(name, f"{version}, older than {minimum[0]}.{minimum[1]}", requirement.level, requirement.cost)
    return Finding(name, version)


def _version(name: str) -> str | None:
    """The installed version of a package, None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str | None) -> tuple[int, ...]:
    """Major and minor number of a version; empty, below every other, when it has none."""
    return tuple(int(number) for number in re.findall(r"\d+", version or "")[:2])


def _installation() -> Finding:
    """Whether the two linked folders are folders; a checkout without symlinks has text files there."""
    root = Path(attnpatch.__file__).parent
    broken = [name for name in ("kernels", "rewrites") if not (root / name).is_dir()]
    if broken:
        cost = "the checkout lacks its symlinks: git config core.symlinks true; git checkout -- attnpatch"
        return Finding("attnpatch", f"{', '.join(broken)} is not a folder in {root}", BROKEN, cost)
    kind = "linked checkout" if (root / "kernels").is_symlink() else "installed package"
    return Finding("attnpatch", f"{_version('attnpatch') or 'not installed'}, {kind}")


def _entry_point() -> Finding:
    """Whether torch finds the backend in a process that never imported attnpatch."""
    registered = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if "attnpatch" in registered.names:
        return Finding("torch.compile backend", "registered")
    cost = "backend='attnpatch' works only after `import attnpatch`: pip install attnpatch (or make dev) again"
    return Finding("torch.compile backend", "not registered", ABSENT, cost)


def _gpu() -> Finding:
    """The current CUDA device."""
    if not torch.cuda.is_available():
        return Finding("GPU", "none", ABSENT, "no Triton kernels: the same rewrites run on the CPU backends")
    major, minor = torch.cuda.get_device_capability()
    found = f"{torch.cuda.get_device_name()}, capability {major}.{minor}, CUDA {torch.version.cuda}"
    if (major, minor) < (8, 0):
        return Finding("GPU", found, ABSENT, "the Triton kernels need capability 8.0: torch's SDPA runs instead")
    return Finding("GPU", found)


def _cudnn() -> Finding:
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():
        return Finding("cuDNN", str(torch.backends.cudnn.version()))
    return Finding("cuDNN", "none", ABSENT, "benchmarks have no cuDNN SDPA to compare with")


def _compiler() -> Finding:
    """Triton builds its launchers, and Inductor its CPU code, with the system's compiler."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler:
        return Finding("C compiler", compiler)
    return Finding("C compiler", "none", ABSENT, "no Triton kernels and no rest='inductor': install gcc and g++")


def _interpreter() -> Finding:
    """Triton's interpreter, and the numpy that breaks it."""
    name, on = "Triton interpreter", os.environ.get("TRITON_INTERPRET") == "1"
    found = "on: kernels run slowly, in Python, on CPU tensors" if on else "off"
    if importlib.util.find_spec("triton") is None:
        return Finding(name, "no Triton", ABSENT, "kernel tests cannot run without a GPU")
    numpy, triton = _version("numpy"), _version("triton")
    if _release(numpy) >= (2, 4) and _release(triton) < (3, 9):
        cost = "kernel tests without a GPU fail in `range` over a tensor: pip install 'numpy<2.4'"
        return Finding(name, f"{found}; Triton {triton} with numpy {numpy}", ABSENT, cost)
    return Finding(name, found)


def _checkpoint() -> Finding:
    """The demo's model."""
    try:
        return Finding("checkpoint", f"{checkpoint.NAME} ({checkpoint.PACKAGE} {checkpoint.find_gguf()[1]})")
    except checkpoint.CheckpointMissing as missing:
        return Finding("checkpoint", "not installed", ABSENT, f"no demo: {missing}")


def _backends() -> Iterator[Finding]:
    """Every backend, run on a small call and compared with float64; BROKEN when none of them can run."""
    findings = [_probe(name) for name in dispatch.BACKEND_MODULES]
    yield from findings
    if not any(finding.level == OK for finding in findings):
        yield Finding("backends", "none can run", BROKEN, "no attention can be computed")


def _probe(name: str) -> Finding:
    """Run one backend on a small call."""
    from attnpatch.testing.inputs import check_backend, random_call

    try:
        backend = dispatch.load_backend(name)
        device = next((device for device in backend.devices if _present(device)), None)
        if device is None:
            return Finding(name, f"needs {' or '.join(backend.devices)}", ABSENT, "not used on this machine")
        sizes = [{"seqlen_q": n, "seqlen_k": 32, "q_offset": 32 - n, "window_right": 0} for n in (32, 1)]
        dtypes = (torch.float32, torch.float16)
        calls = [random_call(**size, dtype=dtype, device=device) for dtype in dtypes for size in sizes]
        if name == dispatch.FP8:
            calls = [call._replace(prefill_dtype="fp8") for call in calls]
        refusals = [backend.refuses(call) for call in calls]
        if None not in refusals:
            return Finding(name, str(refusals[0]), ABSENT, "not used on this machine")
        check_backend(backend, calls[refusals.index(None)])
    except Exception as error:
        return Finding(name, f"fails: {type(error).__name__}: {error}", BROKEN, "attention that takes it fails")
    return Finding(name, f"runs on {device}, right against float64")


def _present(device: str) -> bool:
    return device != "cuda" or torch.cuda.is_available()
