"""Compile a function with attnpatch, keep the graph before and after, and compare its output with the original's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from attnpatch.backend import compile_graph
from attnpatch.graph import op, value
from attnpatch.options import from_keywords
from attnpatch.reporting import Collector
from attnpatch.rewriter import SiteRecord
from attnpatch.testing.tolerance import assert_same_function, run_float64


class RecordingBackend:
    """A torch.compile backend that does what attnpatch's does and keeps what it saw.

    Attributes:
        before: the code of each graph as Dynamo made it.
        graphs: each graph after the rewrite.
        collector: the records and counts that reports are made of.
        output: what the compiled function returned, when made by :func:`record`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = from_keywords(options)
        self.before: list[str] = []
        self.graphs: list[GraphModule] = []
        self.collector = Collector()
        self.output: Any = None

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Rewrite ``gm`` and return the callable that runs it."""
        self.before.append(gm.code)
        self.graphs.append(gm)
        return compile_graph(gm, example_inputs, self.options, self.collector)

    @property
    def after(self) -> list[str]:
        """The code of each graph after the rewrite."""
        return [gm.code for gm in self.graphs]

    @property
    def sites(self) -> list[SiteRecord]:
        """The sites of all graphs."""
        return [site for graph in self.collector.graphs for site in graph.sites]

    @property
    def masks(self) -> list[str]:
        """The mask of each fused site, in words."""
        return [site.mask for site in self.sites if site.fused]

    @property
    def reasons(self) -> list[str]:
        """The reason of each refused site."""
        return [site.reason for site in self.sites if not site.fused]

    @property
    def nodes(self) -> list[Node]:
        """The nodes of all rewritten graphs."""
        return [node for gm in self.graphs for node in gm.graph.nodes]

    def named(self, *names: str) -> list[Node]:
        """The nodes of the rewritten graphs whose operation has one of ``names``."""
        return [node for node in self.nodes if op(node) in names]

    def square_nodes(self, seqlen_q: int, seqlen_k: int) -> list[str]:
        """Nodes of the rewritten graphs whose last two dimensions are ``seqlen_q`` x ``seqlen_k``."""
        sizes = ((node.name, _hints(value(node))) for node in self.nodes if isinstance(value(node), Tensor))
        return [f"{name} {size}" for name, size in sizes if size[-2:] == [seqlen_q, seqlen_k]]


def _hints(x: Tensor) -> list[int]:
    """Sizes of a fake tensor as numbers, without adding a guard."""
    return [s.node.hint if isinstance(s, torch.SymInt) else s for s in x.shape]


def clones(x: Any) -> Any:
    """``x`` with fresh copies of its tensors (strides kept), so that an in-place write stays in one run."""
    return tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, x)


def record(function: Callable[..., Any], *args: Any, dynamic: bool | None = False, **options: Any) -> RecordingBackend:
    """Compile ``function`` with a :class:`RecordingBackend`, run it once on copies of ``args``, keep its output."""
    torch._dynamo.reset()
    backend = RecordingBackend(**options)
    with torch.no_grad():
        backend.output = torch.compile(function, backend=backend, dynamic=dynamic)(*clones(args))
    return backend


def check_rewrite(
    function: Callable[..., Tensor],
    *args: Any,
    rows: Tensor | None = None,
    dynamic: bool | None = False,
    **options: Any,
) -> RecordingBackend:
    """Assert that the rewritten ``function`` computes what ``function`` does, and return the recording.

    Args:
        function: returns one tensor ``[..., seqlen_q, head_dim_v]``; a module or a plain function.
        args: its arguments.
        rows: bool, True for rows with a visible key, broadcastable to the output without its last dim; the other
            rows must be zeros.
        dynamic: as ``torch.compile`` takes it.
        options: of attnpatch.
    """
    backend = record(function, *args, dynamic=dynamic, **options)
    with torch.no_grad():
        original = function(*clones(args))
    y = backend.output
    assert (y.shape, y.dtype) == (original.shape, original.dtype)
    assert_same_function(y, original, run_float64(function, *clones(args)), rows)
    if rows is not None:
        assert (y[~rows.expand(y.shape[:-1])] == 0).all(), "a row without a visible key must be zeros"
    return backend
