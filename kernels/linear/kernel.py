"""Linear layers of one row: y = W x, as fast as W is read.

A program owns BLOCK_N rows of a weight and walks them BLOCK_K columns at a time, one block ahead of the arithmetic. Its
first block does not depend on what ran before, so it is asked for before the wait for that (programmatic dependent
launch): memory stays busy while one kernel ends and the next begins.

What stands around the products is computed where they are in registers:

    norm        W (g * x * rsqrt(mean(x^2) + eps)): the root is a factor of every sum, known when the sums are
    activation  a(W_0 x) * (W_1 x)
    residual    residual + W x
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnpatch.kernels.common.primitives import tanh

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """SiLU (Elfwing et al., arXiv 1702.03118), GELU (Hendrycks and Gimpel, arXiv 1606.08415) or its tanh form."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * _SQRT_HALF))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        return 0.5 * x * (1 + tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))


@triton.jit
def _block(w, rows, cols, num_rows, K: tl.constexpr):
    """Elements [rows, cols] of a weight [num_rows, K], which are read once; zeros outside."""
    inside = (rows < num_rows)[:, None] & (cols < K)[None, :]
    return tl.load(w + (rows[:, None] * K + cols[None, :]), mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _products(x, norm, eps, w, v, rows, num_rows, K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """Rows of W x and of V x; the same twice when ``v`` is None."""
    cols = tl.arange(0, BLOCK_K)
    w_next = _block(w, rows, cols, num_rows, K)
    w_sums = tl.zeros(w_next.shape, tl.float32)
    if v is not None:
        v_next = _block(v, rows, cols, num_rows, K)
        v_sums = tl.zeros(w_next.shape, tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in tl.range(0, K, BLOCK_K):
        here, after = start + cols, start + BLOCK_K + cols
        w_block, w_next = w_next, _block(w, rows, after, num_rows, K)
        x_block = tl.load(x + here, mask=here < K, other=0.0).to(tl.float32)
        if norm is not None:
            squares += x_block * x_block
            x_block *= tl.load(norm + here, mask=here < K, other=0.0).to(tl.float32)
        w_sums += w_block.to(tl.float32) * x_block[None, :]
        if v is not None:
            v_block, v_next = v_next, _block(v, rows, after, num_rows, K)
            v_sums += v_block.to(tl.float32) * x_block[None, :]
    root = tl.rsqrt(tl.sum(squares) / K + eps) if norm is not None else 1.0
    w_sums = tl.sum(w_sums, 1) * root
    return w_sums, tl.sum(v_sums, 1) * root if v is not None else w_sums


@triton.jit
def _plus(sums, addend, rows, num_rows):
    """``sums`` and these rows of a bias or residual, or ``sums`` when it is None."""
    if addend is None:
        return sums
    else:
        return sums + tl.load(addend + rows, mask=rows < num_rows, other=0.0).to(tl.float32)


@triton.jit
def _store(y, sums, rows, num_rows):
    tl.store(y + rows, sums.to(y.dtype.element_ty), mask=rows < num_rows)


@triton.jit
def _linear_kernel(
    x,  # [K]
    norm,  # [K], or None
    w_0,  # [n_0, K]
    w_1,
    w_2,
    b_0,  # [n_0], or None
    b_1,
    b_2,
    residual,  # [n_0], or None
    y_0,  # [n_0]
    y_1,
    y_2,
    eps,
    n_0,
    n_1,
    n_2,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs of the rows of W_0, then of W_1, then of W_2; with an activation each has its rows of W_0 and W_1."""
    program = tl.program_id(0)
    behind_0 = tl.cdiv(n_0, BLOCK_N)
    behind_1 = behind_0 if w_1 is None or ACTIVATION is not None else behind_0 + tl.cdiv(n_1, BLOCK_N)
    rows = tl.arange(0, BLOCK_N).to(tl.int64)
    if program < behind_0:
        rows += program.to(tl.int64) * BLOCK_N
        gate = w_1 if ACTIVATION is not None else None
        sums, others = _products(x, norm, eps, w_0, gate, rows, n_0, K, BLOCK_K, PDL)
        sums = _plus(sums, b_0, rows, n_0)
        if ACTIVATION is not None:
            sums = _activated(sums, ACTIVATION) * _plus(others, b_1, rows, n_0)
        _store(y_0, _plus(sums, residual, rows, n_0), rows, n_0)
    elif w_1 is not None and ACTIVATION is None:
        if program < behind_1:
            rows += (program - behind_0).to(tl.int64) * BLOCK_N
            sums, _ = _products(x, norm, eps, w_1, None, rows, n_1, K, BLOCK_K, PDL)
            _store(y_1, _plus(sums, b_1, rows, n_1), rows, n_1)
        elif w_2 is not None:
            rows += (program - behind_1).to(tl.int64) * BLOCK_N
            sums, _ = _products(x, norm, eps, w_2, None, rows, n_2, K, BLOCK_K, PDL)
            _store(y_2, _plus(sums, b_2, rows, n_2), rows, n_2)
