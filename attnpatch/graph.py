"""Reading and editing FX graphs: one name per operation, fake values, places, aliases and safe erasure.

A torch-level graph spells one operation many ways: ``torch.matmul``, ``operator.matmul``, ``Tensor.matmul``,
``aten.matmul.default``. :func:`op` gives all of them one name, so that rules match meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

_SAME_AS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "itruediv": "div_", "imul": "mul_", "iadd": "add_",
    "isub": "sub_", "ifloordiv": "floordiv_", "imod": "mod_", "ipow": "pow_", "ixor": "xor_", "ilshift": "lshift_",
    "irshift": "rshift_", "multiply": "mul", "subtract": "sub", "negative": "neg", "and_": "and", "or_": "or",
    "bitwise_and": "and", "bitwise_or": "or", "logical_and": "and",
    "logical_or": "or", "iand": "and_", "ior": "or_", "invert": "not", "inv": "not",
    "bitwise_not": "not", "logical_not": "not", "less_equal": "le", "less": "lt", "greater_equal": "ge",
    "greater": "gt", "not_equal": "ne", "swapaxes": "transpose", "swapdims": "transpose", "absolute": "abs",
    "concat": "cat", "concatenate": "cat", "_softmax": "softmax", "_to_copy": "to", "_unsafe_view": "view",
}  # fmt: skip

VIEWS = frozenset(
    [
        "view",
        "reshape",
        "transpose",
        "permute",
        "expand",
        "expand_as",
        "broadcast_to",
        "unsqueeze",
        "squeeze",
        "getitem",
        "select",
        "narrow",
        "detach",
        "flatten",
        "unflatten",
        "view_as",
        "movedim",
        "mT",
        "T",
        "t",
        "contiguous",
        "to",
        "type",
        "type_as",
        "float",
        "half",
        "bfloat16",
        "chunk",
        "split",
        "unbind",
    ]
)
"""Operations whose result may share memory with their first argument."""

CASTS = frozenset(["to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach"])
"""Operations that keep every value up to rounding, element by element."""


def op(node: Any) -> str:
    """The canonical name of ``node``'s operation; empty for placeholders, attributes and non-nodes."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    return _name_of(node.target)


@lru_cache(maxsize=4096)
def _name_of(target: Any) -> str:
    if isinstance(target, str):
        name = target
    elif isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[-1]
    else:
        name = getattr(target, "__name__", str(target))
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return _SAME_AS.get(name, name)


def arg(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Argument of ``node`` given by position or by keyword."""
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if len(node.args) > position else default


def varargs(node: Node, start: int, name: str) -> list[Any]:
    """Arguments from ``start`` on, given one by one, ``permute(0, 2, 1)``, or as one sequence."""
    given: list[Any] = [node.kwargs[name]] if name in node.kwargs else list(node.args[start:])
    return list(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def value(node: Any) -> Any:
    """The fake value of ``node`` (FakeTensor, SymInt, ...), or ``node`` itself when it is a constant."""
    if isinstance(node, Node):
        return node.meta.get("example_value", node.meta.get("val"))
    return node


def is_tensor(node: Any) -> bool:
    """Whether ``node`` yields a tensor."""
    return isinstance(node, Node) and isinstance(value(node), Tensor)


def is_plain(node: Any) -> bool:
    """Whether ``node`` yields a tensor that wraps no other: no DTensor, and none of vmap's or a gradient's levels."""
    return isinstance(node, Node) and isinstance(value(node), FakeTensor)


def is_product(node: Any) -> bool:
    """Whether ``node`` multiplies two values, elementwise, that are its only arguments."""
    return op(node) == "mul" and len(node.args) == 2 and not node.kwargs


def shape(node: Node) -> torch.Size:
    """Shape of a tensor node."""
    return value(node).shape


def is_scalar(x: Any) -> bool:
    """A Python number, or a node that yields one (SymInt, SymFloat)."""
    x = value(x)
    return isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(x, bool)


def is_one(size: Any) -> bool:
    """Whether a size is known to be 1; one that is symbolic is not."""
    return isinstance(size, int) and size == 1


def only_user(node: Node) -> Any:
    """Who reads ``node``, or None where nobody or more than one does."""
    user: Any = next(iter(node.users)) if len(node.users) == 1 else None
    return user


def is_empty(node: Node) -> bool:
    """Whether a tensor is known to hold nothing."""
    return any(isinstance(size, int) and size == 0 for size in shape(node))


def normal_dim(node: Node, dim: int) -> int:
    """``dim`` of a tensor node as a non-negative number."""
    return dim % max(1, value(node).dim())


def module_path(node: Node) -> str:
    """Path of the innermost module that ran ``node``: ``model.layers.0.self_attn``, or empty."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    path = re.sub(r"(\.__dict__\['|\.)_modules('\])?\['([^']*)'\]", r".\3", path)  # where a __getattr__ is in the way
    path = re.sub(r"^L\['\w+'\](\[\d+\])?\.?|^\w+\.__self__\.?", "", path)
    return re.sub(r"^_modules\.|_modules\[?'?|'?\]", "", path)


def place(node: Node) -> str:
    """``file.py:123 in function`` of the line that made ``node``, or its name."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    if not frames:
        return f"node {node.name}"
    file, line, function = frames[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line} in {function}"


def emit(graph: Graph, target: Callable[..., Any] | str, *args: Any, like: Node, **kwargs: Any) -> Node:
    """Add a call at the graph's insertion point, with its fake value and the metadata of ``like``."""
    node = (
        graph.call_method(target, args, kwargs)
        if isinstance(target, str)
        else graph.call_function(target, args, kwargs)
    )
    fake_args, fake_kwargs = map_arg((args, kwargs), value)
    with _fake_mode(like), torch.no_grad():
        if isinstance(target, str):
            node.meta["example_value"] = getattr(fake_args[0], target)(*fake_args[1:], **fake_kwargs)
        else:
            node.meta["example_value"] = target(*fake_args, **fake_kwargs)
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


def _fake_mode(node: Node) -> Any:
    return value(node).fake_mode


def written_by(node: Node) -> list[Node]:
    """The nodes whose memory ``node`` writes."""
    if node.op not in ("call_function", "call_method"):
        return []
    places = _written_arguments(node.target)
    if places is not None:
        found = [arg(node, *place) for place in places]
    elif op(node).startswith("triton_kernel_wrapper"):  # a kernel of the user's: may write each of its tensors
        found = [node.kwargs["kwargs"]]
    elif node.kwargs.get("out") is not None:
        found = [node.kwargs["out"]]
    elif op(node) in ("batch_norm", "instance_norm"):
        found = [arg(node, 1, "running_mean"), arg(node, 2, "running_var")]
    else:
        name = op(node)
        writes = name in ("setitem", "setattr") or (name.endswith("_") and not name.endswith("__"))
        writes = writes or node.kwargs.get("inplace") is True
        found = [node.args[0]] if writes and node.args else []
    return [x for x in tree_leaves(found) if isinstance(x, Node)] if found else []


@lru_cache(maxsize=4096)
def _written_arguments(target: Any) -> list[tuple[int, str]] | None:
    """Positions and names of what an operator writes, as its schema says; None for functions and methods."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if not isinstance(target, torch._ops.OpOverload):
        return None
    arguments = enumerate(target._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def root(node: Any) -> Any:
    """The node that owns the memory ``node`` may view: follows views and in-place results to their base."""
    while isinstance(node, Node):
        base = next(iter(written_by(node)), None) or _viewed(node)
        if not isinstance(base, Node):
            return node
        node = base
    return node


def _viewed(node: Node) -> Any:
    return node.args[0] if op(node) in VIEWS and node.args else None


def memory(node: Node) -> Any:
    """What identifies the memory of a tensor: the same for its views, for writes to it, and for other inputs on it.

    Fake tensors share storage where real ones do, however the view is spelled.
    """
    tensor = value(node)
    if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
        try:
            return tensor.untyped_storage()._cdata
        except NotImplementedError:  # inside vmap
            return root(node)
    return root(node)


def follow_writes(graph: Graph) -> None:
    """Let what reads a tensor after ``x.mul_(s)`` read the result of that node: it is the same tensor.

    Then each value has one node, as rules expect, however the lines before used the variable.
    """
    _fill_by_name(graph)
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        target = node.args[0] if node.args else None
        if not isinstance(target, Node) or target.op in ("placeholder", "get_attr"):
            continue
        if written_by(node) == [target] and value(node) is value(target):
            for user in [user for user in target.users if position[user] > position[node]]:
                user.replace_input_with(target, node)


def _fill_by_name(graph: Graph) -> None:
    """``x[mask] = number`` is ``x.masked_fill_(mask, number)`` where the mask has x's shape."""
    for node in [n for n in graph.nodes if op(n) == "setitem"]:
        x, mask, number = node.args
        fills = is_tensor(x) and is_tensor(mask) and isinstance(number, (int, float))
        if fills and value(mask).dtype == torch.bool and shape(mask) == shape(x):
            with graph.inserting_before(node):
                filled = graph.call_method("masked_fill_", (x, mask, number))
            filled.meta = {**node.meta, "example_value": value(x)}
            graph.erase_node(node)


class Writes:
    """Every in-place write of a graph, in order: who may have changed a value between two places."""

    def __init__(self, graph: Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.writes = [(node, memory(target)) for node in graph.nodes for target in written_by(node)]

    def touches(self, read: Node) -> bool:
        """Whether anything in the graph writes ``read``'s memory."""
        base = memory(read)
        return any(written == base for _, written in self.writes)

    def version(self, read: Node, at: Node) -> int:
        """How often ``read``'s memory was written before ``at``."""
        base, high = memory(read), self.position[at]
        return sum(written == base and self.position[writer] < high for writer, written in self.writes)

    def between(self, read: Node, start: Node, stop: Node) -> Node | None:
        """The first write to ``read``'s memory after ``start`` and before ``stop``, or None."""
        base, low, high = memory(read), self.position[start], self.position[stop]
        for writer, written in self.writes:
            if written == base and low < self.position[writer] < high:
                return writer
        return None


def erase_dead(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase ``nodes`` and whatever only they needed; keep everything that writes, draws random numbers or is an input.

    ``Graph.eliminate_dead_code`` would not do: it takes ``index_copy_`` and ``add_`` on a cache for dead.
    """
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node._erased or node.users or not _erasable(node):
            continue
        inputs = node.all_input_nodes
        graph.erase_node(node)
        pending.extend(inputs)


def _erasable(node: Node) -> bool:
    if node.op not in ("call_function", "call_method", "get_attr"):
        return False
    if not all(_is_private(target) for target in written_by(node)):
        return False
    return op(node) not in ("rand", "randn", "bernoulli", "multinomial", "rand_like", "randn_like")


def _is_private(target: Node) -> bool:
    """Whether written memory is a temporary that nobody else reads (Falcon scales its scores in place)."""
    base = root(target)
    made = ("full", "ones", "zeros", "empty", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like", "einsum")
    fresh = ("matmul", "bmm", "baddbmm", "mul", "div", "add", "sub", "tanh", "masked_fill", "where", *made)
    return op(base) in fresh and len(base.users) <= 1


def breaks_a_view(output: Any, node: Node) -> bool:
    """Whether a view after ``node``, which is contiguous in the original, fails on the strides of ``output``."""
    for user in node.users:
        if written_by(user) == [node] and value(user) is value(node) and breaks_a_view(output, user):
            return True
        if op(user) not in VIEWS or user.args[0] is not node:
            continue
        try:
            with output.fake_mode, torch.no_grad():
                viewed = _rerun(user, output)
        except (RuntimeError, ValueError):
            return True
        if isinstance(viewed, torch.Tensor) and breaks_a_view(viewed, user):
            return True
    return False


def _rerun(user: Node, x: Any) -> Any:
    """The fake value of ``user`` with ``x`` as its first argument."""
    args, kwargs = map_arg((user.args[1:], user.kwargs), value)
    return getattr(x, user.target)(*args, **kwargs) if isinstance(user.target, str) else user.target(x, *args, **kwargs)
