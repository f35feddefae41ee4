"""The torch.compile backend: rewrite a Dynamo graph, hand the rest on, count what each run dispatched.

Matching and counting happen here and not in an Inductor pass: Inductor skips its passes on a warm compile cache,
and under CUDA graphs no operator's Python runs, but the callable returned here always does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

import attnpatch.ops  # noqa: F401  (registers the operator)
from attnpatch import dispatch
from attnpatch.captured import Inputs
from attnpatch.errors import AttentionNotPatched
from attnpatch.options import Options, from_compile
from attnpatch.reporting import Collector, GraphRecord
from attnpatch.rewriter import rewrite_graph
from attnpatch.rewrites import table

log = logging.getLogger("attnpatch")

COMPILED = Collector()
"""Graphs of everything compiled with the bare backend in this process."""


def attnpatch_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """``torch.compile(model, backend="attnpatch", mode=..., options=...)``.

    Args:
        gm: the Dynamo graph; it is rewritten in place.
        example_inputs: its inputs.
        mode: goes to Inductor unchanged, and implies ``rest="inductor"``.
        options: attnpatch's (see :class:`attnpatch.options.Options`) and Inductor's.

    Raises:
        AttentionNotPatched: under ``strict``, when a site is refused (torch wraps it in BackendCompilerFailed).
        ValueError: an unknown option, or a value that is not allowed.
    """
    return compile_graph(gm, example_inputs, from_compile(mode, options), COMPILED)


def compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, collector: Collector
) -> Callable[..., Any]:
    """Rewrite ``gm``, give the rest to ``options.rest``, and return the callable that runs and counts it."""
    sites = rewrite_graph(gm.graph, options.arguments)
    gm.recompile()
    refused = [f"{site.module or site.place}: {site.reason} [{site.place}]" for site in sites if not site.fused]
    for sentence in refused:
        log.warning("attention stays unfused: %s", sentence)
    record = GraphRecord(sites, (x for x in example_inputs if isinstance(x, nn.Parameter)))
    collector.graphs.append(record)
    if refused and options.strict:
        raise AttentionNotPatched(refused)
    if not _may_be_replayed(example_inputs, options):
        return _counted(_compile_rest(gm, example_inputs, options), record, collector)
    collector.replays.level = logging.WARNING if options.cuda_graphs is True else logging.DEBUG
    inputs = Inputs.of(gm.graph, example_inputs)  # before Inductor takes the graph apart
    function = collector.replays.step(_compile_rest(gm, example_inputs, options), inputs, example_inputs)
    return _counted(function, record, collector)


def _may_be_replayed(example_inputs: Sequence[Any], options: Options) -> bool:
    """Who asks for replays is told where there are none; others get them on a GPU."""
    return options.replays and (_is_on_gpu(example_inputs) or options.cuda_graphs is True)


def _is_on_gpu(example_inputs: Sequence[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs)


def _compile_rest(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    if _is_on_gpu(example_inputs) and not torch.is_grad_enabled():
        for fuse in table.OF_THE_REST[options.rest]:
            fuse(gm.graph)
        gm.recompile()
    if options.rest == "eager":
        return gm.forward
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=dict(options.inductor))
    return compiled


def _counted(function: Callable[..., Any], record: GraphRecord, collector: Collector) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        collector.runs += 1
        with dispatch.recording() as recorded:
            result = function(*args)
        record.count(recorded)
        return result

    return run


if "attnpatch" not in torch._dynamo.list_backends(()):  # run from a checkout that is not installed: no entry point
    torch._dynamo.register_backend(attnpatch_backend, name="attnpatch")
