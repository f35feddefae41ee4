"""Patch a Hugging Face checkpoint in one line, generate, and see which kernel every attention got."""

import sys

import torch
from rich.console import Console

import attnpatch
from attnpatch.cli.checkpoint import load_checkpoint


def main(path: str | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, tokenizer = load_checkpoint(path, dtype, "eager", device)

    attnpatch.patch(model, strict=True)
    inputs = tokenizer("The capital of France is", return_tensors="pt").to(device)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)

    console = Console()
    console.print(tokenizer.decode(output[0], skip_special_tokens=True), markup=False)
    console.print(attnpatch.report(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
