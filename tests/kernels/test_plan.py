"""How keys are shared among programs: from shapes on the host, and by each program from the lengths."""

import pytest
import torch

from attnpatch.kernels.decode import configs
from attnpatch.testing.inputs import random_call


def random_step(**case):
    defaults = {"num_kv_heads": 1, "seqlen_q": 1, "seqlen_k": 130, "head_dim": 1, "dtype": torch.float16}
    return random_call(**{**defaults, **case})


def planned(call):
    return configs.choose_plan(call, configs.choose_config(call))


def test_a_plan_does_not_depend_on_the_offset():
    """It comes from shapes: a captured graph replays while the valid length grows."""
    short, long = (random_step(q_offset=offset, window_right=0) for offset in (torch.tensor(3), torch.tensor(129)))
    assert planned(short) == planned(long)


SPLIT_COUNTS = {
    "a block": ({"seqlen_k": 64}, 1),
    "a split per block": ({"seqlen_k": 200}, 4),
    "the multiprocessors are filled first": ({"seqlen_k": 4096, "num_kv_heads": 4, "batch": 2}, 32),
    "two programs each": ({"seqlen_k": 131072, "num_kv_heads": 4, "batch": 2}, 33),
    "at most MAX_SPLITS": ({"seqlen_k": 131072}, 128),
    "the chip is full": ({"seqlen_k": 4096, "num_kv_heads": 4, "batch": 40}, 1),
    "the window limits": ({"seqlen_k": 131072, "window_left": 1023, "window_right": 0}, 16),
}


@pytest.mark.parametrize(("case", "expected"), SPLIT_COUNTS.values(), ids=SPLIT_COUNTS)
def test_split_counts(monkeypatch, case, expected):
    monkeypatch.setattr(configs, "multiprocessors", lambda device: 132)
    assert planned(random_step(**case)).num_splits == expected
