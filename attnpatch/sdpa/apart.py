"""Calls in another process: one that reads out of place on a GPU ends every later call of its process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def _is_usable() -> bool:
    with suppress(RuntimeError):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return True
    return False


def each_apart(
    function: Callable[[T], R], arguments: Iterable[T], is_usable: Callable[[], bool] = _is_usable
) -> Iterator[R]:
    """``map``, in a child process; in a fresh one after each call that ``is_usable`` is false behind."""
    pool: Any = None
    try:
        for argument in arguments:
            pool = pool or ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            result, goes_on = pool.submit(_then_look, function, argument, is_usable).result()
            yield result
            if not goes_on:
                pool.shutdown()
                pool = None
    finally:
        if pool is not None:
            pool.shutdown()


def _then_look(function: Callable[[T], R], argument: T, is_usable: Callable[[], bool]) -> tuple[R, bool]:
    return function(argument), is_usable()
