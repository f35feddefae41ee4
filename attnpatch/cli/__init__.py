"""The command line: ``attnpatch demo | report | doctor | roofline``, also ``python -m attnpatch``.

Each command is a module with ``add_arguments(parser)`` and ``run(arguments) -> exit code``, imported only
when it runs: ``doctor`` needs nothing that may be missing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": "patch a real checkpoint: same text, every site named, time and memory before and after",
    "report": "patch a model, run it, and print the kernel that each attention got",
    "doctor": "what attnpatch found on this machine, what is missing, and what that costs",
    "roofline": "what prefill and a decode step must read and compute, from a config and a device",
}

_MODULES = {
    "demo": "attnpatch.cli.demo",
    "report": "attnpatch.cli.reporting",
    "doctor": "attnpatch.cli.doctor",
    "roofline": "attnpatch.cli.roofline",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="attnpatch", description="Fused attention for any PyTorch model.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {name: commands.add_parser(name, help=text, description=text) for name, text in COMMANDS.items()}
    if not argv or argv[0] not in COMMANDS:
        parser.parse_args(argv)
    module = importlib.import_module(_MODULES[argv[0]])
    module.add_arguments(parsers[argv[0]])
    return module.run(parser.parse_args(argv))
