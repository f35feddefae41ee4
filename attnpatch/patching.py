"""``patch``: make one model's own calls run rewritten graphs, reversibly and without touching its state.

What is set is the instance's ``_compiled_call_impl``, as ``nn.Module.compile`` does: ``state_dict``, pickle and
``save_pretrained`` do not see it, and a deepcopy or an unpickled model is unpatched. Replacing ``forward`` would
make a deepcopy run the original's weights.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from attnpatch.backend import COMPILED, compile_graph, log
from attnpatch.errors import AttentionNotPatched
from attnpatch.hooked import StandIns, without_hooks
from attnpatch.options import Options, from_keywords
from attnpatch.progress import shown
from attnpatch.reporting import Collector, Report

Model = TypeVar("Model", bound=nn.Module)

RECOMPILE_LIMIT = 64
"""Graphs per model. Dynamo's 8 is too few for one honest run: batch 1, 4 and a beam, each with its lengths."""

_serial = itertools.count()


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _own_code(serial: int) -> Callable[..., Any]:
    """``_call`` with a code object of its own.

    Dynamo counts recompiles per code object, and every Hugging Face model shares one: from the fifth model on, two
    lengths each, they would run eager in silence. It also keys its memory of dynamic shapes by the name.
    """
    name = f"attnpatch_call_{serial}"
    return types.FunctionType(_call.__code__.replace(co_name=name), _call.__globals__, name)


class Patched:
    """The callable installed on a model: runs it compiled by attnpatch and watches for what runs past.

    Args:
        module: the model.
        options: the patch's options.
        collector: where graphs and gaps are counted.
        previous: the ``_compiled_call_impl`` found, to be put back; None if there was none.
        root: the model that was patched, whose names the sites get.
    """

    def __init__(
        self, module: nn.Module, options: Options, collector: Collector, previous: Any, root: nn.Module
    ) -> None:
        self.module, self.options, self.collector, self.previous = module, options, collector, previous
        self.names = [name for name, _ in root.named_modules()]
        self.choose_cache = _cache_choice(module, options.cache)
        self.compiled = torch.compile(_own_code(next(_serial)), backend=self._backend, **_limit_argument())
        self.stand_ins = StandIns(module)
        self.compilation = ExitStack()
        """What a call that compiles ends with."""
        self.parts: list[Patched] = []
        self.is_part = False

    def _backend(self, gm: torch.fx.GraphModule, example_inputs: Any, **_: Any) -> Callable[..., Any]:
        self.compilation.enter_context(_guard_context())  # they are made when this returns
        compiled = compile_graph(gm, example_inputs, self.options, self.collector)
        for site in self.collector.graphs[-1].sites:
            site.module = self._full_name(site.module)
        return compiled

    def _full_name(self, path: str) -> str:
        """The one module of the model whose name ends in ``path``: a graph names modules from where its frame began."""
        path = without_hooks(path)
        if path in self.names:
            return path
        longer = [name for name in self.names if name.endswith(f".{path}")]
        return longer[0] if len(longer) == 1 else path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model compiled; be a part of the wrapper that was patched with it, while that is traced.

        Not of what others compile, as transformers does with a static cache: there the patch would be lost.
        """
        if torch.compiler.is_dynamo_compiling() and self.is_part:
            return _call(self.module, *args, **kwargs)
        return self._run(*args, **kwargs)

    @torch._dynamo.disable
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.stand_ins.follow()
        if self.choose_cache is None or len(args) > len(self.inputs):
            return self._run_on_cache(*args, **kwargs)
        return self.choose_cache.run(self._run_on_cache, self._named(args, kwargs))

    def _run_on_cache(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((x for x in (*kwargs.values(), *args) if hasattr(x, "before_forward")), None)
        if cache is None:
            return self._run_compiled(None, *args, **kwargs)
        arguments, stored = cache.before_forward(self.module, self._named(args, kwargs)), False
        try:
            result = self._run_compiled(cache, **arguments)
            stored = True
        finally:
            cache.after_forward(stored)
        return result

    @cached_property
    def inputs(self) -> list[str]:
        """Names of what the model takes by position."""
        return _inputs(self.module)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.inputs, args, strict=False)), **kwargs} if args else kwargs

    def _run_compiled(self, cache: Any, /, *args: Any, **kwargs: Any) -> Any:
        runs, breaks = self.collector.runs, _graph_breaks()
        # Python of the model's own, between graphs, could change what was begun before it
        begins = self.options.replays and cache is not None and not self.collector.gaps
        try:
            with (
                self.collector.replays.ahead(kwargs, cache) if begins else nullcontext(),
                _limit_context(len(self.collector.graphs)),
                shown(type(self.module).__name__),
                self._with_parts(),
            ):
                result = self.compiled(self.module, *args, **kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, AttentionNotPatched):
                raise error.inner_exception from None
            raise
        finally:
            self.compilation.close()
        self._note_gaps(runs, breaks)
        return result

    @contextmanager
    def _with_parts(self) -> Iterator[None]:
        for part in self.parts:
            part.is_part = True
        try:
            yield
        finally:
            for part in self.parts:
                part.is_part = False

    def _note_gaps(self, runs: int, breaks: dict[str, int]) -> None:
        place = type(self.module).__name__
        for reason, count in _graph_breaks().items():
            if count > breaks.get(reason, 0):
                self._gap("graph break", f"{place}: {reason.splitlines()[0]}")
        if self.collector.runs == runs:
            full = len(self.collector.graphs) >= RECOMPILE_LIMIT
            self._gap("recompile limit" if full else "skipped frame", f"{place}, which ran eagerly")

    def _gap(self, kind: str, place: str) -> None:
        if not self.collector.gaps[kind, place]:
            log.warning("attention may run unfused: %s at %s", kind, place)
        self.collector.gaps[kind, place] += 1
        if self.options.strict:
            raise AttentionNotPatched([f"{kind} at {place}"])


def _cache_choice(module: nn.Module, name: str | None) -> Any:
    """What gives caches to calls that bring none; None where nothing does."""
    if name is None or (name == "auto" and not hasattr(module, "can_generate")):
        return None
    from attnpatch.caches.choosing import choose_cache  # needs transformers

    return choose_cache(module, name)


def _graph_breaks() -> dict[str, int]:
    return dict(counters["graph_break"])


_HAS_LIMIT_ARGUMENT = "recompile_limit" in inspect.signature(torch.compile).parameters


def _limit_argument() -> dict[str, Any]:
    return {"recompile_limit": RECOMPILE_LIMIT} if _HAS_LIMIT_ARGUMENT else {}


def _limit_context(graphs: int) -> AbstractContextManager[Any]:
    """The limit around a call, for torch versions whose ``torch.compile`` takes none (2.11), once there are many."""
    if _HAS_LIMIT_ARGUMENT or graphs < min(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT):
        return nullcontext()
    return torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT)


def _guard_context() -> AbstractContextManager[Any]:
    """For guards that see a hook come, as nobody expects of a model that only got faster kernels.

    And that see when the data of a weight is replaced, as those of torch 2.13 do by themselves.
    """
    options: Any = {"skip_nnmodule_hook_guards": False}
    if not _HAS_LIMIT_ARGUMENT:
        options |= {"use_recursive_dict_tags_for_guards": False, "skip_tensor_guards_with_matching_dict_tags": False}
    return torch._dynamo.config.patch(**options)


def _targets(model: nn.Module) -> list[nn.Module]:
    """The model, and under a PEFT wrapper also its base: ``generate`` calls that one."""
    base = unwrapped(model)
    return [model] if base is model else [model, base]


def unwrapped(model: nn.Module) -> nn.Module:
    """What a PEFT wrapper wraps; other models themselves."""
    unwrap: Any = getattr(model, "get_base_model", None)
    return unwrap() if unwrap else model


def _inputs(model: nn.Module) -> list[str]:
    """Names of what the model's forward takes by position; a wrapper that takes anything hands it on."""
    parameters = inspect.signature(model.forward).parameters.values()
    base = unwrapped(model)
    if base is not model and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return _inputs(base)
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def patch(model: Model, **options: Any) -> Model:
    """Make ``model(...)``, ``model.generate(...)`` and pipelines run with fused attention.

    Works in place and is reversible with :func:`unpatch`. Graphs are made at the first calls.

    Args:
        model: any ``nn.Module``.
        options: see :class:`attnpatch.options.Options`.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module, or an option is unknown.
        ValueError: an option's value is not allowed, or the model is patched already, or ``cache`` does not fit it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise TypeError(
            "patch takes the model itself, not what torch.compile(model) returned: its generate() runs the original"
        )
    targets = _targets(model)
    if any(_patch_of(target) for target in targets):
        raise ValueError(f"this {type(model).__name__} is patched already; call attnpatch.unpatch(model) first")
    chosen, collector = from_keywords(options), Collector()
    made = [Patched(x, chosen, collector, x.__dict__.get("_compiled_call_impl"), model) for x in targets]
    for target, installed in zip(targets, made, strict=True):
        target._compiled_call_impl = installed
    made[0].parts = made[1:]
    return model


def unpatch(model: Model) -> Model:
    """Take the patch off; what was installed before it is put back.

    Raises:
        ValueError: the model is not patched.
    """
    if not _patch_of(model):
        raise ValueError(f"this {type(model).__name__} is not patched")
    for target in _targets(model):
        patched = _patch_of(target)
        if patched:
            del target.__dict__["_compiled_call_impl"]
            patched.stand_ins.take_off()
            patched.collector.replays.release()
            if patched.choose_cache is not None:
                patched.choose_cache.release()
            if patched.previous is not None:
                target._compiled_call_impl = patched.previous
    return model


@contextmanager
def patched(model: Model, **options: Any) -> Iterator[Model]:
    """Patch ``model`` inside a ``with`` block; takes what :func:`patch` takes."""
    patch(model, **options)
    try:
        yield model
    finally:
        unpatch(model)


def _patch_of(model: nn.Module) -> Patched | None:
    found = model.__dict__.get("_compiled_call_impl")
    return found if isinstance(found, Patched) else None


def report(model: nn.Module | Callable[..., Any] | None = None) -> Report:
    """What runs where, and why.

    Args:
        model: a patched model, or one compiled with ``backend="attnpatch"``. None: everything compiled with the
            bare backend in this process.
    """
    if model is None:
        return Report(COMPILED.graphs, COMPILED.gaps)
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"report takes a torch.nn.Module or nothing, not {type(model).__name__}")
    found = _patch_of(model)
    if found:
        collector = found.collector
        return Report(collector.graphs, collector.gaps, "" if collector.graphs else "patched, but not called yet")
    parameters = {id(p) for p in model.parameters()}
    graphs = [graph for graph in COMPILED.graphs if graph.belongs_to(parameters)]
    return Report(graphs, Collector().gaps, "" if graphs else _why_no_graph(model))


def _why_no_graph(model: nn.Module) -> str:
    name = type(model).__name__
    if model.__dict__.get("_compiled_call_impl") is not None:
        return f"this {name} is compiled, but no graph of it went through attnpatch yet"
    return (
        f"this {name} is not patched: call attnpatch.patch(model), or model.compile(backend='attnpatch'). "
        "A deepcopy or an unpickled model starts unpatched, and torch.compile(model).generate() runs the original."
    )
