"""What prefill and a decode step must read and compute, from a model's shape and a device: arithmetic, nothing is run.

shape = ModelShape(full_layers=16, num_heads=24, num_kv_heads=4, head_dim=256, weights=Weights.of_bytes(17e9))
cost = decode_cost(shape, batch=1, context=262_144, kv_format=TBQ4)
cost.tokens_per_s(DEVICES["h200"])              # no kernel gets past it
shape = shape_from_config(read_config("path"))  # of a Hugging Face config.json

Importing it imports neither transformers nor matplotlib: ``count_weights``, ``measured_device`` and
``attnpatch.roofline.plot`` load what they need when they are called.
"""

from attnpatch.roofline.config import read_config, shape_from_config
from attnpatch.roofline.costs import Cost, decode_cost, eager_score_bytes, prefill_cost
from attnpatch.roofline.device import DEVICES, Device, measured_device
from attnpatch.roofline.formats import EIGHT_BIT, SEPARATE_DEQUANT, SIXTEEN_BIT, TBQ4, KVFormat, formats_for
from attnpatch.roofline.model import ModelShape, Weights
from attnpatch.roofline.weights import count_weights

__all__ = [
    "DEVICES",
    "EIGHT_BIT",
    "SEPARATE_DEQUANT",
    "SIXTEEN_BIT",
    "TBQ4",
    "Cost",
    "Device",
    "KVFormat",
    "ModelShape",
    "Weights",
    "count_weights",
    "decode_cost",
    "eager_score_bytes",
    "formats_for",
    "measured_device",
    "prefill_cost",
    "read_config",
    "shape_from_config",
]
