"""Fewer combinations of parameters than their product, where what one of them does is independent of the others."""

from itertools import cycle, product

import pytest


def in_turn(cases, *others):
    """Values of pytest's parametrize: each of ``cases``, a dict by name, with the next combination of ``others``."""
    return [
        pytest.param(case, *rest, id=name)
        for (name, case), rest in zip(cases.items(), cycle(product(*others)), strict=False)
    ]
