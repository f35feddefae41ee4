"""attnpatch as a backend of torch.compile: the model compiled, its logits beside the original's, and the report."""

import sys

import torch
from rich.console import Console

import attnpatch
from attnpatch.cli.checkpoint import load_checkpoint
from attnpatch.testing.tolerance import max_error


def main(path: str | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, tokenizer = load_checkpoint(path, dtype, "eager", device)
    inputs = tokenizer("The sky is blue because", return_tensors="pt").to(device)
    with torch.no_grad():
        original = model(**inputs).logits
        model.compile(backend="attnpatch", options={"strict": True})
        compiled = model(**inputs).logits

    console = Console()
    most = max_error(compiled, original)
    console.print(f"logits up to {original.abs().max():.1f} differ by {most:.1e} at most", highlight=False)
    console.print(attnpatch.report(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
