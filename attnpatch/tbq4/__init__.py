"""TBQ4: vectors of K and V in 4 bits per channel, rotated, with a norm per block.

codes, norms = tbq4.encode(k)                       # [.., head_dim // 2] uint8, [.., num_blocks] float16
k = tbq4.decode(codes, norms, head_dim, k.dtype)
data = tbq4.export_blocks(k)                        # the 66-byte blocks of llama.cpp forks
print(tbq4.probe(model, text, tokenizer))           # what a TBQ4Cache costs this model
"""

from attnpatch.tbq4.blocks66 import export_blocks, from_blocks, import_blocks, to_blocks
from attnpatch.tbq4.codec import (
    LARGEST_BLOCK,
    LEVELS,
    STEP,
    blocks_of,
    decode,
    encode,
    rotate,
    rotation,
    unrotate,
)
from attnpatch.tbq4.probing import probe

__all__ = [
    "LARGEST_BLOCK",
    "LEVELS",
    "STEP",
    "blocks_of",
    "decode",
    "encode",
    "export_blocks",
    "from_blocks",
    "import_blocks",
    "probe",
    "rotate",
    "rotation",
    "to_blocks",
    "unrotate",
]
