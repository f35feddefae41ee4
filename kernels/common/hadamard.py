"""The rotation of TBQ4 blocks in registers: ``y = s2 * H(s1 * x) / sqrt(n)``, and back. Device code.

BLOCKS are the sizes of a vector's blocks (attnpatch.tbq4.blocks_of). H is Sylvester's Hadamard matrix,
``H[i, j] = (-1) ** popcount(i & j)``. Where all blocks have one size n = A * B it factors into those of A and B, which
take A + B additions per channel instead of n.
"""

import triton
import triton.language as tl

from attnpatch.tbq4 import codec

SIGNS_IN, SIGNS_OUT = (
    tl.constexpr(tuple(int.from_bytes(bytes.fromhex(x)[i : i + 4], "little", signed=True) for i in range(0, 16, 4)))
    for x in codec.SIGNS
)


@triton.jit
def rotate(x, BLOCKS: tl.constexpr):
    """A vector in fp32, ``[WIDE]`` with zeros behind the last block, rotated."""
    places, sizes = block_places(BLOCKS, x.shape[0])
    return sign(places, SIGNS_OUT) * _hadamard(sign(places, SIGNS_IN) * x, BLOCKS) * tl.math.rsqrt(sizes)


@triton.jit
def unrotate(y, BLOCKS: tl.constexpr):
    """The inverse of :func:`rotate`."""
    places, sizes = block_places(BLOCKS, y.shape[0])
    return sign(places, SIGNS_IN) * _hadamard(sign(places, SIGNS_OUT) * y, BLOCKS) * tl.math.rsqrt(sizes)


@triton.jit
def block_places(BLOCKS: tl.constexpr, WIDE: tl.constexpr):
    """Place of each channel within its block, and the block's size in fp32; ``[WIDE]`` each."""
    channels = tl.arange(0, WIDE)
    places, sizes, end = channels, tl.full([WIDE], BLOCKS[0], tl.float32), BLOCKS[0]
    for i in tl.static_range(1, len(BLOCKS)):
        places = tl.where(channels >= end, channels - end, places)
        sizes = tl.where(channels >= end, BLOCKS[i], sizes)
        end += BLOCKS[i]
    return places, sizes


@triton.jit
def sign(places, WORDS: tl.constexpr):
    """-1 where a block's channel flips, by four words of 32 bits, else 1; in fp32."""
    word = places * 0
    for i in tl.static_range(4):
        word = tl.where(places // 32 == i, WORDS[i], word)
    return (1 - 2 * ((word >> (places % 32)) & 1)).to(tl.float32)


@triton.jit
def _hadamard(x, BLOCKS: tl.constexpr):
    WIDE: tl.constexpr = x.shape[0]
    N: tl.constexpr = BLOCKS[0]
    if BLOCKS[len(BLOCKS) - 1] == N:
        B: tl.constexpr = 16 if N >= 64 else 4
        y = tl.reshape(x, [WIDE // N, N // B, 1, B])
        y = tl.sum(y * _signs(B)[None, None, :, :], axis=3)  # [blocks, A, B]
        y = tl.sum(y[:, None, :, :] * _signs(N // B)[None, :, :, None], axis=2)
        y = tl.reshape(y, [WIDE])
    else:
        places, sizes = block_places(BLOCKS, WIDE)
        starts = tl.where(places < sizes, tl.arange(0, WIDE) - places, -1 - tl.arange(0, WIDE))  # none behind the last
        matrix = tl.where(starts[:, None] == starts[None, :], _parity(places[:, None] & places[None, :]), 0.0)
        y = tl.sum(matrix * x[None, :], axis=1)
    return y


@triton.jit
def _signs(N: tl.constexpr):
    """Sylvester's matrix [N, N]."""
    i = tl.arange(0, N)
    return _parity(i[:, None] & i[None, :])


@triton.jit
def _parity(bits):
    """-1 for an odd number of bits among the lowest eight, else 1; in fp32."""
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return (1 - 2 * (bits & 1)).to(tl.float32)
