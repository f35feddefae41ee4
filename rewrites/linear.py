"""Linear layers of one row in one launch with their norm, activation and residual, on a GPU.

    W_i norm(x)    for all that read one x        a(W_0 x) * (W_1 x)        residual + W x

W_0 and W_1 may be halves of one weight.

A decode step multiplies each weight with one row: it takes as long as the weights take to read, if they are asked for
without a pause. cuBLAS reads the small ones at half of that speed, and each kernel between two products is a pause.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from attnpatch.fusing import Fusing
from attnpatch.graph import arg, emit, erase_dead, is_plain, is_product, memory, only_user, op, shape, value
from attnpatch.linear import MOST

DROPOUTS = (F.dropout, torch.dropout, torch.ops.aten.dropout.default)
LAYERS = (F.linear, torch.ops.aten.linear.default)
ACTIVATIONS = (F.silu, F.gelu, torch.ops.aten.silu.default, torch.ops.aten.gelu.default)
"""By function and not by name: other libraries have operators of these names."""


class Fused(NamedTuple):
    """What becomes one call: layers, and what they end in if that is not their own outputs, how and what between."""

    layers: tuple[Node, ...]
    outputs: tuple[Node, ...]
    between: tuple[Node, ...] = ()
    residual: Node | None = None
    activation: str | None = None


def fuse_linears(graph: Graph) -> int:
    """Compute linear layers of one row by ``attnpatch::linear``; how many calls of it there are.

    It computes in float32 and rounds once, at the end, where models round after each operator. Layers of more rows,
    in float32, or whose weights are computed in the graph or wrap other tensors stay as they are.
    """
    _skip_dropouts(graph)
    for layer in filter(_is_of_one_row, list(graph.nodes)):
        _part(layer)
    fusing, by_input = Fusing(graph), dict[Node, list[Node]]()
    given = {memory(node) for node in graph.nodes if _is_given(node)}
    for layer in filter(_is_of_one_row, graph.nodes):
        if not _is_computed(_tensors(layer)[0], given):
            continue
        by_input.setdefault(_tensors(layer)[0], []).append(layer)
    return sum(_put(fusing, fused, given) for layers in by_input.values() for fused in _calls(layers))


def _skip_dropouts(graph: Graph) -> None:
    """Leave out those that give what they are given, as before the residuals of some models that are evaluated."""
    for node in list(graph.nodes):
        if node.target in DROPOUTS and not arg(node, 2, "training", True):
            node.replace_all_uses_with(_node(node, 0, "input"))
            graph.erase_node(node)


def _tensors(layer: Node) -> tuple[Node, Node, Node | None]:
    """x, weight and bias."""
    return arg(layer, 0, "input"), arg(layer, 1, "weight"), arg(layer, 2, "bias")


def _is_of_one_row(node: Node) -> bool:
    """Whether the operator takes this linear layer."""
    if node.target not in LAYERS or not is_plain(node) or value(node).dtype not in (torch.float16, torch.bfloat16):
        return False
    x, *given = (t for t in _tensors(node) if t is not None)
    if not all(map(is_plain, (x, *given))) or not _are_alike(node, x, *given):
        return False
    rows = shape(given[0])[0] if value(given[0]).dim() == 2 else 0
    fits = rows > 0 and all(tuple(shape(bias)) == (rows,) for bias in given[1:])
    return fits and _is_row(x) and all(_is_given(t) and value(t).is_contiguous() for t in given)


def _is_row(x: Node) -> bool:
    sizes = shape(x)
    known = all(isinstance(size, int) for size in sizes)
    return known and all(size == 1 for size in sizes[:-1]) and sizes[-1] > 0


def _is_computed(x: Node, given: Set[Any]) -> bool:
    """Whether a kernel of the graph makes ``x``: one that wrote a weight does then not run right before."""
    while op(x) in ("dropout", "ravel"):  # may give what they are given
        x = _node(x, 0, "input")
    return memory(x) not in given


def _is_given(node: Node) -> bool:
    """An input of the graph, or the rows of one that :func:`_part` takes."""
    return node.op in ("placeholder", "get_attr") or (op(node) == "narrow" and _is_given(_node(node, 0, "input")))


def _part(layer: Node) -> None:
    """Let a layer whose output is cut in a gate and what it gates be two layers of halves of the weight."""
    cut = only_user(layer)
    halves = [user for user in cut.users if op(user) == "getitem"] if _is_in_two(cut, layer) else []
    units = [unit for half in halves if (unit := _unit(half)) and unit.up in halves]
    if len(halves) != 2 or len(cut.users) != 2 or not units:
        return
    rows, (x, *weights) = shape(layer)[-1] // 2, _tensors(layer)
    for half in halves:
        start = half.args[1] % 2 * rows
        with layer.graph.inserting_before(layer):
            taken = [t and emit(layer.graph, "narrow", t, 0, start, rows, like=t) for t in weights]
            half.replace_all_uses_with(emit(layer.graph, F.linear, x, *taken, like=half))
    erase_dead(layer.graph, halves)


def _is_in_two(cut: Any, layer: Node) -> bool:
    """Whether a node divides the outputs of a layer in two."""
    if op(cut) not in ("chunk", "split") or arg(cut, 2, "dim", 0) not in (-1, value(layer).dim() - 1):
        return False
    rows = shape(layer)[-1]
    if op(cut) == "chunk":
        return rows % 2 == 0 and arg(cut, 1, "chunks") == 2
    sizes = arg(cut, 1, "split_size_or_sections")
    return 2 * sizes == rows if isinstance(sizes, int) else list(sizes) == [rows // 2] * 2


def _are_alike(*nodes: Node) -> bool:
    return len({(value(x).dtype, value(x).device) for x in nodes}) == 1


def _calls(layers: list[Node]) -> Iterable[Fused]:
    """How layers of one input become calls."""
    gated = [unit for layer in layers if (unit := _gated(layer, layers))]
    rest = [layer for layer in layers if not any(layer in unit.layers for unit in gated)]
    side_by_side = [tuple(rest[first : first + MOST]) for first in range(0, len(rest), MOST)]
    for fused in (*gated, *(Fused(some, some) for some in side_by_side)):
        yield _with_residual(fused)


def _gated(gate: Node, layers: list[Node]) -> Fused | None:
    """The unit whose gate this is."""
    unit = _unit(gate)
    if unit is None or unit.up not in layers or shape(unit.up) != shape(gate):
        return None
    between = (gate, unit.activated, unit.up)
    return Fused((gate, unit.up), (unit.product,), between, activation=_activation(unit.activated))


class Unit(NamedTuple):
    """``product = activated * up`` with ``activated = a(gate)``, all read there alone."""

    activated: Node
    up: Node
    product: Node


def _unit(gate: Node) -> Unit | None:
    activated = only_user(gate)
    product: Any = only_user(activated) if _activation(activated) else None
    if not is_product(product):
        return None
    up = product.args[1] if product.args[0] is activated else product.args[0]
    return Unit(activated, up, product) if isinstance(up, Node) and only_user(up) is product else None


def _activation(node: Any) -> str | None:
    if not isinstance(node, Node) or node.target not in ACTIVATIONS:
        return None
    if op(node) == "silu":
        return None if arg(node, 1, "inplace", False) else "silu"
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(arg(node, 1, "approximate", "none"))


def _with_residual(fused: Fused) -> Fused:
    """With what is added to its only output, if that is of one kind with it."""
    output = fused.outputs[0]
    total: Any = only_user(output) if len(fused.outputs) == 1 else None
    if op(total) != "add" or len(total.args) != 2 or total.kwargs:
        return fused
    residual = total.args[1] if total.args[0] is output else total.args[0]
    if residual is output or not is_plain(residual) or not _are_alike(residual, output, total):
        return fused
    if not shape(residual) == shape(output) == shape(total) or not value(residual).is_contiguous():
        return fused
    return fused._replace(outputs=(total,), between=(*fused.between, output), residual=residual)


def _put(fusing: Fusing, fused: Fused, given: Set[Any]) -> bool:
    x, norm, eps, normed = _input(fused, given)
    _, weights, biases = zip(*map(_tensors, fused.layers), strict=True)
    args = (x, list(weights), list(biases), norm, eps, fused.residual, fused.activation)
    return fusing.put(torch.ops.attnpatch.linear.default, args, fused.outputs, (*fused.between, *normed))


def _input(fused: Fused, given: Set[Any]) -> tuple[Node, Node | None, float, tuple[Node, ...]]:
    """What the layers read: x; or if that is a norm that nobody else reads, what it reads, its weight, eps, and it."""
    x, _, _ = _tensors(fused.layers[0])
    if op(x) != "rms_norm" or set(x.users) != set(fused.layers):
        return x, None, 0.0, ()
    source, weight, eps = _node(x, 0, "input"), _node(x, 2, "weight"), arg(x, 3, "eps")
    if not isinstance(eps, float) or not all(map(is_plain, (source, weight))) or not _are_alike(x, source, weight):
        return x, None, 0.0, ()
    takes = (
        _is_computed(source, given)
        and _is_row(source)
        and shape(weight) == shape(source)[-1:]
        and value(weight).is_contiguous()
    )
    return (source, weight, eps, (x,)) if takes else (x, None, 0.0, ())


def _node(node: Node, position: int, name: str) -> Node:
    found: Any = arg(node, position, name)
    return found
