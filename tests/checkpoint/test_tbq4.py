"""SmolLM2-135M-Instruct on a TBQ4Cache, float32 on the CPU: perplexity, needles, text.

The texts are Python's own manual, which every Python brings.
"""

from pydoc_data.topics import topics

import pytest
import torch
from transformers.cache_utils import DynamicCache

import attnpatch
from attnpatch import TBQ4Cache, tbq4
from attnpatch.cli import checkpoint

pytestmark = pytest.mark.checkpoint

NEEDLES = {
    "pass key": "7421", "colour of the gate": "violet", "name of the ship": "Halcyon", "number of the room": "318",
    "city of the meeting": "Lisbon", "name of the dog": "Biscuit", "year of the treaty": "1846",
    "price of the lamp": "95", "code of the locker": "6052", "name of the pilot": "Amelia",
}  # fmt: skip


@pytest.fixture(scope="module")
def original():
    """The unpatched model and its tokenizer."""
    try:
        return checkpoint.load_smollm2(torch.float32, "sdpa")
    except checkpoint.CheckpointMissing as missing:
        pytest.skip(str(missing))


def haystack(tokenizer, tokens):
    text = " ".join(topics["specialnames"].split())
    return tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens]


@pytest.mark.parametrize(("centre_keys", "limit"), [(False, 1.10), (True, 1.06)])
def test_perplexity(original, centre_keys, limit):
    """This model's K has a constant part, which the manual shows more than novels do (docs/tbq4.md)."""
    model, tokenizer = original
    found = tbq4.probe(model, haystack(tokenizer, 2177), centre_keys=centre_keys)
    print(found)
    assert found.tokens == 2112
    assert 1.0 < found.ratio < limit
    assert [x.layer for x in found.layers] == list(range(30))
    assert 0.02 < min(x.error for x in found.layers) <= max(x.error for x in found.layers) < 0.33


def test_recent_tokens(original):
    """64 of them, and the first four, as they were: next to nothing is left of what 4 bits cost."""
    model, tokenizer = original
    found = tbq4.probe(model, haystack(tokenizer, 2177), recent=64)
    print(found)
    assert 0.99 < found.ratio < 1.012, "without them it is 1.037, and the standard error beside them 0.003"


def found_needles(model, tokenizer, make_cache):
    """Which needles the model names when it is asked, each of its own text, at depths from 10 % to 91 %."""
    hay, found = haystack(tokenizer, 700)[0].tolist(), []
    for i, (thing, value) in enumerate(NEEDLES.items()):
        place = 70 + 63 * i
        needle = tokenizer(f" The {thing} is {value}. Remember it.")["input_ids"]
        context = torch.tensor([hay[:place] + needle + hay[place:]])
        question = tokenizer(f"\n\nThe {thing} is", return_tensors="pt")["input_ids"]
        cache = make_cache()
        with torch.no_grad():
            model(context, past_key_values=cache)
        ids = torch.cat([context, question], dim=1)
        got = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        found += [thing] if value in tokenizer.decode(got) else []
    return found


def test_needles(original):
    """The question is an append, so it finds its needle in the packed past."""
    model, tokenizer = original
    exact = found_needles(model, tokenizer, lambda: DynamicCache(config=model.config))
    packed = found_needles(model, tokenizer, lambda: TBQ4Cache(model))
    print(f"needles of {len(NEEDLES)}: {len(exact)} in float32, {len(packed)} in 4 bits")
    assert set(exact) <= set(packed)
    assert len(exact) >= 7, "a test of needles that are there to be found"


def surprise(model, prompt, text):
    """Perplexity of a text after its prompt, to the exact model."""
    ids = torch.cat([prompt, text[None]], dim=1)
    with torch.no_grad():
        logits = model(ids).logits[0, prompt.shape[1] - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, text).exp().item()


def test_text(original):
    """200 tokens that the exact model would have written, or nearly; patched, and proposed by prompt lookup too.

    A model of this size repeats itself when it writes greedily, exact or not.

    Kernels round differently, a code next to a boundary falls on its other side, and 30 layers make that a change of
    0.1 in a logit: texts are alike for as long as no choice is closer than that.
    """
    model, tokenizer = original
    chat = [{"role": "user", "content": "Tell me a story about a lighthouse keeper and a cat."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def write(**options):
        lengths = {"max_new_tokens": 200, "min_new_tokens": 200}
        return model.generate(**inputs, **lengths, do_sample=False, **options)[0, inputs["input_ids"].shape[1] :]

    texts = [write(past_key_values=TBQ4Cache(model))]
    with attnpatch.patched(model, strict=True, cache="tbq4"):
        texts += [write(), write(prompt_lookup_num_tokens=4)]
    for text in texts:
        words = tokenizer.decode(text, skip_special_tokens=True)
        found = surprise(model, inputs["input_ids"], text)
        print(f"perplexity {found:.2f}, {len(set(words.split()))} words: {words}")
        assert torch.equal(text[:16], texts[0][:16])
        assert found < 4, "one wrong token in ten makes it 50"
