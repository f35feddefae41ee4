"""What attnpatch makes of one family: sites, masks, graphs, and the error against the unpatched model in float64."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

import attnpatch
from attnpatch import patching
from attnpatch.backend import compile_graph
from attnpatch.graph import CASTS, VIEWS, op, value
from attnpatch.testing.recording import RecordingBackend
from attnpatch.testing.tolerance import allowed_error, max_error, run_float64
from tests.models.families import FAMILIES
from tests.models.runs import make_inputs, make_runs, visible_rows

PASSES_ON = VIEWS | CASTS | {"dropout", "mul", "where", "masked_fill", "pad", "as_strided"}
"""What a model does to probabilities before it multiplies them with the values."""


@dataclass
class Row:
    """One family under one implementation of attention.

    Attributes:
        masks: of the fused sites, in words, by phase.
        squares: operations left in the graphs that give a tensor of q_len x kv_len.
        plain_graphs: how many graphs a backend compiles that changes nothing.
        notes: what ran past the patch, and what the unpatched model cannot do.
        error: over the allowed error, the largest of the runs.
        failure: the exception that ended the measurement.
    """

    family: str
    implementation: str
    fused: int = 0
    refused: int = 0
    silent: int = 0
    masks: dict[str, list[str]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    squares: list[str] = field(default_factory=list)
    graphs: int = 0
    plain_graphs: int = 0
    notes: list[str] = field(default_factory=list)
    error: float = 0.0
    failure: str = ""

    @property
    def is_lifted(self):
        """Whether every mask became terms of the kernel, so that no tensor of q_len x kv_len may be left."""
        streamed = any("streamed" in words for masks in self.masks.values() for words in masks)
        return not streamed and not self.refused and not self.silent


def measure(family, implementation, plain=True):
    """Run the model of ``family`` unpatched, patched, and if ``plain`` under a backend that changes nothing."""
    row = Row(family, implementation)
    model = FAMILIES[family].build(implementation)
    inputs = make_inputs(model, FAMILIES[family].inputs)
    with torch.no_grad():
        runs = _runnable(row, make_runs(model), inputs)
        if plain:
            row.plain_graphs = _count_plain_graphs(model, [run for run, _ in runs], inputs)
        torch._dynamo.reset()
        _measure_patched(row, model, runs, inputs)
    return row


def _runnable(row, runs, inputs):
    """The runs that the unpatched model can do, each with its output."""
    done = []
    for name, run in runs.items():
        try:
            done.append((run, run(inputs)))
        except (RuntimeError, TypeError, ValueError) as error:
            row.notes.append(f"{name}: {type(error).__name__} unpatched")
    return done


def _count_plain_graphs(model, runs, inputs):
    graphs = []
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=patching.RECOMPILE_LIMIT):
        model.compile(backend=lambda gm, _: graphs.append(gm) or gm.forward)
        for run in runs:
            run(inputs)
    del model._compiled_call_impl
    return len(graphs)


def _measure_patched(row, model, runs, inputs):
    references = [run_float64(run, inputs) for run, _ in runs]
    rows = visible_rows(model, inputs)
    attnpatch.patch(model, log_level="error")
    for (run, original), y64 in zip(runs, references, strict=True):
        with _watched(row, run):
            y = run(inputs)
        error = max_error(y, y64, rows) / allowed_error(original, y64, y.dtype, rows)
        row.error = max(row.error, error)
    report = attnpatch.report(model)
    row.fused, row.refused, row.graphs = (report.summary[k] for k in ("fused", "refused", "graphs"))
    row.notes += sorted(f"{gap.kind}: {gap.place}" for gap in report.gaps)


@contextmanager
def _watched(row, run):
    """Note what each graph that ``run`` compiles has, before and after the rewrite."""

    def watch(gm, example_inputs, options, collector):
        attentions = sum(map(_is_attention, gm.graph.nodes))
        compiled = compile_graph(gm, example_inputs, options, collector)
        sites = collector.graphs[-1].sites
        row.silent += max(0, attentions - len(sites))
        _extend(row.masks.setdefault(run.phase, []), (site.mask for site in sites if site.fused))
        _extend(row.reasons, (site.reason for site in sites if not site.fused))
        _extend(row.squares, _squares(gm))
        return compiled

    with mock.patch.object(patching, "compile_graph", watch):
        yield


def _extend(known, new):
    known += [x for x in dict.fromkeys(new) if x not in known]


def _is_attention(node):
    """By data flow alone: a call of SDPA, or a softmax whose result is multiplied as a matrix."""
    if op(node) == "scaled_dot_product_attention":
        return True
    return op(node) == "softmax" and value(node).dim() >= 3 and _reaches_product(node)


def _reaches_product(node):
    products = ("matmul", "bmm", "einsum", "baddbmm")
    return any(op(user) in products or (op(user) in PASSES_ON and _reaches_product(user)) for user in node.users)


def _squares(gm):
    """Operations on the way to the output that give a tensor of q_len x kv_len, the lengths of a fused site."""
    recording = RecordingBackend()
    recording.graphs.append(gm)
    sites = recording.named("attention", "attention_lse")
    lengths = dict.fromkeys((_length(site.args[0]), _length(site.args[1])) for site in sites)
    found = [node for q, k in lengths if q != 1 for node in recording.square_nodes(q, k)]
    return [node for node in found if node.split()[0] in _live(gm)]


def _live(gm):
    """Names of what the output is made of: Musicgen builds a mask that nobody reads."""
    live, waiting = set(), [gm.graph.output_node()]
    while waiting:
        node = waiting.pop()
        waiting += node.all_input_nodes if node.name not in live else []
        live.add(node.name)
    return live


def _length(node):
    size = value(node).shape[-2]
    return size.node.hint if isinstance(size, torch.SymInt) else size
