"""Prompts of different lengths in one batch, padded on the left: each gets the text that it gets alone."""

import sys

import torch
from rich.console import Console

import attnpatch
from attnpatch.cli.checkpoint import load_checkpoint

PROMPTS = (
    "Water boils at",
    "The three primary colours are red, yellow and",
    "Once upon a time a fox lived at the edge of a wood with her two friends, an owl and a hare. One day",
)
NEW = 12


def main(path: str | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_checkpoint(path, torch.float32, "eager", device)
    tokenizer.padding_side = "left"
    attnpatch.patch(model, strict=True, cache="buffered")

    def write(prompts: list[str]) -> torch.Tensor:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
        output = model.generate(**inputs, min_new_tokens=NEW, max_new_tokens=NEW, do_sample=False)
        return output[:, -NEW:]

    together = write(list(PROMPTS))
    console = Console()
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        alone = write([prompt])[0]
        assert torch.equal(tokens, alone), f"{prompt!r} goes on with {tokens.tolist()}, alone with {alone.tolist()}"
        console.print(f"{prompt}[b]{tokenizer.decode(tokens, skip_special_tokens=True)}[/b]", highlight=False)
    console.print(attnpatch.report(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
