"""How a case is measured: every implementation checked against float64, then timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from harness import ROUNDS, Captured, interleave
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.dispatch import choose
from attnpatch.testing.samples import check_samples, relative_error

LEAST_STEPS = 8
WRONG = 0.03
"""A peer with a larger relative error computes something else: bfloat16 is off by 0.002 to 0.007."""
WRONG_IN_FP8 = 0.1
"""The same of ours on 8 bit floats, which is off by 0.04 to 0.06."""


class Implementation(NamedTuple):
    """One way to run a call.

    Args:
        run: from what ``prepare`` returns to the output ``[batch, num_heads, seqlen_q, head_dim_v]``.
        prepare: the form in which it takes the call, made once, before the timing: pages, 8 bits, a plan.
    """

    run: Callable[[Any], Tensor]
    prepare: Callable[[AttentionCall], Any] = lambda call: call


Implementations = dict[str, Implementation]
"""What can run a call, by the name it has in the results; ours begin with ``attnpatch``."""


class Measured(Protocol):
    """What :func:`measure` needs to know of a case."""

    @property
    def suite(self) -> str:
        """The suite's name."""
        ...

    @property
    def name(self) -> str:
        """The case's name."""
        ...

    @property
    def short(self) -> bool:
        """Whether a run is short beside the gap between two graphs, so that a graph holds several."""
        ...

    @property
    def buffers(self) -> int:
        """Calls over different buffers that are together larger than L2."""
        ...

    def call(self, seed: int) -> AttentionCall:
        """A call over buffers of its own."""
        ...

    def implementations(self, call: AttentionCall) -> Implementations:
        """Ours, the first, and its peers."""
        ...

    def rate(self, ms: float, form: Any) -> dict[str, float]:
        """Useful work per second, by unit, of a run that takes the call as ``form``."""
        ...


def ours(call: AttentionCall) -> Tensor:
    """The kernel that dispatch takes."""
    return choose(call)[0].run(call)


def our_name(call: AttentionCall) -> str:
    """Its name in the results."""
    return f"attnpatch.{choose(call)[1].backend}"


class Ready(NamedTuple):
    """An implementation that was found right, and the forms of all calls."""

    name: str
    run: Callable[[Any], Tensor]
    forms: list[Any]
    rel_err: float


def measure(case: Measured, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """Rows of one case: every implementation, both clocks. Each must be right before anything is timed.

    Raises:
        AssertionError: our output is outside the tolerance against float64.
    """
    steps = -(-LEAST_STEPS // case.buffers) if case.short else 1
    found, captured = {}, {}
    for one in ready(case, case.buffers):
        with left_out_if_it_fails(one.name):
            captured[one.name] = Captured(one.run, one.forms * steps)
            found[one.name] = one
    for name, by_clock in interleave(captured, rounds).items():
        for clock, ms in by_clock.items():
            row = {"suite": case.suite, "case": case.name, "impl": name, "ms": ms}
            yield {**row, **case.rate(ms, found[name].forms[0]), "rel_err": found[name].rel_err, "clock": clock}


def ready(case: Measured, buffers: int = 1) -> Iterator[Ready]:
    """Every implementation that runs, compiled and checked on the first of ``buffers``."""
    calls = [case.call(seed) for seed in range(buffers)]
    for name, (run, prepare) in case.implementations(calls[0]).items():
        found = []
        with left_out_if_it_fails(name):
            forms = [prepare(call) for call in calls]
            found.append(Ready(name, run, forms, check(name, run, forms[0], calls[0])))
        yield from found


@contextmanager
def left_out_if_it_fails(name: str) -> Iterator[None]:
    """A peer that fails inside costs a line that says why; ours raises."""
    try:
        yield
    except Exception as error:
        if name.startswith("attnpatch"):
            raise
        print(f"  {name} is left out: {type(error).__name__}: {str(error)[:200]}", flush=True)


def check(name: str, run: Callable[[Any], Tensor], form: Any, call: AttentionCall) -> float:
    """The relative error of a run against float64, of ``form`` where that is a call of its own.

    Raises:
        AssertionError: ours is outside the tolerance, a peer above WRONG.
    """
    o, exact = run(form), form if isinstance(form, AttentionCall) else call
    rounds = exact.asks_for_fp8
    if name.startswith("attnpatch") and not rounds:
        check_samples(o, exact)
    error = relative_error(o.nan_to_num(nan=torch.inf), exact)
    assert error < (WRONG_IN_FP8 if rounds else WRONG), f"its relative error is {error:.1e}"
    return error
