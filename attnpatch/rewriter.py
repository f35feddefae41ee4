"""Run the rules over a graph and its nested graphs: find sites, put the operator there, erase what became dead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

import attnpatch.autocasting  # noqa: F401  (registers kernels)
from attnpatch.attention_call import words_of_dtype
from attnpatch.edges import tensor_nodes
from attnpatch.emitter import Emitter
from attnpatch.errors import Refused
from attnpatch.graph import Writes, follow_writes, module_path, place, shape, value
from attnpatch.inlining import inline_calls
from attnpatch.mask_words import sentence
from attnpatch.recent import FIRST, window_of
from attnpatch.rule import Recent, Rule, Scaling, Site


@dataclass
class SiteRecord:
    """One attention of one graph, fused or refused; what reports are made of."""

    module: str
    rule: str
    reason: str
    place: str
    mask: str = ""
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""
    operators: int = 1
    """How many stand for it: two where recent tokens are not read as codes."""

    @property
    def fused(self) -> bool:
        """Whether the operator stands there now."""
        return not self.reason


def rewrite_graph(graph: Graph, arguments: Mapping[str, Any] = MappingProxyType({})) -> list[SiteRecord]:
    """Rewrite ``graph`` in place, nested graphs included, and return a record per attention in graph order.

    Args:
        graph: the graph.
        arguments: given to every operator, see :attr:`attnpatch.options.Options.arguments`.
    """
    from attnpatch.rewrites.cache_writes import merge_cache_writes
    from attnpatch.rewrites.table import RULES

    records: list[SiteRecord] = []
    for nested in _nested_graphs(graph):
        records += rewrite_graph(nested.graph, arguments)
        nested.recompile()
    inline_calls(graph)
    follow_writes(graph)
    emitter = Emitter(graph, arguments)
    order = {node: i for i, node in enumerate(graph.nodes)}
    found = [(order[node], rule, node) for rule in RULES for node in rule.candidates(graph)]
    for _, rule, node in sorted(found, key=lambda item: item[0]):
        records.append(_rewrite_site(rule, node, emitter))
    merge_cache_writes(graph)
    graph.lint()
    return records


def _nested_graphs(graph: Graph) -> list[GraphModule]:
    """Graph modules that higher-order operators (checkpoint, cond, ...) call from this graph."""
    owner = graph.owning_module
    modules = [getattr(owner, str(n.target), None) for n in graph.nodes if n.op == "get_attr"] if owner else []
    return [m for m in dict.fromkeys(modules) if isinstance(m, GraphModule)]


def _rewrite_site(rule: Rule, node: Node, emitter: Emitter) -> SiteRecord:
    """Replace the attention at candidate ``node`` or say why not; a refusal leaves the graph as it was."""
    from attnpatch.rewrites.mask_terms import words

    module, where = module_path(node), place(node)
    writes = Writes(emitter.graph)
    try:
        site = rule.match(node, writes)
        _check_writes(site, writes)
    except Refused as refusal:
        return SiteRecord(module, rule.name, str(refusal), where)
    record = _record(site, rule, module, where)
    record.operators = 1 if site.storage.recent is None else 2
    record.mask = sentence(words(site.terms), _storage_words(site))
    emitter.replace(site, writes)
    return record


def _record(site: Site, rule: Rule, module: str, where: str) -> SiteRecord:
    return SiteRecord(module, rule.name, "", where, "", *site.sizes, _said(site.storage.dtype))


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _storage_words(site: Site) -> list[str]:
    """How K and V lie in another way than as attention reads them: ``pages``, ``int8 K``, ``TBQ4 V``."""
    stored = site.storage
    codes = [("K", site.k, stored.k_scales, stored.k_scaling), ("V", site.v, stored.v_scales, stored.v_scaling)]
    quantised = [f"{_form(x.node, scaling)} {name}" for name, x, scales, scaling in codes if scales is not None]
    recent = [] if stored.recent is None else [_recent_words(stored.recent)]
    return [*([] if stored.block_table is None else ["pages"]), *quantised, *recent, *stored.kept]


def _recent_words(recent: Recent) -> str:
    tokens = window_of(shape(recent.window[0])[2])
    return f"first {FIRST} and last {tokens} tokens as they were"


def _form(codes: Node, scaling: Scaling | None) -> str:
    return words_of_dtype(value(codes).dtype, scaling is not None).removesuffix(" codes")


def _check_writes(site: Site, writes: Writes) -> None:
    """Refuse when q, k, v or a mask tensor is written between where it was read and where the operator reads it."""
    masks = [(s.node, _first_reader(s.node, site.interior, writes)) for s in site.terms.streamed]
    ids = [(n, n) for run in site.terms.intervals for n in tensor_nodes(run)]
    for node, start in [*site.reads, *masks, *ids, *((n, n) for n, _ in site.terms.paddings)]:
        writer = writes.between(node, start, site.anchor)
        if writer is not None and writer not in site.interior:
            raise Refused(f"{node.name} is written in place ({place(writer)}) before attention ends")


def _first_reader(node: Node, readers: Sequence[Node], writes: Writes) -> Node:
    return min((r for r in readers if node in r.all_input_nodes), key=writes.position.__getitem__, default=node)


def record_shapes(module: GraphModule, example_inputs: Any) -> None:
    """Give every node of a graph without metadata its fake value (``torch.fx.symbolic_trace`` records none)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            n.meta["example_value"] = super().run_node(n)
            return n.meta["example_value"]

    with mode, torch.no_grad():
        fakes = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, tuple(example_inputs))
        Recorder(module).run(*fakes)
