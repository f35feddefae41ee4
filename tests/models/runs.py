"""How a family is run: its inputs, then one forward, or a prompt and three more tokens on a cache."""

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

PROMPT, STEPS, MAX_LENGTH = 13, 3, 23  # no other size of the models is one of these: a square of them is a mask


def text(model):
    """Ids of which one sequence is padded: on the left where the model generates, else on the right."""
    ids = torch.randint(3, 60, (2, PROMPT))
    mask = torch.ones_like(ids)
    left = model.can_generate() and not model.config.is_encoder_decoder
    mask[0, slice(4) if left else slice(-4, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def image(model):
    return {"pixel_values": torch.randn(2, 3, 24, 24)}


def text_after_image(model):
    """Nine image tokens, then text; the first sequence is padded on the left."""
    inputs = text(model) | image(model)
    inputs["attention_mask"][0] = (torch.arange(PROMPT) >= 2).long()
    inputs["input_ids"][0, 2:11] = inputs["input_ids"][1, :9] = 60
    return inputs


def image_block(model):
    """The tokens of the image see one another."""
    inputs = text_after_image(model)
    return inputs | {"token_type_ids": (inputs["input_ids"] == 60).long()}


def prefix(model):
    """All but the last two tokens see one another."""
    return text_after_image(model) | {"token_type_ids": (torch.arange(PROMPT) >= PROMPT - 2).long().expand(2, PROMPT)}


def sound(model):
    return {model.main_input_name: torch.randn(2, 8, 22) if model.config.is_encoder_decoder else torch.randn(2, 400)}


BY_NAME = {"input_ids": text, "pixel_values": image, "input_features": sound, "input_values": sound}


def make_inputs(model, make=None):
    torch.manual_seed(1)
    inputs = (make or BY_NAME[model.main_input_name])(model)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, 60, (2, 7))
    return inputs


def visible_rows(model, inputs):
    """Positions of the output that are no padding, or None where there is none."""
    mask = inputs.get("attention_mask")
    if mask is None or model.config.is_encoder_decoder:
        return None
    return torch.cat([mask, mask.new_ones(2, STEPS)], dim=1).bool() if model.can_generate() else mask.bool()


class Once(nn.Module):
    """The model's output; ``phase`` says what is running."""

    phase = "forward"

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        return self.model(**inputs)[0]


class Generate(nn.Module):
    """Logits of a prompt and of three more tokens, on a cache made outside; ``phase`` says which is running."""

    def __init__(self, model, make_cache, prefix=""):
        super().__init__()
        self.model, self.make_cache, self.prefix = model, make_cache, prefix
        self.phase = ""

    def forward(self, inputs):
        cache = self.make_cache(self.model.config)
        self.phase = f"{self.prefix}prefill"
        out = self.model(**inputs, past_key_values=cache, use_cache=True)
        logits, self.phase = [out.logits], f"{self.prefix}decode"
        encoded = out.get("encoder_last_hidden_state")
        mask = inputs.get("attention_mask")
        for token in torch.arange(3, 3 + 2 * STEPS).view(STEPS, 2, 1):
            if encoded is None:
                mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
                step = {"input_ids": token}
            else:
                step = {"decoder_input_ids": token, "encoder_outputs": BaseModelOutput(last_hidden_state=encoded)}
            step |= {} if mask is None else {"attention_mask": mask}
            logits.append(self.model(**step, past_key_values=cache, use_cache=True).logits)
        return torch.cat(logits, dim=1)


def dynamic_cache(config):
    text_config = config.get_text_config(decoder=True)
    cache = DynamicCache(config=text_config)
    return EncoderDecoderCache(cache, DynamicCache(config=text_config)) if config.is_encoder_decoder else cache


def static_cache(config):
    text_config = config.get_text_config(decoder=True)
    cache = StaticCache(config=text_config, max_cache_len=MAX_LENGTH)
    if not config.is_encoder_decoder:
        return cache
    encoded = getattr(config, "max_source_positions", PROMPT)
    return EncoderDecoderCache(cache, StaticCache(config=text_config, max_cache_len=encoded))


def make_runs(model):
    """What there is to run of a model, by name; a static cache where transformers supports one."""
    if not model.can_generate():
        return {"forward": Once(model)}
    runs = {"dynamic cache": Generate(model, dynamic_cache)}
    if model._can_compile_fullgraph:
        runs["static cache"] = Generate(model, static_cache, "static ")
    return runs
