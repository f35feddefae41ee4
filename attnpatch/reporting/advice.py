"""What to change in a model or a call so that a refused attention is fused, where something is known to help."""

from __future__ import annotations

import re

REASONS = {
    r"dropout": "call model.eval(), or set the model's attention dropout to 0 while it trains",
    r"\(output_attentions\)": "do not ask for output_attentions: whoever needs the probabilities keeps them unfused",
    r"probabilities are also read by|scores are also read by": "take out that reader (a hook, a loss, a log)",
    r"logsumexp of the scores is read before": "compute v before the logsumexp is used",
    r"is written in place": "write into another tensor (x = x + y, not x += y), or after the attention",
    r"torch's fast path for inference": "call torch.backends.mha.set_fastpath_enabled(False) before the model",
    r"(softcap|beta of .*|a scale that) is known only at run time": "make it a Python number or a constant buffer",
    r"rounds the scores to": "keep the scores in the dtype of q, or cast them to float32",
    r"which does not exclude them": "if they are to be hidden, fill them with -inf or torch.finfo(dtype).min",
    r"there is no backward to pools and codes": "run it under torch.inference_mode(), or keep K and V as floats",
}

GAPS = {
    "graph break": "run with TORCH_LOGS=graph_breaks to see the line; replace .item(), print or data-dependent control",
    "skipped frame": "call the model itself, not model.forward, and run with TORCH_LOGS=dynamo to see what was skipped",
    "recompile limit": "pass fewer kinds of inputs, or pad them alike; TORCH_LOGS=recompiles names what differed",
}


def for_reason(reason: str) -> str:
    """What may help a site that was refused for ``reason``; empty when nothing is known to."""
    return next((advice for pattern, advice in REASONS.items() if re.search(pattern, reason)), "")


def for_gap(kind: str) -> str:
    """Likewise for a gap of that kind."""
    return GAPS.get(kind, "")
