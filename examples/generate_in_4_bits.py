"""Generate with keys and values kept in 4 bits: the cache's bytes beside 16 bit, the text, and the report."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NamedTuple

import shared
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

import attnpatch
from attnpatch.cli.checkpoint import load_checkpoint
from attnpatch.cli.demo import first_difference
from attnpatch.testing.tolerance import assert_same_function, run_float64


class Row(NamedTuple):
    """One cache: tokens stored, tokens that there is room for, bytes of all its tensors."""

    cache: str
    stored: int
    room: int
    num_bytes: int

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / self.room


class Generated(NamedTuple):
    """Token ids, logits of the first new token, and the cache that ``generate`` leaves."""

    tokens: list[int]
    first_logits: Tensor
    cache: Any


def random_llama(device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=128,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    return model.to(device, shared.dtype_on(device)).eval()


def model_and_prompt(args: Namespace) -> tuple[Any, Any, Tensor]:
    """The model, its tokenizer or None, and the prompt's ids ``[1, tokens]``."""
    if args.model is None:
        model = random_llama(args.device)
        return model, None, torch.randint(1, 1024, (1, args.prompt_tokens), device=args.device)
    model, tokenizer = load_checkpoint(args.model, shared.dtype_on(args.device), "eager", args.device)
    return model, tokenizer, tokenizer(args.prompt, return_tensors="pt")["input_ids"].to(args.device)


def generate(model: Any, ids: Tensor, new_tokens: int) -> Generated:
    output = shared.generate(model, ids, new_tokens, output_logits=True, return_dict_in_generate=True)
    return Generated(output.sequences[0, ids.shape[1] :].tolist(), output.logits[0], output.past_key_values)


def in_16_bits(cache: Any) -> Row:
    """A cache of transformers that grows with each token, as if its tensors had 16 bits."""
    tensors = [x for layer in cache.layers for x in tree_iter(vars(layer)) if isinstance(x, Tensor)]
    stored = cache.get_seq_length()
    return Row(f"{type(cache).__name__}, 16 bit", stored, stored, sum(2 * x.numel() for x in tensors))


def in_4_bits(cache: attnpatch.TBQ4Cache) -> Row:
    return Row(f"{type(cache).__name__}, 4 bit", cache.tokens.length, cache.tokens.capacity, cache.num_bytes)


def show(rows: list[Row], title: str) -> None:
    headers = ("cache", "tokens\nstored", "room\nfor", "KiB", "bytes per token\nof room", "16 bit /\nthis")
    cells = [
        (
            *(row.cache, f"{row.stored:,}", f"{row.room:,}", f"{row.num_bytes / 1024:,.1f}"),
            *(f"{row.bytes_per_token:,.1f}", f"{rows[0].bytes_per_token / row.bytes_per_token:.2f}"),
        )
        for row in rows
    ]
    shared.print_table(title, headers, cells)


def plot(rows: list[Row], title: str, path: str) -> None:
    figure, (axes,) = shared.panels(1, title)
    bars = axes.bar([row.cache for row in rows], [row.bytes_per_token for row in rows], width=0.5)
    axes.bar_label(bars, fmt="{:,.0f}")
    axes.margins(y=0.1)
    axes.set_ylabel("bytes per token, all layers")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = shared.parser(__doc__)
    parser.add_argument("--model", metavar="DIR", help="a causal language model; default: a tiny Llama, random weights")
    parser.add_argument("--prompt", default="The capital of France is", help="of --model; default: %(default)s")
    parser.add_argument(
        "--prompt-tokens", type=shared.count, default=224, metavar="N", help="random ones without --model; default 224"
    )
    parser.add_argument("--new-tokens", type=shared.count, default=32, metavar="N", help="default %(default)s")
    args = parser.parse_args(argv)
    shared.needs(parser, "transformers")
    model, tokenizer, ids = model_and_prompt(args)
    dense = generate(model, ids, args.new_tokens)
    exact = run_float64(model, ids).logits[:, -1]
    attnpatch.patch(model, cache="tbq4")
    packed = generate(model, ids, args.new_tokens)
    # A prompt attends on its keys and values as they were: its logits are those of the unpatched model.
    assert_same_function(packed.first_logits, dense.first_logits, exact, dtype=next(model.parameters()).dtype)
    rows = [in_16_bits(dense.cache), in_4_bits(packed.cache)]
    title = (
        f"{type(model).__name__}, {ids.shape[1]} tokens and {args.new_tokens} new ones\n{shared.machine(args.device)}"
    )
    show(rows, title)
    console, same = shared.console(), first_difference(dense.tokens, packed.tokens)
    console.print(
        f"greedy: the first {same} of {args.new_tokens} new tokens are those of the 16 bit cache", highlight=False
    )
    if tokenizer is not None:
        console.print(tokenizer.decode(packed.tokens), markup=False, highlight=False)
    console.print(attnpatch.report(model))
    if args.plot:
        plot(rows, title, args.plot)
    return rows


if __name__ == "__main__":
    main()
