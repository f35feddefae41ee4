"""Run the rules over a graph and its nested graphs: find sites, put the operator there, erase what became dead."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from attnpatch.affine import Affine
from attnpatch.errors import Refused
from attnpatch.graph import Writes, emit, erase_dead, is_tensor, module_path, place, shape, value
from attnpatch.rule import Rule, Site, Streamed, Terms


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

    @property
    def fused(self) -> bool:
        """Whether the operator stands there now."""
        return not self.reason


def rewrite_graph(graph: Graph, backends: str = "") -> list[SiteRecord]:
    """Rewrite ``graph`` in place, nested graphs included, and return a record per attention in graph order."""
    from attnpatch.rewrites.table import RULES

    records: list[SiteRecord] = []
    for nested in _nested_graphs(graph):
        records += rewrite_graph(nested.graph, backends)
        nested.recompile()
    emitter = _Emitter(graph, backends)
    order = {node: i for i, node in enumerate(graph.nodes)}
    found = [(order[node], rule, node) for rule in RULES for node in rule.candidates(graph)]
    for _, rule, node in sorted(found, key=lambda item: item[0]):
        records.append(_rewrite_site(rule, node, emitter))
    graph.lint()
    return records


def _nested_graphs(graph: Graph) -> list[GraphModule]:
    """Graph modules that higher-order operators (checkpoint, cond, ...) call from this graph."""
    owner = graph.owning_module
    modules = [getattr(owner, str(n.target), None) for n in graph.nodes if n.op == "get_attr"] if owner else []
    return [m for m in dict.fromkeys(modules) if isinstance(m, GraphModule)]


def _rewrite_site(rule: Rule, node: Node, emitter: _Emitter) -> SiteRecord:
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
    record.mask = words(site.terms)
    emitter.replace(site, writes)
    return record


def _record(site: Site, rule: Rule, module: str, where: str) -> SiteRecord:
    heads, kv_heads = (shape(x)[1] if len(shape(x)) == 4 else 1 for x in (site.q, site.k))
    q = value(site.q)
    return SiteRecord(
        module,
        rule.name,
        "",
        where,
        "",
        heads,
        kv_heads,
        shape(site.q)[-1],
        str(q.dtype).removeprefix("torch."),
    )


def _check_writes(site: Site, writes: Writes) -> None:
    """Refuse when q, k, v or a mask tensor is written between where it was read and where the operator reads it."""
    masks = [(s.node, _first_reader(s.node, site.interior, writes)) for s in site.terms.streamed]
    for node, start in [*site.reads, *masks, *((n, n) for n, _ in site.terms.paddings)]:
        writer = writes.between(node, start, site.anchor)
        if writer is not None and writer not in site.interior:
            raise Refused(f"{node.name} is written in place ({place(writer)}) before attention ends")


def _first_reader(node: Node, readers: Sequence[Node], writes: Writes) -> Node:
    return min((r for r in readers if node in r.all_input_nodes), key=writes.position.__getitem__, default=node)


class _Emitter:
    """Builds the operator's arguments in a graph; what several layers share is built once."""

    def __init__(self, graph: Graph, backends: str) -> None:
        self.graph = graph
        self.backends = backends
        self.shared: dict[Any, Any] = {}

    def replace(self, site: Site, writes: Writes) -> None:
        """Put the operator right before the site's anchor, hand it the anchor's readers, erase what became dead."""
        rank = len(shape(site.anchor))
        with self.graph.inserting_before(site.anchor):
            q, k, v = self._qkv(site)
            o = self._operator(site, q, k, v, writes)
            if rank == 3:
                o = self._emit("squeeze", o, 1, like=site.anchor)
            if value(o).dtype != value(site.anchor).dtype:
                o = self._emit("to", o, value(site.anchor).dtype, like=site.anchor)
        site.anchor.replace_all_uses_with(o)
        erase_dead(self.graph, [site.anchor, *reversed(site.interior)])

    def _emit(self, target: Any, *args: Any, like: Node, **kwargs: Any) -> Node:
        return emit(self.graph, target, *args, like=like, **kwargs)

    def _qkv(self, site: Site) -> tuple[Node, Node, Node]:
        """q, k and v as 4-D nodes, with scales known only at run time applied to q."""
        like, q, k = site.anchor, site.q, site.k
        for scale, kind in site.symbolic_scale:
            q = self._emit(operator.mul if kind == "mul" else operator.truediv, q, scale, like=like)
        if value(q).dtype != value(site.v).dtype:
            q = self._emit("to", q, value(site.v).dtype, like=like)
        if site.k_is_transposed:
            k = self._emit("transpose", k, -1, -2, like=like)
        if len(shape(q)) == 3:
            return tuple(self._emit("unsqueeze", x, 1, like=like) for x in (q, k, site.v))  # type: ignore[return-value]
        return q, k, site.v

    def _operator(self, site: Site, q: Node, k: Node, v: Node, writes: Writes) -> Node:
        terms, like = site.terms, site.anchor
        constant, tensor = self._offset(site, writes)
        given: dict[str, Any] = {
            "attn_mask": self._streamed(terms.streamed, like, writes),
            "key_padding": self._paddings(terms, q, k, like, writes),
            "q_offset_tensor": tensor,
            "q_offset": constant or None,
            "window_left": terms.window_left,
            "window_right": terms.window_right,
            "softcap": site.softcap,
            "backends": self.backends or None,
        }
        given = {name: x for name, x in given.items() if x is not None}
        return self._emit(torch.ops.attnpatch.attention.default, q, k, v, site.sm_scale, like=like, **given)

    def _offset(self, site: Site, writes: Writes) -> tuple[Any, Node | None]:
        """``terms.q_offset`` as an int (or SymInt node) and a tensor node."""
        total: Any = site.terms.q_offset.constant
        tensor: Any = None
        for atom, c in site.terms.q_offset.coefficients.items():
            if is_tensor(atom):
                atom = self._snapshot(atom, site, writes)
                tensor = self._sum(tensor, self._times(atom, c, site.anchor), site.anchor)
            else:
                total = self._sum(total or None, self._times(atom, c, site.anchor), site.anchor)
        return total, tensor

    def _times(self, node: Node, factor: int, like: Node) -> Node:
        return node if factor == 1 else self._emit(operator.mul, node, factor, like=like)

    def _sum(self, left: Any, right: Node, like: Node) -> Node:
        return right if left is None else self._emit(operator.add, left, right, like=like)

    def _snapshot(self, scalar: Node, site: Site, writes: Writes) -> Node:
        """The scalar as the mask read it: a static cache adds to its length before attention runs."""
        reader = site.readers.get(scalar)
        if reader is None or writes.between(scalar, reader, site.anchor) is None:
            return scalar
        if (scalar, reader) not in self.shared:
            with self.graph.inserting_before(reader):
                self.shared[scalar, reader] = self._emit("clone", scalar, like=reader)
        return self.shared[scalar, reader]

    def _paddings(self, terms: Terms, q: Node, k: Node, like: Node, writes: Writes) -> Node | None:
        """The conjunction of the padding terms, bool ``[batch, seqlen_k]``."""
        versions = (writes.version(node, like) for node, _ in terms.paddings)
        key = (*terms.paddings, *versions, str(shape(k)[2]), str(shape(q)[0]))
        if terms.paddings and key not in self.shared:
            parts = [self._padding(node, first, q, k, like) for node, first in terms.paddings]
            total = parts[0]
            for part in parts[1:]:
                total = self._emit(operator.and_, total, part, like=like)
            self.shared[key] = total
        return self.shared.get(key) if terms.paddings else None

    def _padding(self, node: Node, first: Affine, q: Node, k: Node, like: Node) -> Node:
        if value(node).dtype != torch.bool:
            node = self._emit("to", node, torch.bool, like=like)
        if len(shape(node)) == 1:
            node = self._emit("unsqueeze", node, 0, like=like)
        if first != Affine() or str(shape(node)[1]) != str(shape(k)[2]):
            start, length = self._scalar(first, like), self._emit("size", k, 2, like=like)
            node = self._emit("narrow", node, 1, start, length, like=like)
        if str(shape(node)[0]) != str(shape(q)[0]):
            node = self._emit("expand", node, self._emit("size", q, 0, like=like), -1, like=like)
        return node

    def _scalar(self, expression: Affine, like: Node) -> Any:
        """An expression of SymInt nodes as a node, or its constant."""
        total: Any = expression.constant or None
        for atom, c in expression.coefficients.items():
            total = self._sum(total, self._times(atom, c, like), like)
        return total or 0

    def _streamed(self, masks: list[Streamed], like: Node, writes: Writes) -> Node | None:
        """One mask that has the effect of all: bool if all are, else additive with -inf where a bool hides."""
        key = (*masks, *(writes.version(mask.node, like) for mask in masks))
        if not masks:
            return None
        if key not in self.shared:
            keep = [self._keep(m, like) for m in masks if m.kind != "additive"]
            bias = [self._bias(m, like) for m in masks if m.kind == "additive"]
            total = self._fold(operator.add, bias, like)
            visible = self._fold(operator.and_, keep, like)
            if total is not None and visible is not None:
                hidden = self._emit("logical_not", visible, like=like)
                total = self._emit("masked_fill", total, hidden, -torch.inf, like=like)
            self.shared[key] = visible if total is None else total
        return self.shared[key]

    def _fold(self, target: Any, nodes: list[Node], like: Node) -> Node | None:
        total: Node | None = None
        for node in nodes:
            total = node if total is None else self._emit(target, total, node, like=like)
        return total

    def _keep(self, mask: Streamed, like: Node) -> Node:
        node = self._for_heads(mask.node, like)
        return node if mask.kind == "keep" else self._emit("logical_not", node, like=like)

    def _bias(self, mask: Streamed, like: Node) -> Node:
        node = self._for_heads(mask.node, like)
        if not value(node).is_floating_point():
            node = self._emit("float", node, like=like)
        return node if mask.factor == 1.0 else self._emit(operator.mul, node, mask.factor, like=like)

    def _for_heads(self, node: Node, like: Node) -> Node:
        """A mask of 3-D scores gets the heads' dimension that the operator expects."""
        if len(shape(like)) == 3 and len(shape(node)) == 3:
            return self._emit("unsqueeze", node, 1, like=like)
        return node


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
