"""Put the operator of a site into its graph: queries, keys and values, what becomes dead."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch.fx import Graph, Node

from attnpatch.attention_call import PACKED
from attnpatch.graph import Writes, breaks_a_view, erase_dead, is_tensor, op, shape, value
from attnpatch.mask_emitter import Keys
from attnpatch.recent_emitter import RecentEmitter
from attnpatch.rule import Operand, Scaling, Site, Storage, Turn


class Emitter(RecentEmitter):
    """Builds the operator's arguments in a graph; what several layers share is built once."""

    def replace(self, site: Site, writes: Writes) -> None:
        """Put the operator right before the site's anchor, hand it the readers, erase what became dead."""
        with self.graph.inserting_before(site.before or site.anchor):
            o, lse = self._operator(site, writes)
            o = self._arranged(Operand(o, (), site.output), site.anchor)
            o = self._cast(o, value(site.anchor).dtype, site.anchor)
            if lse is not None and site.lse is not None:
                lse = self._arranged(site.lse._replace(node=lse), site.anchor)
                lse = self._cast(lse, value(site.lse.node).dtype, site.anchor)
            if breaks_a_view(value(o), site.anchor):
                o = self._laid_out(o, site.anchor)
        site.anchor.replace_all_uses_with(o)
        if lse is not None and site.lse is not None:
            site.lse.node.replace_all_uses_with(lse)
            erase_dead(self.graph, [site.lse.node])
        for node in site.interior:
            _erase_unread(self.graph, node, {*site.interior, site.anchor})
        erase_dead(self.graph, [site.anchor, *reversed(site.interior)])
        for node in reversed(site.storage.unpacked):
            _erase_checks(self.graph, node)

    def _laid_out(self, o: Node, like: Node) -> Node:
        """``o`` copied into the memory order of ``like``, which a view behind it counts on."""
        strides = value(like).stride()
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        if order == sorted(order):
            return self._emit("contiguous", o, like=like)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        ordered = self._emit("contiguous", self._emit("permute", o, order, like=like), like=like)
        return self._emit("permute", ordered, inverse, like=like)

    def _query(self, site: Site) -> Node:
        """q, with scales known only at run time applied to it."""
        like, q = site.anchor, self._arranged(site.q, site.anchor)
        for scale, kind in site.scales:
            factor = self._arranged(scale, like)
            q = self._emit(operator.mul if kind == "mul" else operator.truediv, q, factor, like=like)
        return self._cast(q, site.storage.dtype, like)

    def _turned(self, x: Node, turn: Turn, like: Node) -> Node:
        """``x`` with its channels in another order, or multiplied with an orthogonal matrix; never the factor."""
        if turn.order is not None:
            return self._emit("index_select", x, 3, self._constant("channels", turn.order, x, like), like=like)
        if turn.matrix is None:
            return x
        matrix = self._constant("turn", turn.matrix.float(), x, like)
        wide = self._emit(operator.matmul, self._emit("float", x, like=like), matrix, like=like)
        return self._emit("to", wide, value(x).dtype, like=like)

    def _constant(self, name: str, tensor: torch.Tensor, x: Node, like: Node) -> Node:
        """A tensor as an attribute of the graph, on the device of ``x``."""
        device = value(x).device
        key = (name, tensor.numpy().tobytes(), device)
        if key not in self.shared:
            first = next(n for n in self.graph.nodes if n.op != "placeholder")
            with self.graph.inserting_before(first):
                self.shared[key] = constant(self.graph, name, tensor.to(device), like=like)
        return self.shared[key]

    def _keys(self, site: Site, writes: Writes) -> Keys:
        """K, V and what tells how they lie in memory."""
        like, stored = site.anchor, site.storage
        k, v = self._arranged(site.k, like), self._arranged(site.v, like)
        k = self._cast(k, stored.dtype, like) if stored.k_scales is None else k
        v = self._cast(v, stored.dtype, like) if stored.v_scales is None else v
        k_scale, k_shift = self._scale(stored.k_scales, stored.k_scaling, k, like)
        v_scale, v_shift = self._scale(stored.v_scales, stored.v_scaling, v, like)
        return Keys(k, v, self._block_table(stored, k, like, writes), k_scale, v_scale, k_shift, v_shift)

    def _block_table(self, stored: Storage, k: Node, like: Node, writes: Writes) -> Node | None:
        table = stored.block_table
        if table is None:
            return None
        key = ("table", table, stored.counts_back, writes.version(table.node, like), str(shape(k)[0]))
        if key not in self.shared:
            ids = self._arranged(table, like)
            if stored.counts_back:  # kernels take a negative id for one of a page that no row sees
                ids = self._emit("remainder", ids, self._emit("size", k, 0, like=like), like=like)
            self.shared[key] = ids
        return self.shared[key]

    def _scale(
        self, scales: list[Operand] | None, scaling: Scaling | None, codes: Node, like: Node
    ) -> tuple[Node | None, Node | None]:
        """The scale of K or V and its shift, None where it has none."""
        if scales is None:
            return None, None
        if scaling is not None:
            return self._scaled(scaling, [self._arranged(x, like) for x in scales], like)
        if value(codes).dtype == PACKED:
            return self._arranged(scales[0], like), None
        return self._product(scales, like), None

    def _scaled(self, scaling: Scaling, given: list[Node], like: Node) -> tuple[Node, Node]:
        """Scales and shifts of integers of 4 bits: as they are, or worked out in float32."""
        if scaling == Scaling(1.0, 0.0, 1.0) and value(given[0]).dtype == value(given[1]).dtype:
            return given[0], given[1]
        scale, *others = (self._cast(x, torch.float32, like) for x in given)
        parts = [(scaling.of_scale, scale)]
        if others:
            both = self._emit(operator.mul, scale, others[0], like=like) if scaling.of_both else scale
            parts += [(scaling.of_other, others[0]), (scaling.of_both, both)]
        terms = [self._times(x, factor, like) for factor, x in parts if factor]
        shift = self._fold(operator.add, terms, like) or self._emit("new_zeros", scale, (1, 1, 1, 1), like=like)
        return self._times(scale, scaling.step, like), shift

    def _product(self, scales: list[Operand], like: Node) -> Node:
        """The product of the scales in float32, broadcastable to the rows; ones where there is none."""
        numbers = [x.node for x in scales if not is_tensor(x.node)]
        total: Node | None = None
        for scale in (x for x in scales if is_tensor(x.node)):
            part = self._emit("to", self._arranged(scale, like), torch.float32, like=like)
            total = part if total is None else self._emit(operator.mul, total, part, like=like)
        if total is None:
            device = value(like).device
            return self._emit(torch.full, (1, 1, 1), math.prod(numbers), dtype=torch.float32, device=device, like=like)
        return self._emit(operator.mul, total, math.prod(numbers), like=like) if numbers else total

    def _operator(self, site: Site, writes: Writes) -> tuple[Node, Node | None]:
        """The operator's output, and its lse where the site wants it."""
        recent = site.storage.recent
        q, keys = self._query(site), self._keys(site, writes)
        masks = self._masks(site, q, keys, writes)
        if recent is None:
            return self._of_keys(site, q, keys, masks, site.lse is not None)
        kept = self._kept(recent, site.anchor, writes)
        older = {**masks, "key_bounds": self._older(masks, kept, site.anchor), "sinks": None}
        parts = *self._of_keys(site, q, keys, older, True), *self._of_kept(site, recent, q, keys, masks, kept)
        return self._pair(torch.ops.attnpatch.merge.default, *parts, masks["sinks"], like=site.anchor)

    def _of_keys(
        self, site: Site, q: Node, keys: Keys, masks: dict[str, Any], wants_lse: bool
    ) -> tuple[Node, Node | None]:
        """Attention on K and V as they lie in memory, turned back to what they stand for."""
        stored, like = site.storage, site.anchor
        q = self._turned(q, stored.k_turn.inverse, like)
        of_keys = {"block_table", "k_scale", "v_scale", "k_shift", "v_shift"}
        given = {**masks, **{name: x for name, x in keys._asdict().items() if name in of_keys}}
        scale = site.sm_scale * stored.k_turn.factor
        o, lse = self._attention((q, keys.k, keys.v, scale), given, like, wants_lse)
        o = self._turned(o, stored.v_turn, like)
        factor = stored.v_turn.factor
        return (o if factor == 1.0 else self._emit(operator.mul, o, factor, like=like)), lse


def _erase_unread(graph: Graph, node: Node, inside: set[Node]) -> None:
    """Erase what reads ``node`` and is read by nobody itself: it would keep all of attention alive."""
    for user in [] if node._erased else list(node.users):
        if user not in inside and not user._erased:
            _erase_unread(graph, user, inside)
            erase_dead(graph, [user])


def _erase_checks(graph: Graph, node: Node) -> None:
    """Erase checks of a tensor's dtype, which torch.export writes: they would keep it alive."""
    checks = [] if node._erased else [x for x in node.users if op(x) == "_assert_tensor_metadata"]
    if checks and len(checks) == len(node.users):
        erase_dead(graph, checks)


def constant(graph: Graph, name: str, tensor: torch.Tensor, like: Node) -> Node:
    """A tensor as an attribute of the graph's module."""
    module: Any = graph.owning_module
    numbers = (i for i in itertools.count() if not hasattr(module, f"_attnpatch_{name}_{i}"))
    target = f"_attnpatch_{name}_{next(numbers)}"
    module.register_buffer(target, tensor, persistent=False)
    if hasattr(module, "_param_name_to_source"):  # Dynamo's: AOTAutograd asks where each buffer is from
        module._param_name_to_source[target] = ConstantSource(target)
    node = graph.get_attr(target)
    with value(like).fake_mode as mode:
        node.meta["example_value"] = mode.from_tensor(tensor)
    return node
