"""Masks and biases one step away from those that become terms: read back or streamed, the numbers are the same."""

import torch

from .lookalikes import B, H, S

MASKS = []
"""Functions that return a mask (bool, True for visible) or a bias, broadcastable to [B, H, S, S]."""


def mask(function):
    """Enter a function in ``MASKS``."""
    MASKS.append(function)
    return function


def rows():
    return torch.arange(S)[:, None]


def keys():
    return torch.arange(S)[None, :]


def slopes():
    return torch.tensor([0.5, -0.25, 0.125, 1.0]).view(H, 1, 1)


@mask
def global_tokens_and_a_window():
    """Longformer: two runs of keys."""
    return (keys() < 2) | ((rows() - keys()).abs() <= 1)


@mask
def global_rows():
    return (rows() < 2) | (keys() <= rows())


@mask
def dilated():
    return ((rows() - keys()) % 2 == 0) & (keys() <= rows())


@mask
def strided():
    return rows() % 3 == keys() % 3


@mask
def chunks_of_unequal_sizes():
    return (rows() // 4 >= keys() // 3) | (keys() == 0)


@mask
def causal_by_chunks():
    return keys() // 4 <= rows() // 4


@mask
def chunk_before_and_own():
    distance = rows() // 3 - keys() // 3
    return (distance >= 0) & (distance <= 1)


@mask
def shifted_chunks():
    return (rows() + 2) // 4 == (keys() + 2) // 4


@mask
def chunks_of_negative_positions():
    return torch.div(rows() - 5, 4, rounding_mode="floor") == torch.div(keys() - 5, 4, rounding_mode="floor")


@mask
def chunks_rounded_to_zero():
    """The chunk around position 5 is wider than the others."""
    return torch.div(rows() - 5, 4, rounding_mode="trunc") == torch.div(keys() - 5, 4, rounding_mode="trunc")


@mask
def documents_in_pieces():
    """Equal ids that are no neighbours."""
    ids = torch.tensor([0, 0, 1, 1, 0, 0, 2, 1, 1, 2])
    return ids[:, None] == ids[None, :]


@mask
def documents_per_sequence():
    ids = torch.stack([torch.arange(S) // 3, torch.arange(S).flip(0) // 4])
    return (ids[:, None, :, None] == ids[:, None, None, :]) & (keys() <= rows())


@mask
def documents_by_a_running_sum():
    starts = torch.tensor([0, 0, 0, 1, 0, 1, 1, 0, 0, 0])
    ids = starts.cumsum(0)
    return (ids[:, None] == ids[None, :]) & (keys() <= rows())


@mask
def documents_by_a_sum_that_falls():
    ids = torch.tensor([0, 1, -1, 1, 0, -1, 0, 0, 0, 0]).cumsum(0)
    return (ids[:, None] == ids[None, :]) & (keys() <= rows())


@mask
def other_documents():
    ids = torch.arange(S) // 3
    return ids[:, None] != ids[None, :]


@mask
def exclusive_or():
    return ((keys() <= rows()) ^ (keys() < 3)) | (keys() == rows())


@mask
def anticausal():
    return keys() >= rows()


@mask
def window_ahead_only():
    return (keys() > rows() - 1) & (keys() <= rows() + 2)


@mask
def window_apart():
    """Keys at a distance, and never the row's own."""
    distance = (rows() - keys()).abs()
    return (distance >= 2) & (distance <= 5)


@mask
def antidiagonal():
    return rows() + keys() <= S - 1


@mask
def steep():
    return keys() <= 2 * rows()


@mask
def every_second_row():
    return (keys() <= rows()) | (rows() % 2 == 1)


@mask
def prefix_per_sequence():
    return (keys() <= rows()) | (keys() < torch.tensor([2, 5]).view(B, 1, 1, 1))


@mask
def prefix_per_head():
    return (keys() <= rows()) | (keys() < torch.tensor([0, 2, 5, 9]).view(H, 1, 1))


@mask
def window_per_head():
    """Each head looks as far as it may."""
    return (keys() <= rows()) & (keys() > rows() - torch.tensor([1, 2, 4, 8]).view(H, 1, 1))


@mask
def causal_for_some_heads():
    return (keys() <= rows()) | (torch.arange(H) < 2).view(H, 1, 1)


@mask
def lengths_of_rows():
    return keys() < (torch.arange(S) % 4 + 1)[:, None]


@mask
def padding_with_holes():
    keep = torch.tensor([[1, 0, 1, 1, 0, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    return keep[:, None, None, :] & (keys() <= rows())


@mask
def hidden_rows_of_padding():
    """The rows of padding are open, not closed."""
    keep = torch.arange(S) < torch.tensor([[7], [S]])
    return (keep[:, None, None, :] & (keys() <= rows())) | ~keep[:, None, :, None]


@mask
def block_diagonal():
    return torch.block_diag(*[torch.ones(n, n) for n in (3, 5, 2)]).bool()


@mask
def kronecker():
    return torch.kron(torch.eye(5), torch.ones(2, 2)).bool()


@mask
def flipped_causal():
    return torch.ones(S, S, dtype=torch.bool).tril().flip(0) | (keys() == 0)


@mask
def rolled_causal():
    return torch.ones(S, S, dtype=torch.bool).tril().roll(1, 0)


@mask
def alibi():
    return slopes() * (keys() - rows())


@mask
def alibi_both_sides():
    return slopes() * -(keys() - rows()).abs()


@mask
def alibi_from_another_position():
    return slopes() * (keys() - rows() - 3).abs()


@mask
def alibi_by_keys_alone():
    return slopes() * keys()


@mask
def alibi_clipped():
    return slopes() * (keys() - rows()).clamp(min=-3)


@mask
def alibi_squared():
    return slopes() * (keys() - rows()) ** 2


@mask
def alibi_by_logarithm():
    return slopes() * ((keys() - rows()).abs() + 1).log()


@mask
def alibi_twice_as_steep_ahead():
    distance = keys() - rows()
    return torch.where(distance > 0, -2 * slopes() * distance, slopes() * distance)


@mask
def alibi_per_sequence():
    return torch.tensor([0.5, 2.0]).view(B, 1, 1, 1) * (keys() - rows())


@mask
def alibi_of_rows():
    return torch.linspace(0, 1, S)[:, None] * (keys() - rows())


@mask
def alibi_and_causal():
    bias = slopes() * (keys() - rows())
    return bias.masked_fill(keys() > rows(), -torch.inf)


@mask
def alibi_and_shifted_causal():
    """The bias counts from the row, the mask from two rows on."""
    return slopes() * (keys() - rows()) + torch.full((S, S), -torch.inf).triu(3)


@mask
def alibi_and_a_bias():
    return slopes() * (keys() - rows()) + torch.linspace(-1, 1, S) ** 2


@mask
def two_alibis():
    return slopes() * (keys() - rows()).abs() + slopes().flip(0) * (keys() - rows())


@mask
def sum_that_excludes_only_together():
    """-6e8 twice; each alone is a bias."""
    return torch.full((S, S), -6e8).triu(1) + torch.full((S, S), -6e8).triu(1)


@mask
def bias_that_brings_back():
    """What the first mask hides, the second lifts."""
    hidden = torch.full((S, S), -1e9).triu(1)
    return hidden + torch.where(keys() == S - 1, 1e9, 0.0)


@mask
def large_and_small_fill():
    return torch.where(keys() > rows(), -1e9, torch.where(keys() == 0, -2.0, 0.0))


@mask
def unlike_fills():
    return torch.where(keys() > rows() + 2, -torch.inf, torch.where(keys() > rows(), -5.0, 0.0))


@mask
def half_of_a_mask_of_minus_infinity():
    return torch.full((S, S), -torch.inf).triu(1) * 0.5


@mask
def negated_mask():
    return -torch.full((S, S), torch.inf).triu(1)


@mask
def cumulative_causal():
    return torch.eye(S).cumsum(1).t() > 0
