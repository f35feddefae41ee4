"""Writes of K and V into the caches of one attention become one node, where nothing comes between them.

They are merged on GPUs, where that saves a launch; here on a CPU too.
"""

import pytest
import torch
import torch.nn.functional as F

from attnpatch.rewrites import cache_writes
from attnpatch.testing.recording import RecordingBackend, clones
from attnpatch.testing.tolerance import assert_same_function, run_float64
from tests.combinations import in_turn

B, H, HKV, S, D, DV, N = 2, 4, 2, 12, 16, 24, 3


def repeat_kv(x):
    return x.repeat_interleave(H // HKV, dim=1)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), scale=0.25)


def eager(q, k, v):
    return (q @ repeat_kv(k).transpose(-1, -2) * 0.25).softmax(-1) @ repeat_kv(v)


def new(rows=N):
    return torch.randn(B, H, rows, D), torch.randn(B, HKV, rows, D), torch.randn(B, HKV, rows, DV)


def args(rows=N):
    """q, the new keys and values, the caches, and where to write."""
    return *new(rows), torch.randn(B, HKV, S, D), torch.randn(B, HKV, S, DV), torch.arange(4, 4 + rows)


@pytest.fixture(autouse=True)
def _merged_on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(cache_writes, "saves_launches", lambda cache: True)


def check(function, *args, merged, writes=0):
    """Output and arguments after two runs are those of ``function``; so many nodes of each kind write caches."""
    backend = RecordingBackend()
    compiled = torch.compile(function, backend=backend, dynamic=False)
    ours, theirs = clones(args), clones(args)
    exact = [x.double() if x.is_floating_point() else x for x in clones(args)]
    with torch.no_grad():
        for _ in range(2):
            y, original, y64 = compiled(*ours), function(*theirs), run_float64(function, *exact)
            assert_same_function(y, original, y64)
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert backend.reasons == []
    assert len(backend.named("cache_write")) == merged
    assert len(backend.named("index_copy_", "setitem", "copy_")) == writes
    return backend


def by_index_copy(k_cache, v_cache, at, k, v):
    k_cache.index_copy_(2, at, k)
    v_cache.index_copy_(2, at, v)
    return k_cache, v_cache


def by_its_result(k_cache, v_cache, at, k, v):
    return k_cache.index_copy_(2, at, k), v_cache.index_copy_(dim=2, index=at, source=v)


def by_negative_dim(k_cache, v_cache, at, k, v):
    k_cache.index_copy_(-2, at, k)
    v_cache.index_copy_(2, at, v)
    return k_cache, v_cache


def by_item(k_cache, v_cache, at, k, v):
    k_cache[:, :, at] = k
    v_cache[:, :, at] = v
    return k_cache, v_cache


def by_item_from_the_right(k_cache, v_cache, at, k, v):
    k_cache[..., at, :] = k
    v_cache[..., at, :] = v
    return k_cache, v_cache


def v_first(k_cache, v_cache, at, k, v):
    v_cache.index_copy_(2, at, v)
    k_cache.index_copy_(2, at, k)
    return k_cache, v_cache


def rotated_between(k_cache, v_cache, at, k, v):
    k_cache.index_copy_(2, at, k)
    repeated = k_cache[:, :, None]
    v_cache.index_copy_(2, at, v * 1.5)
    return repeated[:, :, 0], v_cache


MERGED = [by_index_copy, by_its_result, by_negative_dim, by_item, by_item_from_the_right, v_first, rotated_between]


@pytest.mark.parametrize(("write", "product"), in_turn({w.__name__: w for w in MERGED}, [attend, eager]))
def test_merged(write, product):
    def function(q, k, v, k_cache, v_cache, at):
        return product(q, *write(k_cache, v_cache, at, k, v))

    check(function, *args(), merged=1)


def test_decode():
    def function(q, k, v, k_cache, v_cache, at):
        return attend(q, *by_index_copy(k_cache, v_cache, at, k, v))

    check(function, *args(rows=1), merged=1)


def test_negative_positions_count_from_the_end():
    def function(q, k, v, k_cache, v_cache, at):
        return attend(q, *by_item(k_cache, v_cache, at - S, k, v))

    backend = check(function, *args(), merged=1)
    assert len(backend.named("remainder")) == 1


def test_tokens_first():
    """A cache [batch, keys, kv heads, width]: the operator gets it with heads in front."""

    def function(q, k, v, k_cache, v_cache, at):
        k_cache.index_copy_(1, at, k.transpose(1, 2))
        v_cache.index_copy_(1, at, v.transpose(1, 2))
        return attend(q, k_cache.transpose(1, 2), v_cache.transpose(1, 2))

    q, k, v, _, _, at = args()
    check(function, q, k, v, torch.randn(B, S, HKV, D), torch.randn(B, S, HKV, DV), at, merged=1)


def test_a_pool_of_tokens():
    """transformers' continuous batching: [tokens, kv heads, width], then gathered by token."""

    def function(q, k, v, k_pool, v_pool, at, ids):
        k_pool.index_copy_(0, at, k)
        v_pool.index_copy_(0, at, v)
        return attend(q, *(x.index_select(0, ids).transpose(0, 1)[None] for x in (k_pool, v_pool)))

    new = torch.randn(1, H, N, D), torch.randn(N, HKV, D), torch.randn(N, HKV, DV)
    check(
        function, *new, torch.randn(20, HKV, D), torch.randn(20, HKV, DV), torch.arange(4, 7), torch.arange(8), merged=1
    )


def test_two_attentions_on_the_same_caches():
    """Layers that share their keys: the one write before both is merged once."""

    def function(q, k, v, k_cache, v_cache, at):
        by_index_copy(k_cache, v_cache, at, k, v)
        return attend(q, k_cache, v_cache) + attend(q * 2, k_cache, v_cache)

    check(function, *args(), merged=1)


def test_static_cache_of_transformers():
    cache_utils = pytest.importorskip("transformers.cache_utils")

    def run(wrap):
        layer, outputs = cache_utils.StaticLayer(max_cache_len=S), []
        layer.lazy_initialization(torch.empty(B, HKV, 1, D), torch.empty(B, HKV, 1, DV))
        step = wrap(lambda q, k, v: attend(q, *layer.update(k, v)))
        torch.manual_seed(1)
        with torch.no_grad():
            outputs = [step(*new(rows)) for rows in (5, 1, 1)]
        return outputs, layer

    backend = RecordingBackend()
    ours, layer = run(lambda step: torch.compile(step, backend=backend))
    theirs, expected = run(lambda step: step)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(layer.keys, expected.keys)
    assert torch.equal(layer.values, expected.values)
    assert len(backend.named("cache_write")) == len(backend.graphs) == 2  # one token and several
    assert backend.named("index_copy_") == []


# What stays two writes


def other_positions(k_cache, v_cache, at, k, v):
    k_cache.index_copy_(2, at, k)
    v_cache.index_copy_(2, at + 1, v)
    return k_cache, v_cache


def read_between(k_cache, v_cache, at, k, v):
    k_cache.index_copy_(2, at, k)
    v_cache.index_copy_(2, at, v + k_cache.sum())
    return k_cache, v_cache


def rows_changed_between(k_cache, v_cache, at, k, v):
    k_cache.index_copy_(2, at, k)
    k.zero_()
    v_cache.index_copy_(2, at, v)
    return k_cache, v_cache


def positions_changed_between(k_cache, v_cache, at, k, v):
    k_cache.index_copy_(2, at, k)
    at.add_(1)
    v_cache.index_copy_(2, at, v)
    at.sub_(1)
    return k_cache, v_cache


def a_number(k_cache, v_cache, at, k, v):
    k_cache[:, :, at] = 0.5
    v_cache[:, :, at] = 0.5
    return k_cache, v_cache


def broadcast_rows(k_cache, v_cache, at, k, v):
    k_cache[:, :, at] = k[:, :, :1]
    v_cache[:, :, at] = v[:, :, :1]
    return k_cache, v_cache


def features(k_cache, v_cache, at, k, v):
    k_cache.index_copy_(3, at, k_cache[..., :3] * 2)
    v_cache.index_copy_(3, at, v_cache[..., :3] * 2)
    return k_cache, v_cache


def k_alone(k_cache, v_cache, at, k, v):
    k_cache.index_copy_(2, at, k)
    return k_cache, v_cache


def slices(k_cache, v_cache, at, k, v):
    k_cache[:, :, 4:7] = k
    v_cache[:, :, 4:7] = v
    return k_cache, v_cache


APART = {
    other_positions: 2, read_between: 2, rows_changed_between: 2, positions_changed_between: 2, a_number: 2,
    broadcast_rows: 2, features: 2, k_alone: 1, slices: 2,
}  # fmt: skip


@pytest.mark.parametrize(("write", "product"), in_turn({w.__name__: w for w in APART}, [attend, eager]))
def test_apart(write, product):
    def function(q, k, v, k_cache, v_cache, at):
        return product(q, *write(k_cache, v_cache, at, k, v))

    check(function, *args(), merged=0, writes=APART[write])


def test_written_again_before_attention():
    """Only the last writes of both may be merged: here something else is the last to write K."""

    def function(q, k, v, k_cache, v_cache, at):
        by_index_copy(k_cache, v_cache, at, k, v)
        k_cache.mul_(0.5)
        return attend(q, k_cache, v_cache)

    check(function, *args(), merged=0, writes=2)


def test_gradients_need_both_writes():
    def function(q, k, v, k_cache, v_cache, at):
        return attend(q, *by_its_result(k_cache * 2, v_cache * 2, at, k, v))

    q, k, *rest = args()
    k.requires_grad_()
    backend = RecordingBackend()
    (ours,) = torch.autograd.grad(torch.compile(function, backend=backend)(q, k, *rest).square().sum(), k)
    (theirs,) = torch.autograd.grad(function(q, k, *rest).square().sum(), k)
    torch.testing.assert_close(ours, theirs)
    assert (len(backend.named("index_copy_")), backend.named("cache_write")) == (2, [])


def test_on_a_cpu_there_is_nothing_to_save(monkeypatch):
    monkeypatch.undo()

    def function(q, k, v, k_cache, v_cache, at):
        return attend(q, *by_index_copy(k_cache, v_cache, at, k, v))

    check(function, *args(), merged=0, writes=2)
