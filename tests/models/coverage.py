"""``python -m tests.models.coverage``: measure all families, or some, in processes of a few each."""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from tests.models import document
from tests.models.families import FAMILIES
from tests.models.measure import Row, measure

PROCESSES = 2
PER_PROCESS = 4  # families: a process grows with every model that it compiles


def main():
    arguments = _parser().parse_args()
    names = arguments.families.split(",") if arguments.families else list(FAMILIES)
    if arguments.worker:
        return _work(names, plain=not arguments.plain_from)
    lines = []
    for measured in _measure_all(names, arguments.plain_from):
        lines += measured
        if arguments.write:  # at once: what an interrupted run has measured stays
            _write(arguments.write, lines)
    Console().print(_table(lines), document.summary(lines), sep="\n")
    return _check(arguments.check, lines) if arguments.check else 0


def _parser():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", help="names, separated by commas (default: all)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the rows into this document")
    parser.add_argument("--check", type=Path, metavar="FILE", help="fail when a row is not as in this document")
    parser.add_argument(
        "--plain-from",
        type=Path,
        metavar="FILE",
        help="take the graphs of the backend that changes nothing from this document: half the time",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _work(names, plain):
    """Print the lines of each family as JSON."""
    torch.set_num_threads(1)
    for name in names:
        print(json.dumps([document.cells(row) for row in _measured(name, plain)]), flush=True)
    return 0


def _measured(name, plain=True):
    """The rows of a family; whatever goes wrong in one is a row."""
    for implementation in FAMILIES[name].implementations:
        try:
            yield measure(name, implementation, plain)
        except Exception as error:
            sentence = " ".join(f"{type(error).__name__}: {error}".split())
            yield Row(name, implementation, failure=sentence[:200])


def _measure_all(names, plain_from=None):
    """Yield the lines of a few families at a time, in order."""
    chunks = [names[i : i + PER_PROCESS] for i in range(0, len(names), PER_PROCESS)]
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress, ThreadPoolExecutor(PROCESSES) as pool:
        task = progress.add_task("families", total=len(names))
        known = _known(plain_from) if plain_from else None  # once: --write may name the same document
        yield from pool.map(lambda chunk: list(_in_process(chunk, known, lambda: progress.advance(task))), chunks)


def _known(path):
    """The lines of a document for the installed transformers."""
    return document.read(path.read_text() if path.exists() else "").get(transformers.__version__, {})


def _in_process(names, known, done):
    """The lines of ``names``; a family that a dying process did not get to has a row that says so."""
    command = [sys.executable, "-m", "tests.models.coverage", "--worker", "--families", ",".join(names)]
    command += ["--plain-from", "known"] if known is not None else []
    left, known = list(names), known or {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for family in process.stdout:
            for line in json.loads(family):
                yield document.with_plain_graphs(line, known.get(document.key(line)))
            left.pop(0)
            done()
    for name in left:
        yield document.cells(Row(name, "all", failure=f"the process ended with code {process.returncode}"))
        done()


def _table(lines):
    """Without the masks, which take the document's width."""
    table = Table(title=f"transformers {transformers.__version__}, torch {torch.__version__}")
    shown = [i for i, column in enumerate(document.COLUMNS) if column != "mask"]
    for i in shown:
        table.add_column(document.COLUMNS[i], overflow="fold", no_wrap=i in (0, 1, 2))
    for line in lines:
        table.add_row(*(line[i] for i in shown))
    return table


def _write(path, lines):
    """Replace rows of this version of transformers. In the first section, families not measured keep theirs; a later
    one holds what this run measured, since it says only what differs."""
    first = next(iter(document.read(path.read_text())), None) if path.exists() else None
    kept = _known(path) if first in (None, transformers.__version__) else {}
    known = kept | {document.key(line): line for line in lines}
    ordered = [line for name in FAMILIES for line in known.values() if line[0] == name]
    path.write_text(document.write(path.read_text() if path.exists() else "", ordered))


def _check(path, lines):
    """Print what is not as documented; the exit code is 1 when anything is."""
    known, end = _known(path), document.VARIES
    different = [line for line in lines if line[:end] != known.get(document.key(line), [])[:end]]
    for line in different:
        Console().print("documented", known.get(document.key(line)), "measured", line)
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
