"""Which inputs of a graph a captured call keeps where they are, copies, and writes tokens to."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from attnpatch.captured import Inputs
from attnpatch.ops import cache_write


def test_inputs_are_kept_where_they_are_large_written_or_parameters_but_masks():
    graph = torch.fx.Graph()
    mask, ids = torch.ones(32, 4352, dtype=torch.int64), torch.ones(32, 1, dtype=torch.int64)
    tensors = [torch.zeros(4), nn.Parameter(torch.zeros(4)), torch.zeros(4), torch.zeros(1 << 19), 3, mask, ids]
    nodes = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
    for node, x in zip(nodes, tensors, strict=True):
        node.meta["example_value"] = x
    graph.call_method("add_", (nodes[2], 1))
    assert Inputs.of(graph, tensors) == Inputs(kept=(1, 2, 3), copied=(0, 5, 6), numbers=(4,))


def test_buffers_of_modules_are_kept():
    found = []

    def backend(gm, example_inputs):
        found.append(Inputs.of(gm.graph, example_inputs))
        return gm.forward

    module = nn.Module()
    module.register_buffer("scale", torch.ones(2))
    torch.compile(lambda x: x * module.scale, backend=backend)(torch.ones(2))
    assert (len(found[0].kept), len(found[0].copied)) == (1, 1)


@pytest.mark.parametrize(
    ("compute", "devices"),
    [
        (lambda x: x + 1, {"meta"}),
        (lambda x: x * torch.tensor(2.0), {"meta"}),
        (lambda x: x * torch.rand(()), {"meta", "cpu"}),
        (lambda x: x + torch.arange(4).to("meta", non_blocking=True), {"meta", "cpu"}),
        (lambda x: (x + 1).to("cpu", non_blocking=True), {"meta", "cpu"}),
    ],
    ids=["there", "constant", "random number", "brought", "taken away"],
)
def test_devices_that_a_graph_computes_on(compute, devices):
    """Memory of the host that a replay would read again, or write too late, is freed by then."""
    found = []

    def backend(gm, example_inputs):
        found.append(Inputs.of(gm.graph, example_inputs).devices)
        return lambda *args: args

    torch.compile(compute, backend=backend)(torch.zeros(4, device="meta"))
    assert found == [devices]


def test_running_statistics_are_written():
    graph = torch.fx.Graph()
    tensors = [torch.zeros(2, 3, 4), torch.zeros(3), torch.ones(3)]
    nodes = [graph.placeholder(name) for name in ("x", "mean", "var")]
    for node, x in zip(nodes, tensors, strict=True):
        node.meta["example_value"] = x
    graph.call_function(torch.nn.functional.batch_norm, (nodes[0], *nodes[1:]), {"training": True})
    assert Inputs.of(graph, tensors).kept == (1, 2)


def written(write):
    """What a graph of an input, a cache of K and one of V, a position and another tensor writes tokens to."""
    found = []

    def backend(gm, example_inputs):
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        found.extend(names[i] for i in Inputs.of(gm.graph, example_inputs).caches)
        return gm.forward

    x, k, v, other = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4), torch.zeros(2)
    torch.compile(write, backend=backend)(x, k, v, torch.tensor(3), other)
    return set(found)


def test_places_that_new_tokens_are_written_to():
    def writes_tokens(x, k, v, position, other):
        cache_write(k, v, x, x, position)
        return torch.zeros(2).add_(other)

    assert written(writes_tokens) == {"l_k_", "l_v_", "l_position_"}


def test_no_place_where_anything_else_is_written():
    def writes_another(x, k, v, position, other):
        cache_write(k, v, x, x, position)
        return other.add_(1)

    def writes_itself(x, k, v, position, other):
        cache_write(k, v, x, x, position)
        return k.mul_(2)

    def writes_elsewhere(x, k, v, position, other):
        cache_write(k, v, x, x, position + 1)
        return other + 1

    for write in (writes_another, writes_itself, writes_elsewhere):
        assert not written(write), write.__name__


def test_wrappers_that_stay_are_found_by_the_tensors_in_them():
    weight = nn.Parameter(TwoTensor(TwoTensor(torch.ones(2), torch.ones(2)), torch.ones(2)))
    plain = nn.Parameter(torch.ones(2))
    graph = torch.fx.Graph()
    for i in range(3):
        graph.placeholder(f"x{i}")
    inputs = Inputs.of(graph, [torch.ones(2), weight, plain])
    assert (inputs.copied, inputs.kept, [i for i, _ in inputs.wrapped]) == ((0,), (2,), [1])
    args = [torch.zeros(2), weight, plain]
    assert inputs.addresses(args) == [x.data_ptr() for x in (plain, weight.a.a, weight.a.b, weight.b)]
    before = inputs.key(args)
    assert inputs.key(args) == before
    weight.a.b = torch.ones(2)
    assert inputs.key(args) != before


class Empty(TwoTensor):
    """A wrapper with nothing in it."""

    def __tensor_flatten__(self):
        return [], None


def test_wrappers_without_tensors_are_kept_as_they_are():
    graph = torch.fx.Graph()
    graph.placeholder("x")
    weight = nn.Parameter(Empty(torch.ones(2), torch.ones(2)))
    inputs = Inputs.of(graph, [weight])
    assert inputs == Inputs((0,), (), ())
    assert inputs.addresses([weight]) == [0]


def test_steps_that_other_processes_take_part_in_are_not_begun_ahead():
    """One that was begun in vain would be one more than those of the others."""

    def alone(x, k, v, position, other):
        cache_write(k, v, x, x, position)
        return other + 1

    def shared(x, k, v, position, other):
        cache_write(k, v, x, x, position)
        return torch.ops._c10d_functional.wait_tensor(other + 1)

    def wrapped(x, k, v, position, other):
        cache_write(k, v, x, x, position)
        return TwoTensor(other, other + 1).a  # as a DTensor made on the way is

    assert written(alone)
    assert not written(shared)
    assert not written(wrapped)
