"""Three ways to go on from one text: its keys and values are computed once and lie in pages that all three share."""

import sys

import torch
from rich.console import Console

import attnpatch
from attnpatch.cli.checkpoint import load_checkpoint

TEXT = """Once upon a time a fox lived at the edge of a wood. She had two friends, an owl who slept all day and a hare
who never slept at all. In summer they met by the old mill, where the water was warm, and told each other what they had
seen."""
WAYS = ("One day the fox", "Every evening the owl", "When winter came, the hare")


def main(path: str | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, tokenizer = load_checkpoint(path, dtype, "eager", device)
    attnpatch.patch(model, strict=True)

    console = Console()
    cache = attnpatch.PagedCache(model.config, num_pages=64, page_size=16, device=device, dtype=dtype)
    with torch.no_grad():
        model(**tokenizer(TEXT, return_tensors="pt").to(device), past_key_values=cache)
    console.print(f"the text takes {64 - cache.free_pages} of 64 pages")
    for way in WAYS:
        fork, free = cache.fork(), cache.free_pages
        inputs = tokenizer(f"{TEXT} {way}", return_tensors="pt").to(device)
        output = model.generate(**inputs, past_key_values=fork, max_new_tokens=12, do_sample=False)
        sentence = tokenizer.decode(output[0], skip_special_tokens=True)[len(TEXT) :]
        console.print(f"{free - cache.free_pages} more for:{sentence}", markup=False, highlight=False)
        fork.reset()
    console.print(attnpatch.report(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
