"""The two formats in plain Python, and how far vectors are from what they were."""

import math
import struct
from itertools import pairwise


def rotated_by_hand(x):
    """s2 * (H (s1 * x)), a Python list of floats."""
    s1, s2 = (
        [-1 if bytes.fromhex(signs)[i // 8] >> i % 8 & 1 else 1 for i in range(len(x))]
        for signs in ("59036ae44959f842bb3bc6a4a950f249", "90eeac16dc8f623f7a35a5b76265a5be")
    )
    signed = [a * s for a, s in zip(x, s1, strict=True)]
    return [s * math.fsum(-a if (i & j).bit_count() % 2 else a for j, a in enumerate(signed)) for i, s in enumerate(s2)]


def encoded_by_hand(x):
    """Codes and float64 norm of a block."""
    length = math.sqrt(math.fsum(a * a for a in x))
    levels = (-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104)
    middles = [(a + b) / 2 * 0.00231352 * math.sqrt(128) for a, b in pairwise(levels)]
    codes = [sum(a / length >= middle for middle in middles) for a in rotated_by_hand(x)]
    return codes, length / math.sqrt(sum(levels[code] ** 2 for code in codes)) * 512


def relative_error(found, x):
    return ((found - x).square().sum(-1) / x.square().sum(-1)).double()


def block_by_hand(x):
    """One block, in plain Python."""
    upper = (0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556)
    between = (0.022832, 0.046190, 0.070693, 0.097191, 0.127056, 0.162977, 0.212232)
    centroids = [-c for c in reversed(upper)] + list(upper)
    boundaries = [-b for b in reversed(between)] + [0.0] + list(between)
    length = math.sqrt(math.fsum(a * a for a in x))
    codes = [sum(a / length / math.sqrt(128) >= b for b in boundaries) for a in rotated_by_hand(x)]
    d = length / math.sqrt(math.fsum(centroids[code] ** 2 for code in codes))
    return struct.pack("<e", d) + bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
