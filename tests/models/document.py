"""docs/coverage.md: a section per version of transformers, written from rows and read back as cells."""

import datetime
import platform
import re

import torch
import transformers

HEADER = """# Coverage of Hugging Face families

Written by `make coverage` (`python -m tests.models.coverage --write docs/coverage.md`); CI measures every fifth family, eager and SDPA in turn, and compares. Each family is a tiny random model with every kind of attention layer that the family has, batch 2 with padding where it takes text, float32 on a CPU: a prompt and three more tokens on a dynamic and on a static cache, or one forward. It runs unpatched, in float64, patched, and under a torch.compile backend that changes nothing.

- **sites**: attentions fused, of all that the graphs hold. An attention that is neither fused nor refused with a reason would be a silent site; they are counted by data flow (SDPA, or a softmax that reaches a matrix product), not by the rules.
- **mask**: what each phase's masks became; layers of different kinds are separated by `/`. `streamed`: read as the model made it.
- **graphs**: compiled by attnpatch (by the backend that changes nothing).
- **q x kv**: operations left that give a tensor of q_len x kv_len.
- **error**: largest error on visible rows over the allowed one (attnpatch/testing/tolerance.py); above 1 is wrong. It varies between machines.
"""  # noqa: E501

COLUMNS = ("family", "attention", "sites", "mask", "not fused because", "graphs", "q x kv", "notes", "error")
VARIES = COLUMNS.index("error")


def cells(row):
    """One row of the table."""
    if row.failure:
        return [row.family, row.implementation, "", "", "", "", "", f"failed: {row.failure}", ""]
    sites = f"{row.fused}/{row.fused + row.refused}" + (f", {row.silent} silent" if row.silent else "")
    return [
        row.family,
        row.implementation,
        sites,
        _mask_words(row.masks),
        "; ".join(dict.fromkeys(_without_numbers(reason) for reason in row.reasons)),
        f"{row.graphs} ({row.plain_graphs})",
        str(len(row.squares)),
        "; ".join(row.notes),
        f"{row.error:.2f}",
    ]


def _mask_words(masks):
    """``prefill, decode: causal / causal, window 5``: phases that say the same are named together."""
    phases = {}
    for phase, words in masks.items():
        said = " / ".join(dict.fromkeys(re.sub(r"(streamed \w+) \[[^]]*\]", r"\1", w) for w in words))
        phases.setdefault(said, []).append(phase)
    phases.pop("", None)
    return "; ".join(f"{', '.join(names)}: {said}" if len(phases) > 1 else said for said, names in phases.items())


def _without_numbers(reason):
    """Lines and node numbers change with versions that change nothing else."""
    return re.sub(r"(\.py):\d+|_\d+\b", r"\1", reason)


def key(line):
    return line[0], line[1]


def graphs(line):
    """Graphs compiled by attnpatch, and by a backend that changes nothing."""
    return tuple(map(int, re.findall(r"\d+", line[COLUMNS.index("graphs")])))


def with_plain_graphs(line, known):
    """``line`` with the count of the backend that changes nothing taken from ``known``: no rule changes that one."""
    i = COLUMNS.index("graphs")
    if not known or not known[i] or not line[i]:
        return line
    return [*line[:i], f"{graphs(line)[0]} ({graphs(known)[1]})", *line[i + 1 :]]


def read(text):
    """The cells of each version of transformers, by family and attention; later sections hold only differences."""
    sections = {}
    for part in text.split("\n## transformers ")[1:]:
        version, lines = part.splitlines()[0], [_cells_of(x) for x in part.splitlines() if x.startswith("| ")]
        rows = {key(line): line for line in lines if line[0] not in ("family", "---")}
        sections[version] = {**next(iter(sections.values()), {}), **rows}
    return sections


def _cells_of(line):
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def write(text, lines):
    """``text`` with the section of the installed transformers replaced; the first section is complete."""
    parts = text.split("\n## transformers ")[1:]
    sections = {part.splitlines()[0]: f"\n## transformers {part.rstrip()}\n" for part in parts}
    installed = transformers.__version__
    first = next(iter(sections), installed)
    if first != installed:
        main = read(text)[first]
        different = [x for x in lines if x[:VARIES] != main.get(key(x), [])[:VARIES]]
        sections[installed] = _section(lines, different, f" Rows that are not as with {first}:")
    else:
        sections[installed] = _section(lines, lines, "")
    return HEADER + "".join(sections.values())


def _section(lines, shown, remark):
    where = f"torch {torch.__version__}, Python {platform.python_version()}, {datetime.date.today()}"
    rows = [COLUMNS, ["---"] * len(COLUMNS), *shown] if shown else []
    table = "".join("| " + " | ".join(x.replace("|", "\\|") for x in row) + " |\n" for row in rows)
    return f"\n## transformers {transformers.__version__}\n\n{where}. {summary(lines)}{remark}\n\n{table}"


def summary(lines):
    """Totals over all rows, in a sentence."""
    sites = [re.match(r"(\d+)/(\d+)(?:, (\d+) silent)?", line[2]) for line in lines]
    fused, total, silent = (sum(int(m[i] or 0) for m in sites if m) for i in (1, 2, 3))
    failed = sum(m is None for m in sites)
    errors = [float(line[VARIES]) for line in lines if line[VARIES]]
    return (
        f"{len({line[0] for line in lines})} families, {len(lines)} rows: {fused} of {total} sites fused "
        f"({100 * fused / max(total, 1):.1f} %), {total - fused} refused, {silent} silent; {failed} rows failed; "
        f"largest error {max(errors, default=0):.2f} of the allowed."
    )
