"""A checkpoint that device_map="auto" spreads over two places, patched: a GPU and the CPU, or the CPU and the disk."""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import shared
import torch

import attnpatch

LAYERS = 4


class Row(NamedTuple):
    """One place: how many modules of the device map it holds, and the bytes of their weights."""

    place: str
    modules: int
    num_bytes: int


def write_random_llama(folder: str) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def without_weights(path: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)


def spread(path: str, device: torch.device, share: float, offload_folder: str) -> Any:
    """Load what fits into ``share`` of the weights' bytes on ``device``, the rest where accelerate puts it.

    In float32, so that the text is the same to the last token whoever computes attention.
    """
    from transformers import AutoModelForCausalLM

    room = int(share * sum(x.numel() for x in without_weights(path).parameters()) * torch.float32.itemsize)
    on_gpu = {device.index or 0: room, "cpu": "1000GiB"}
    return AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        device_map="auto",
        max_memory=on_gpu if device.type == "cuda" else {"cpu": room},
        offload_folder=offload_folder,
    ).eval()


def places(model: Any, path: str) -> Iterator[Row]:
    """What lies where; weights that are elsewhere are not on the model itself."""
    whole = without_weights(path)
    for place in dict.fromkeys(model.hf_device_map.values()):
        modules = [whole.get_submodule(name) for name, found in model.hf_device_map.items() if found == place]
        yield Row(str(place), len(modules), shared.nbytes(*(x for m in modules for x in m.parameters())))


def show(rows: list[Row], title: str) -> None:
    cells = [(row.place, f"{row.modules:,}", f"{row.num_bytes / 2**20:,.1f}") for row in rows]
    shared.print_table(title, ("place", "modules", "MiB of\nweights"), cells)


def show_speeds(speeds: dict[str, shared.Speed]) -> None:
    cells = [(name, f"{ms:,.1f}", f"{1e3 / per_s:,.1f}") for name, (ms, per_s) in speeds.items()]
    shared.print_table(
        f"medians of {shared.GENERATED} runs of generate()", ("", "first token\nms", "each token\nafter it, ms"), cells
    )


def plot(rows: list[Row], speeds: dict[str, shared.Speed], title: str, path: str) -> None:
    figure, (where, time) = shared.panels(2, title)
    sizes = [row.num_bytes / 2**20 for row in rows]
    shared.bars(where, [row.place for row in rows], {"": sizes}, "weights, MiB", "{:,.1f}")
    ms = [1e3 / speed.tokens_per_s for speed in speeds.values()]
    shared.bars(time, list(speeds), {"": ms}, "ms per token", "{:,.1f}")
    figure.savefig(path, dpi=120)


def part(text: str) -> float:
    """An argument between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number between 0 and 1")
    return value


def main(argv: Sequence[str] | None = None) -> tuple[list[Row], dict[str, shared.Speed]]:
    parser = shared.parser(__doc__)
    parser.add_argument(
        "--model", metavar="DIR", help=f"a causal language model; default: a tiny Llama of {LAYERS} layers"
    )
    parser.add_argument("--share", type=part, default=0.5, help="of the weights, that --device may hold; default 0.5")
    parser.add_argument("--prompt-tokens", type=shared.count, default=64, metavar="N", help="default %(default)s")
    parser.add_argument("--new-tokens", type=shared.several, default=16, metavar="N", help="default %(default)s")
    args = parser.parse_args(argv)
    shared.needs(parser, "transformers", "accelerate")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as elsewhere:
        path = args.model or write_random_llama(folder)
        model = spread(path, args.device, args.share, elsewhere)
        rows = list(places(model, path))
        title = f"{type(model).__name__}, float32\n{shared.machine(args.device)}"
        show(rows, title)
        ids = shared.draw_ids(model, args.prompt_tokens, args.device)
        expected = shared.generate(model, ids, args.new_tokens)
        attnpatch.patch(model, strict=True)
        found = shared.generate(model, ids, args.new_tokens)
        assert torch.equal(found, expected), f"{found.tolist()} is not {expected.tolist()}"
        report = attnpatch.report(model)
        speeds = {"patched": shared.speed(model, ids, args.new_tokens)}
        attnpatch.unpatch(model)
        speeds = {"unpatched": shared.speed(model, ids, args.new_tokens), **speeds}
    show_speeds(speeds)
    console = shared.console()
    console.print(f"greedy: all {args.new_tokens} new tokens are those of the unpatched model", highlight=False)
    console.print(report)
    if args.plot:
        plot(rows, speeds, title, args.plot)
    return rows, speeds


if __name__ == "__main__":
    main()
