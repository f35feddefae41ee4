"""Parameters of a config's model, counted on its modules as transformers builds them, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnpatch.roofline.model import Weights

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_GIVE = "give --weight-bytes"


def count_weights(config: Mapping[str, Any]) -> Weights:
    """Weights of the causal language model of a config; no memory is taken, no code of a checkpoint run.

    Parameters of modules called ``experts`` are the routed experts', of which a token takes ``num_experts_per_tok``
    of ``num_experts`` (``num_local_experts``, ``n_routed_experts``); shared experts and routers are everybody's.

    Raises:
        ValueError: transformers is missing or has no such model, the weights are quantised or of an unknown dtype, or
            a mixture does not say how many experts a token takes or names their modules otherwise.
    """
    width = _bytes_per_parameter(config)
    sizes = _sizes(config)
    active, experts = _experts(config, sizes["experts"])
    source = "counted on transformers' modules"
    if experts > 1:
        source += f", {active} of {experts} routed experts per token, those of a batch by even routing"
    return Weights(**sizes, active_share=active / experts, bytes_per_parameter=width, source=source)


def _bytes_per_parameter(config: Mapping[str, Any]) -> int:
    """Of the config's dtype, 16 bit where it has none."""
    if config.get("quantization_config"):
        raise ValueError(f"quantization_config is set: bytes per parameter are not known from it; {_GIVE}")
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in _BYTES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_BYTES)}; {_GIVE}")
    return _BYTES[dtype]


def _experts(config: Mapping[str, Any], parameters: float) -> tuple[int, int]:
    """Experts per token and experts; (1, 1) without any."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[key] for key in keys if config.get(key)), 1)
    active = config.get("num_experts_per_tok")
    if experts == 1 and not parameters:
        return 1, 1
    if not parameters:
        raise ValueError(f"{experts} experts, and no module called experts holds their weights; {_GIVE}")
    if experts == 1 or not active:
        raise ValueError(f"a mixture of experts without num_experts or num_experts_per_tok in its config; {_GIVE}")
    return active, experts


def _sizes(config: Mapping[str, Any]) -> dict[str, float]:
    """Parameters of the body, the head and the experts."""
    from torch import nn

    model = _build(config)
    head = model.get_output_embeddings().weight
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    sizes: dict[str, float] = {"body": 0, "head": head.numel(), "experts": 0}
    for name, parameter in model.named_parameters():
        if parameter is not head and id(parameter) not in looked_up:
            sizes["experts" if ".experts." in name else "body"] += parameter.numel()
    return sizes


def _build(config: Mapping[str, Any]) -> Any:
    """The model of a config, without memory."""
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(f"weights are counted by transformers: pip install 'attnpatch[hf]', or {_GIVE}") from error
    values = dict(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type", None), **values))
    except Exception as error:  # whatever a family's constructor makes of wrong values
        raise ValueError(f"transformers cannot build this {config.get('model_type')!r}: {error}; {_GIVE}") from error
