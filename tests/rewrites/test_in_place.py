"""In-place operations: cache writes survive, nothing is read too early or too late, nothing misread."""

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.fx import Graph

from attnpatch.graph import written_by
from attnpatch.testing.recording import RecordingBackend, clones
from attnpatch.testing.tolerance import assert_same_function, run_float64
from tests.combinations import in_turn

B, H, S, D = 2, 4, 12, 16
MIN = torch.finfo(torch.float32).min


def qkv(seqlen_q=S, heads=H):
    return torch.randn(B, H, seqlen_q, D), torch.randn(B, heads, S, D), torch.randn(B, heads, S, D)


def attend(q, k, v, mask=None):
    scores = q @ k.transpose(-1, -2) * 0.25
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def check(function, *args, steps=1):
    """Output and every argument after ``steps`` runs are those of the original."""
    torch._dynamo.reset()
    backend = RecordingBackend()
    compiled = torch.compile(function, backend=backend, dynamic=False)
    ours, theirs, exact = clones(args), clones(args), [x.double() if x.is_floating_point() else x for x in clones(args)]
    for _ in range(steps):
        y, original, y64 = compiled(*ours), function(*theirs), run_float64(function, *exact)
        assert_same_function(y, original, y64)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    return backend


def index_copy(cache, x, position):
    cache.index_copy_(2, position, x)


def slice_copy(cache, x, position):
    cache[:, :, 3:6].copy_(x)


def setitem(cache, x, position):
    cache[:, :, 3:6] = x


def setitem_by_index(cache, x, position):
    cache[:, :, position] = x


def narrow_copy(cache, x, position):
    cache.narrow(2, 3, 3).copy_(x)


def zero_then_add(cache, x, position):
    cache[:, :, 3:6].zero_()
    cache[:, :, 3:6].add_(x)


def scatter(cache, x, position):
    cache.scatter_(2, position[None, None, :, None].expand(B, cache.shape[1], 3, D), x)


WRITES = {
    index_copy: "index_copy_",
    slice_copy: "copy_",
    setitem: "setitem",
    setitem_by_index: "setitem",
    narrow_copy: "copy_",
    zero_then_add: "add_",
    scatter: "scatter_",
}


@pytest.mark.parametrize(("write", "sdpa", "kv_heads"), in_turn({w.__name__: w for w in WRITES}, [False, True], [H, 2]))
def test_cache_writes_survive(write, sdpa, kv_heads):
    """A static cache: the new rows are written in place and attention reads the whole buffer."""

    def function(q, new_k, new_v, k_cache, v_cache, position):
        write(k_cache, new_k, position)
        write(v_cache, new_v, position)
        k, v = (x.repeat_interleave(H // kv_heads, dim=1) for x in (k_cache, v_cache))
        return F.scaled_dot_product_attention(q, k, v, scale=0.25) if sdpa else attend(q, k, v)

    new = (torch.randn(B, kv_heads, 3, D) for _ in range(2))
    q, k, v = qkv(3, kv_heads)
    backend = check(function, q, *new, k, v, torch.arange(3, 6), steps=2)
    assert backend.masks == ["none"]
    assert backend.sites[0].num_kv_heads == kv_heads
    assert len(backend.named(WRITES[write])) == 2


def static_cache_step(q, new_k, new_v, k_cache, v_cache, length):
    """spikes.md a: the mask reads the length first, then the cache adds to it, then attention runs."""
    rows = torch.arange(q.shape[2]) + length
    mask = torch.where(torch.arange(S)[None, :] <= rows[:, None], 0.0, MIN)
    k_cache.index_copy_(2, rows, new_k)
    v_cache.index_copy_(2, rows, new_v)
    length.add_(q.shape[2])
    return attend(q, k_cache, v_cache, mask)


@pytest.mark.parametrize("seqlen_q", [1, 2], ids=["decode", "append"])
def test_offset_read_before_the_length_grows(seqlen_q):
    new = (torch.randn(B, H, seqlen_q, D) for _ in range(2))
    q, k, v = qkv(seqlen_q)
    backend = check(static_cache_step, q, *new, k, v, torch.tensor(4), steps=3)
    assert backend.masks == ["causal"]
    assert len(backend.named("add_")) == 1
    assert len(backend.named("index_copy_")) == 2
    assert backend.square_nodes(seqlen_q, S) == []


def test_offset_read_after_the_length_grew():
    def function(q, k, v, length):
        length.add_(1)
        mask = torch.where(torch.arange(S)[None, :] < length, 0.0, MIN)
        return attend(q, k, v, mask)

    backend = check(function, *qkv(1), torch.tensor(4), steps=3)
    assert backend.masks == ["causal"]


def test_two_layers_grow_the_same_length():
    def function(q, k, v, length):
        o = torch.zeros_like(q)
        for _ in range(2):
            mask = torch.where(torch.arange(S)[None, :] <= length, 0.0, MIN)
            length.add_(1)
            o = o + attend(q, k, v, mask)
        return o

    assert check(function, *qkv(1), torch.tensor(3)).masks == ["causal", "causal"]


def test_one_mask_for_two_layers_with_the_length_growing_between():
    def function(q, k, v, length):
        mask = torch.where(torch.arange(S)[None, :] <= length, 0.0, MIN)
        first = attend(q, k, v, mask)
        length.add_(1)
        return first + attend(q, k, v, mask)

    check(function, *qkv(1), torch.tensor(3))


def test_length_read_by_one_mask_before_and_after_it_grows():
    """One scalar, two values: the right edge of the window is of before, the left one of after."""

    def function(q, k, v, length):
        keep = torch.arange(S)[None, :] <= length
        length.add_(2)
        keep = keep & (torch.arange(S)[None, :] > length - 5)
        return attend(q, k, v, torch.where(keep, 0.0, MIN))

    check(function, *qkv(1), torch.tensor(4))


def test_length_that_is_a_view_of_a_larger_tensor():
    def function(q, k, v, lengths):
        mask = torch.where(torch.arange(S)[None, :] <= lengths[0], 0.0, MIN)
        lengths.add_(2)
        return attend(q, k, v, mask)

    check(function, *qkv(1), torch.tensor([4, 9]))


def test_length_shifted_then_grown():
    def function(q, k, v, length):
        position = length - 1
        mask = torch.where(torch.arange(S)[None, :] <= position, 0.0, MIN)
        length.add_(2)
        position += 1
        return attend(q, k, v, mask)

    check(function, *qkv(1), torch.tensor(4))


def test_length_returned_by_the_in_place_add():
    def function(q, k, v, length):
        grown = length.add_(2)
        mask = torch.where(torch.arange(S)[None, :] < grown, 0.0, MIN)
        length.add_(3)
        return attend(q, k, v, mask)

    check(function, *qkv(1), torch.tensor(3))


def test_length_copied_then_grown():
    def function(q, k, v, length):
        start = length.clone()
        length.add_(5)
        return attend(q, k, v, torch.where(torch.arange(S)[None, :] <= start, 0.0, MIN))

    check(function, *qkv(1), torch.tensor(3))


def written_after(what):
    """A write between the read of ``what`` and the end of attention."""

    def function(q, k, v, mask):
        operands = {"q": q, "k": k, "v": v, "mask": mask}
        scores = q @ k.transpose(-1, -2) * 0.25 + mask
        operands[what].mul_(2.0)
        return scores.softmax(-1) @ v

    return function


@pytest.mark.parametrize("what", ["q", "k", "mask"])
def test_operand_written_before_attention_ends(what):
    """The operator would read the new value where the product has read the old one."""
    backend = check(written_after(what), *qkv(), torch.randn(S, S))
    assert len(backend.reasons) == 1
    assert "is written in place" in backend.reasons[0]
    assert backend.after == backend.before


def test_values_written_between_softmax_and_product_are_read_new():
    assert check(written_after("v"), *qkv(), torch.randn(S, S)).reasons == []


COPIES = {
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "expand_reshape": lambda x: x[:, :, None].expand(B, 2, 2, S, D).reshape(B, H, S, D),
    "one_head": lambda x: x[:, :1].repeat(1, H, 1, 1),
    "cat_with_empty": lambda x: torch.cat([torch.tensor([]), x.repeat_interleave(2, 1)], dim=-2),
    "contiguous": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2).repeat(1, 2, 1, 1),
    "clone": lambda x: x.clone().repeat(1, 2, 1, 1),
}


@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize(("copy", "sdpa"), in_turn(COPIES, [False, True]))
def test_operand_written_after_its_copy(copy, what, sdpa):
    """The copy holds the old value: looking through it to what is written since would read the new one."""

    def function(q, k, v):
        k_copy, v_copy = copy(k), copy(v)
        (k if what == "k" else v).mul_(3.0)
        return F.scaled_dot_product_attention(q, k_copy, v_copy) if sdpa else attend(q, k_copy, v_copy)

    check(function, *qkv(heads=2))


@pytest.mark.parametrize("what", ["q", "k"])
def test_operand_written_after_its_upcast(what):
    def function(q, k, v):
        q_wide, k_wide = q.float(), k.float()
        (q if what == "q" else k).mul_(3.0)
        return (q_wide @ k_wide.transpose(-1, -2) * 0.25).softmax(-1).to(v.dtype) @ v

    check(function, *(x.bfloat16() for x in qkv()))


def test_query_scaled_in_place_before():
    """A write before the read is no reason to refuse."""

    def function(q, k, v):
        q.mul_(0.25)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    assert check(function, *qkv(), steps=2).masks == ["none"]


def test_run_time_scale_written_after_its_use():
    def function(q, k, v, t):
        scores = q @ k.transpose(-1, -2) * t
        t.mul_(0.5)
        return scores.softmax(-1) @ v

    check(function, *qkv(), torch.tensor(0.5), steps=2)


VIEWS_OF_KEYS = {
    "transpose": lambda k: k.transpose(1, 2),
    "mT": lambda k: k.mT,
    "T": lambda k: k[0, 0].T,
    "permute": lambda k: k.permute(3, 2, 1, 0),
    "swapaxes": lambda k: k.swapaxes(0, 1),
    "movedim": lambda k: torch.movedim(k, 0, -1),
    "moveaxis": lambda k: k.moveaxis(0, -1),
    "slice": lambda k: k[:, :, 3:5],
    "index": lambda k: k[0],
    "select": lambda k: k.select(1, 2),
    "narrow": lambda k: torch.narrow(k, 2, 1, 4),
    "view": lambda k: k.view(B * H, S, D),
    "view_as": lambda k: k.view_as(torch.empty(B * H, S * D)),
    "reshape": lambda k: k.reshape(-1),
    "reshape_as": lambda k: k.reshape_as(torch.empty(B * H, S * D)),
    "ravel": lambda k: k.ravel(),
    "flatten": lambda k: k.flatten(1),
    "unflatten": lambda k: k.unflatten(3, (4, 4)),
    "squeeze": lambda k: k[:1].squeeze(0),
    "unsqueeze": lambda k: torch.unsqueeze(k, 0),
    "expand": lambda k: k[None].expand(1, -1, -1, -1, -1),
    "chunk": lambda k: k.chunk(2, dim=2)[1],
    "split": lambda k: torch.split(k, 4, dim=2)[0],
    "tensor_split": lambda k: torch.tensor_split(k, 3, dim=2)[0],
    "unbind": lambda k: k.unbind(1)[3],
    "diagonal": lambda k: k.diagonal(dim1=2, dim2=3),
    "unfold": lambda k: k.unfold(2, 4, 4),
    "as_strided": lambda k: k.as_strided((5,), (3,)),
    "detach": lambda k: k.detach(),
    "alias": lambda k: torch.ops.aten.alias(k),
    "contiguous": lambda k: k.contiguous(),
    "to": lambda k: k.to(torch.float32),
    "dtype_view": lambda k: k.view(torch.int32),
}


@pytest.mark.parametrize("view", VIEWS_OF_KEYS.values(), ids=VIEWS_OF_KEYS)
def test_write_through_a_view(view):
    """However the written tensor is named: what the product has read, the operator must read."""

    def function(q, k, v):
        scores = q @ k.transpose(-1, -2) * 0.25
        view(k).zero_()
        return scores.softmax(-1) @ v

    assert "is written in place" in check(function, *qkv()).reasons[0]


@pytest.mark.parametrize("name", sorted(set(VIEWS_OF_KEYS) - {"T", "as_strided", "diagonal"}))
def test_keys_read_through_a_view(name):
    """The view is what attention reads, and its base is what is written."""

    def function(q, k, v):
        keys = VIEWS_OF_KEYS[name](k).float().reshape(-1)[: H * D * S // 4].reshape(1, H, -1, D)
        scores = q @ keys.transpose(-1, -2) * 0.25
        k.zero_()
        return scores.softmax(-1) @ v[:, :, : keys.shape[2]]

    check(function, *qkv())


@pytest.fixture(scope="module")
def custom_ops():
    """Cache updates as other libraries register them: what is written is not the first argument."""

    def update(x, cache):
        cache.copy_(x)

    with torch.library._scoped_library("attnpatch_test", "FRAGMENT") as library:
        library.define("update(Tensor x, Tensor(a!) cache) -> ()")
        library.impl("update", update, "CompositeExplicitAutograd")
        library.define("read(Tensor x) -> Tensor")
        library.impl("read", lambda x: x.clone(), "CompositeExplicitAutograd")
        yield torch.ops.attnpatch_test


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("overload", ["packet", "default"])
def test_custom_operator_that_writes_its_second_argument(custom_ops, overload, when):
    update = custom_ops.update if overload == "packet" else custom_ops.update.default

    def function(q, k, v, new):
        if when == "before":
            update(new, k)
        scores = q @ k.transpose(-1, -2) * 0.25
        if when == "after":
            update(new, k)
        return scores.softmax(-1) @ v

    backend = check(function, *qkv(), torch.randn(B, H, S, D), steps=2)
    assert len(backend.named("update")) == 1
    assert len(backend.reasons) == (when == "after")


def test_custom_operator_that_writes_nothing(custom_ops):
    def function(q, k, v):
        scores = q @ k.transpose(-1, -2) * 0.25
        return scores.softmax(-1) @ v + custom_ops.read(k)

    assert check(function, *qkv()).masks == ["none"]


def test_inputs_on_one_memory():
    """Two arguments that are views of one tensor: writing the one changes the other."""
    base = torch.randn(2 * B, H, S, D)

    def function(q, k, v, alias):
        scores = q @ k.transpose(-1, -2) * 0.25
        alias.zero_()
        return scores.softmax(-1) @ v

    torch._dynamo.reset()
    backend = RecordingBackend()
    compiled, outputs = torch.compile(function, backend=backend, dynamic=False), []
    for run in (compiled, function):
        k = base.clone()
        outputs.append(run(base[:B], k[:B], base[B:], k.view(-1)))
    torch.testing.assert_close(*outputs)


def test_write_through_a_common_base():
    """q, k and v are slices of one tensor: writing one of them is not a write to the others, but may be taken so."""

    def function(fused):
        q, k, v = fused.unbind(0)
        scores = q @ k.transpose(-1, -2) * 0.25
        fused[1].zero_()
        return scores.softmax(-1) @ v

    check(function, torch.randn(3, B, H, S, D))


def itruediv(scores):
    scores /= 4.0
    return scores


def imul(scores):
    scores *= 0.25
    return scores


def iadd(scores):
    scores += torch.full((S, S), MIN).triu(1)
    return scores


SCALED_IN_PLACE = {
    "itruediv": itruediv,
    "imul": imul,
    "iadd": iadd,
    "mul_": lambda s: s.mul_(0.25),
    "div_": lambda s: s.div_(4.0),
    "add_": lambda s: s.add_(torch.full((S, S), MIN).triu(1)),
    "several": lambda s: (s * 0.5).div_(2.0).masked_fill_(torch.ones(S, S, dtype=torch.bool).triu(1), MIN),
}


@pytest.mark.parametrize("step", SCALED_IN_PLACE.values(), ids=SCALED_IN_PLACE)
def test_scores_changed_in_place(step):
    """Falcon: the scores are a temporary, so their in-place steps fold like any other, and vanish."""
    backend = check(lambda q, k, v: step(q @ k.transpose(-1, -2)).softmax(-1) @ v, *qkv())
    assert backend.reasons == []
    assert backend.square_nodes(S, S) == []


def test_scores_changed_in_place_and_read_before():
    def function(q, k, v):
        scores = q @ k.transpose(-1, -2)
        first = scores.softmax(-1)
        scores.mul_(0.25)
        return first @ v + scores.softmax(-1) @ v

    check(function, *qkv())


def test_scores_changed_in_place_under_another_name():
    """The softmax reads the name from before the write, and so its result."""

    def function(q, k, v):
        scores = q @ k.transpose(-1, -2)
        scores.mul_(0.25)
        return scores.softmax(-1) @ v

    check(function, *qkv())


def triu_(hidden):
    hidden.triu_(1)
    return torch.zeros(S, S).masked_fill(hidden, MIN)


def tril_not(hidden):
    hidden.tril_()
    return torch.zeros(S, S).masked_fill(~hidden, MIN)


def fill_then_triu(hidden):
    return torch.empty(S, S).fill_(-torch.inf).triu_(1)


def full_triu_(hidden):
    return torch.full((S, S), -torch.inf).triu_(1)


def masked_fill_(hidden):
    return torch.zeros(S, S).masked_fill_(torch.triu(hidden, 1), MIN)


def fill_twice(hidden):
    mask = torch.zeros(S, S).masked_fill(torch.triu(hidden, 1), MIN)
    mask.masked_fill_(torch.tril(hidden, -4), MIN)
    return mask


def copied(hidden):
    mask = torch.zeros(S, S)
    mask.copy_(torch.full((S, S), MIN).triu(1))
    return mask


def set_column(hidden):
    mask = torch.full((S, S), MIN).triu(1)
    mask[:, 0] = MIN
    mask[0, 0] = 0.0
    return mask


def set_through_a_view(hidden):
    mask = torch.full((S, S), MIN).triu(1)
    mask[None, None][..., 3:5] = 0.0
    return mask


def logical_and_(hidden):
    keep = torch.ones(S, S, dtype=torch.bool).tril()
    keep &= torch.arange(S) < 9
    return torch.where(keep, 0.0, MIN)


def arange_add_(hidden):
    rows = torch.arange(S)
    rows += 2
    return torch.where(torch.arange(S)[None, :] <= rows[:, None], 0.0, MIN)


def written_after_use(hidden):
    keep = torch.ones(S, S, dtype=torch.bool).tril()
    mask = torch.where(keep, 0.0, MIN)
    keep.fill_(True)
    return mask


IN_PLACE_MASKS = [
    triu_, tril_not, fill_then_triu, full_triu_, masked_fill_, fill_twice, copied, set_column, set_through_a_view,
    logical_and_, arange_add_, written_after_use,
]  # fmt: skip


@pytest.mark.parametrize("make_mask", IN_PLACE_MASKS, ids=[f.__name__ for f in IN_PLACE_MASKS])
def test_mask_built_in_place_is_not_misread(make_mask):
    def function(q, k, v, hidden):
        return attend(q, k, v, make_mask(hidden))

    backend = check(function, *qkv(), torch.ones(S, S, dtype=torch.bool), steps=1)
    assert len(backend.masks) == 1


def test_padding_written_between_two_layers():
    def function(q, k, v, padding):
        first = attend(q, k, v, torch.where(padding[:, None, None, :], 0.0, MIN))
        padding[:, 3] = False
        return first + attend(q, k, v, torch.where(padding[:, None, None, :], 0.0, MIN))

    check(function, *qkv(), torch.ones(B, S, dtype=torch.bool))


def test_padding_written_between_mask_and_attention():
    def function(q, k, v, padding):
        mask = torch.where(padding[:, None, None, :], 0.0, MIN)
        padding[:, 3] = False
        return attend(q, k, v, mask)

    check(function, *qkv(), torch.ones(B, S, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_padding_of_numbers_written_between_two_layers(dtype):
    """The padding as bool is built once for all layers, but not across a write."""

    def function(q, k, v, padding):
        first = attend(q, k, v, torch.where(padding.to(torch.bool)[:, None, None, :], 0.0, MIN))
        padding[:, 3] = 0
        return first + attend(q, k, v, torch.where(padding.to(torch.bool)[:, None, None, :], 0.0, MIN))

    check(function, *qkv(), torch.ones(B, S, dtype=dtype))


def test_scaled_mask_written_between_two_layers():
    def function(q, k, v, mask):
        first = ((q @ k.transpose(-1, -2) + mask) * 0.25).softmax(-1) @ v
        mask.mul_(-3.0)
        return first + ((q @ k.transpose(-1, -2) + mask) * 0.25).softmax(-1) @ v

    check(function, *qkv(), torch.randn(S, S))


def test_mask_given_as_an_out_argument():
    def function(q, k, v, mask):
        bias = torch.zeros(S, S)
        torch.mul(mask, 2.0, out=bias)
        return attend(q, k, v, bias)

    check(function, *qkv(), torch.randn(S, S))


def test_mask_written_between_two_layers():
    def function(q, k, v, mask):
        first = attend(q, k, v, mask)
        mask.add_(torch.full((S, S), MIN).triu(1))
        return first + attend(q, k, v, mask)

    check(function, *qkv(), torch.zeros(S, S))


def test_shared_mask_of_many_layers_with_caches_between():
    """Layer 1's cache writes lie between layer 0's attention and its own, and share one mask."""

    def function(x, keys, padding, cache):
        mask = torch.where((torch.arange(S) <= torch.arange(S)[:, None])[None, None] & padding[:, None, None], 0.0, MIN)
        for layer in range(3):
            cache[layer].index_copy_(2, torch.arange(S), keys * (layer + 1))
            x = attend(x, cache[layer], cache[layer], mask)
        return x

    padding = torch.ones(B, S, dtype=torch.bool)
    padding[0, 5] = False
    x, keys = (torch.randn(B, H, S, D) for _ in range(2))
    backend = check(function, x, keys, padding, torch.zeros(3, B, H, S, D))
    assert backend.masks == ["causal, padding"] * 3
    assert len(backend.named("index_copy_")) == 3


def test_output_written_in_place_is_a_fresh_tensor():
    def function(q, k, v):
        o = attend(q, k, v)
        o.add_(1.0)
        return o

    assert check(function, *qkv(), steps=2).masks == ["none"]


def test_a_triton_kernel_of_the_model_writes_what_it_is_given():
    """Dynamo captures its launch as one node, but only where there is a GPU: the graph is made by hand."""
    graph = Graph()
    k = graph.call_method("contiguous", (graph.placeholder("x"),))
    launch = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
    node = graph.call_function(triton_kernel_wrapper_mutation, kwargs={**launch, "kwargs": {"x": k, "n": 3}})
    assert written_by(node) == [k]
