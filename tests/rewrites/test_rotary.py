"""Rotary embeddings: which become one operator, that they are the same, and which stay."""

import pytest
import torch

from attnpatch.rewrites.rotary import fuse_rotary
from attnpatch.testing.tolerance import assert_same_function, run_float64

D = 16


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def llama(x, cos, sin):
    return (x * cos.unsqueeze(1)) + (rotate_half(x) * sin.unsqueeze(1))


def by_chunks(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return sin[:, None] * torch.cat((-second, first), -1) + cos[:, None] * x


def by_split(x, cos, sin):
    first, second = torch.split(x, D // 2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=3) * sin[:, None]


def partial(x, cos, sin):
    """As GPT-NeoX does it, of the first half of the channels."""
    turned, rest = x[..., : D // 2], x[..., D // 2 :]
    cos, sin = cos[:, None, :, : D // 2], sin[:, None, :, : D // 2]
    return torch.cat((turned * cos + rotate_half(turned) * sin, rest), dim=-1)


def twice(x, cos, sin):
    return llama(llama(x, cos, sin), cos, sin)


def turned(x, cos, sin):
    return x * cos + rotate_half(x) * sin


def of_two(x, cos, sin):
    """Queries, and keys of fewer heads."""
    keys, cos, sin = x[:, :2] * 2, cos[:, None], sin[:, None]
    return torch.cat((turned(x, cos, sin), turned(keys, cos, sin)), dim=1)


def of_two_one_after_the_other(x, cos, sin):
    cos, sin = cos[:, None], sin[:, None]
    queries = turned(x, cos, sin)
    return torch.cat((queries, turned(queries[:, :2], cos, sin)), dim=1)


def of_one_and_one_that_stays(x, cos, sin):
    """The second is written to on the way."""
    cos, sin = cos[:, None], sin[:, None]
    keys = x[:, :2] * 2
    queries, across = turned(x, cos, sin), rotate_half(keys)
    across[..., :2] = 3
    return torch.cat((queries, keys * cos + across * sin), dim=1)


def by_other_angles(x, cos, sin):
    return llama(x, cos, sin) + llama(x, sin, cos)


def backwards(x, cos, sin):
    return x * cos[:, None] + torch.cat((x[..., : D // 2], -x[..., D // 2 :]), dim=-1) * sin[:, None]


def other_halves(x, cos, sin):
    return x * cos[:, None] + torch.cat((-x[..., D // 4 :], x[..., : D // 4]), dim=-1) * sin[:, None]


def steps(x, cos, sin):
    return x * cos[:, None] + torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1) * sin[:, None]


def of_another(x, cos, sin):
    return (x + 1) * cos[:, None] + rotate_half(x) * sin[:, None]


def along_rows(x, cos, sin):
    return x * cos[:, None] + torch.cat((-x[..., 3:, :], x[..., :3, :]), dim=-2) * sin[:, None]


def minus(x, cos, sin):
    return x * cos[:, None] - rotate_half(x) * sin[:, None]


def overwritten(x, cos, sin):
    turned = rotate_half(x)
    straight = x * cos[:, None]
    x.zero_()
    return straight + turned * sin[:, None]


def set_inside(x, cos, sin):
    halves = rotate_half(x)
    halves[..., :2] = 3
    return x * cos[:, None] + halves * sin[:, None]


def by_keywords(x, cos, sin):
    """Not even looked at further: any sum of products may be spelled so."""
    return torch.mul(x, other=cos[:, None]) + torch.mul(rotate_half(x), other=sin[:, None])


def of_numbers(x, cos, sin):
    return x[0, 0, 0, 0] * cos[0, 0, 0] + rotate_half(x) * sin[:, None]


def mapped(x, cos, sin):
    return torch.func.vmap(lambda x, cos, sin: x * cos + rotate_half(x) * sin)(x[None], cos[None, 0], sin[None, 0])


def wider(x, cos, sin):
    """The table has two rows for each of x."""
    return x[:1] * cos[:, None] + rotate_half(x[:1]) * sin[:, None]


def compiled(function, *args):
    """What the rewritten graph gives, how many turns it had, and how often it calls the operator."""
    found = []

    def backend(gm, _):
        found.append(fuse_rotary(gm.graph))
        found.append(len(gm.graph.find_nodes(op="call_function", target=torch.ops.attnpatch.rotary.default)))
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    return torch.compile(function, backend=backend, fullgraph=True)(*args), *found


def arguments(dtype, table_dtype=None):
    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(2, 6, D, generator=generator)
    x = torch.randn(2, 6, 3, D, generator=generator).transpose(1, 2)
    return x.to(dtype), angles.cos().to(table_dtype or dtype), angles.sin().to(table_dtype or dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("function", "turns", "expected"),
    [
        (llama, 1, 1),
        (by_chunks, 1, 1),
        (by_split, 1, 1),
        (partial, 1, 1),
        (twice, 2, 2),
        (of_two, 2, 1),
        (of_two_one_after_the_other, 2, 2),
        (of_one_and_one_that_stays, 1, 1),
        (by_other_angles, 2, 2),
    ],
)
def test_turns(function, turns, expected, dtype):
    args = arguments(dtype)
    result, found, calls = compiled(function, *args)
    assert (found, calls, result.dtype) == (turns, expected, dtype)
    assert_same_function(result, function(*args), run_float64(function, *args))


@pytest.mark.parametrize(
    "function",
    [
        backwards,
        other_halves,
        steps,
        of_another,
        along_rows,
        minus,
        overwritten,
        wider,
        set_inside,
        by_keywords,
        of_numbers,
        mapped,
    ],
)
def test_what_is_another_function_stays(function):
    expected = function(*arguments(torch.float32))
    result, found, calls = compiled(function, *arguments(torch.float32))
    assert (found, calls) == (0, 0)
    assert torch.equal(result, expected)


def test_tables_of_another_dtype():
    """A wider table gives a wider result, which the operator does not; a narrower one does not."""
    result, found, _ = compiled(llama, *arguments(torch.bfloat16, torch.float32))
    assert (found, result.dtype) == (0, torch.float32)
    result, found, _ = compiled(llama, *arguments(torch.float32, torch.bfloat16))
    assert (found, result.dtype) == (1, torch.float32)


def test_a_width_that_changes():
    """From the second width on it is a symbol, of which no half is known."""

    def fusing(gm, _):
        fuse_rotary(gm.graph)
        gm.recompile()
        return gm.forward

    run = torch.compile(llama, backend=fusing, fullgraph=True)
    for width in (D, 8, 12):
        x, cos, sin = (t[..., :width].clone() for t in arguments(torch.float32))
        torch.testing.assert_close(run(x, cos, sin), llama(x, cos, sin))


def test_tables_elsewhere_stay():
    """Numbers on the host may meet rows on a GPU; the operator needs all on one device."""
    x = torch.zeros(2, 3, 6, D, device="meta")
    angle = torch.tensor(0.5)
    _, found, _ = compiled(lambda x, cos, sin: x * cos + rotate_half(x) * sin, x, angle.cos(), angle.sin())
    assert found == 0


def test_rows_of_unknown_number():
    """Of rows that are chosen by their values nobody knows the number; two such numbers may differ."""

    def chosen(x, cos, sin, keep):
        rows = x[keep]
        return rows * cos[keep] + rotate_half(rows) * sin[keep]

    x, cos, sin = (t.expand(2, 3, 6, D).contiguous() if t.dim() == 4 else t[:, None] for t in arguments(torch.float32))
    keep = torch.tensor([True, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        result, _, _ = compiled(chosen, x, cos, sin, keep)
    torch.testing.assert_close(result, chosen(x, cos, sin, keep))
