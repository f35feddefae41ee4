"""The options of every way in, their environment twins, and how torch.compile's arguments map to them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from attnpatch.checking import check_prefill_dtype
from attnpatch.dispatch import check_names

_OFF = ("", "0", "false", "no", "off")
CACHES = ("auto", "buffered", "tbq4", None)
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Options:
    """What a user can choose; the same names everywhere.

    Args:
        strict: raise AttentionNotPatched when any attention stays unfused (env ``ATTNPATCH_STRICT``).
        backends: the backends that may run, in order; a named backend never falls back silently
            (env ``ATTNPATCH_BACKENDS``, comma-separated). Empty: all.
        batch_invariant: the result of a sequence does not depend, to the bit, on the others of its batch: splits of
            K have one size, whatever else runs beside it.
        prefill_dtype: "fp8" computes prefills on 8 bit floats (e4m3), with scales per head, where there is a kernel
            for it; where there is none the report and the log say why. None: in the model's dtype.
        rest: who runs the rest of the graph: "eager" starts fast; "inductor" compiles it. On a GPU where no gradients
            are recorded, linear layers of one row in 16 bits are one kernel with their norm, activation and residual,
            and under "eager" all norms and rotary embeddings one kernel each.
        cuda_graphs: whether a decode step that repeats is replayed from a CUDA graph. "auto": where it can be, and not
            beside Inductor's own CUDA graphs; True also says where it cannot.
        cache: for ``patch`` alone: calls that bring no cache of their own get an ``attnpatch.BufferedCache``
            ("buffered") or an ``attnpatch.TBQ4Cache`` ("tbq4"). "auto": a BufferedCache on a GPU, for calls that
            record no gradients, of models that it fits. None: the caches that models make are left alone.
        log_level: of the logger "attnpatch": "debug", "info", "warning" or "error" (env ``ATTNPATCH_LOG``).
        inductor: options that go to Inductor as they are.
    """

    strict: bool = field(default_factory=lambda: os.environ.get("ATTNPATCH_STRICT", "").lower() not in _OFF)
    backends: tuple[str, ...] = field(default_factory=lambda: _split(os.environ.get("ATTNPATCH_BACKENDS", "")))
    batch_invariant: bool = False
    prefill_dtype: str | None = None
    rest: str = "eager"
    cuda_graphs: bool | str = "auto"
    cache: str | None = "auto"
    log_level: str = field(default_factory=lambda: os.environ.get("ATTNPATCH_LOG", "warning").lower())
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "backends", check_names(_split(self.backends)))
        if not isinstance(self.batch_invariant, bool):
            raise ValueError(f"batch_invariant={self.batch_invariant!r} is neither True nor False")
        check_prefill_dtype(self.prefill_dtype)
        if not isinstance(self.cuda_graphs, bool) and self.cuda_graphs != "auto":
            raise ValueError(f"cuda_graphs={self.cuda_graphs!r} is none of 'auto', True, False")
        if self.rest not in ("eager", "inductor"):
            raise ValueError(f"rest={self.rest!r} is neither 'eager' nor 'inductor'")
        if self.cuda_graphs is True and self.inductor.get("triton.cudagraphs"):
            raise ValueError("cuda_graphs=True beside Inductor's triton.cudagraphs (reduce-overhead): choose one")
        if self.cache not in CACHES:
            raise ValueError(
                f"cache={self.cache!r} is none of {', '.join(map(repr, CACHES))}; None leaves the caller's"
            )
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level={self.log_level!r} is none of {', '.join(LOG_LEVELS)}")
        logging.getLogger("attnpatch").setLevel(self.log_level.upper())

    @property
    def replays(self) -> bool:
        """Whether steps are replayed where they can be: a model has one kind of CUDA graphs."""
        return bool(self.cuda_graphs) and not self.inductor.get("triton.cudagraphs")

    @property
    def arguments(self) -> dict[str, Any]:
        """The operator's arguments that are not at their defaults."""
        given = {
            "batch_invariant": self.batch_invariant,
            "prefill_dtype": self.prefill_dtype,
            "backends": ",".join(self.backends),
        }
        return {name: value for name, value in given.items() if value}


def _split(names: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        return tuple(name.strip() for name in names.split(",") if name.strip())
    return tuple(names)


OWN_NAMES = tuple(f.name for f in fields(Options) if f.name != "inductor")


def from_keywords(options: Mapping[str, Any]) -> Options:
    """Options given as keywords to ``patch``.

    Raises:
        TypeError: a name is not an option.
        ValueError: a value is not allowed.
    """
    for name in options:
        if name not in OWN_NAMES:
            raise TypeError(f"unknown option {name!r}; the options are {', '.join(OWN_NAMES)}")
    return Options(**options)


def from_compile(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Options given through ``torch.compile(mode=, options=)``; Inductor's imply ``rest="inductor"``.

    Raises:
        ValueError: a name is neither ours nor Inductor's, or a value is not allowed.
    """
    given = dict(options or {})
    own = {name: given.pop(name) for name in OWN_NAMES if name in given}
    inductor = _mode_options(mode) if mode else {}
    if given:
        _check_inductor_names(given)
        inductor.update(given)
    if mode or given:
        own["rest"] = "inductor"
    return Options(**of_graphs(own), inductor=inductor)


def of_graphs(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options``, of a way in that sees graphs and no calls, without a cache.

    Raises:
        ValueError: they choose one.
    """
    if options.get("cache") is not None:
        raise ValueError(f"cache={options['cache']!r} is an option of attnpatch.patch(model): a graph brings its cache")
    return {**options, "cache": None}


def _mode_options(mode: str) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def _check_inductor_names(given: Mapping[str, Any]) -> None:
    from torch._inductor import list_options

    known = set(list_options())
    for name in given:
        if name.replace("-", "_") not in known:
            raise ValueError(
                f"unknown option {name!r}: neither attnpatch's ({', '.join(OWN_NAMES)}) nor one of Inductor's"
            )
