"""Compile every shipped configuration for compute capability 9.0, without a GPU, and print facts of the SASS as JSON.

Run by test_sass.py in a process of its own: Triton must be imported without its interpreter, and gets a driver that
only knows the target. The launchers run unchanged on CPU tensors; each kernel is compiled instead of launched.
"""

import json
import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.decode import configs as decode_configs
from attnpatch.kernels.decode import launch as decode_launch
from attnpatch.kernels.prefill import configs as prefill_configs
from attnpatch.kernels.prefill import launch as prefill_launch
from attnpatch.testing.inputs import key_bounds

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


class HopperDriver:
    """What compiling asks of a driver."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class CompileOnly:
    """Stands in for a kernel: ``kernel[grid](...)`` compiles and keeps the result."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.compiled = None

    def __getitem__(self, grid):
        return partial(self._compile, grid=grid)

    def _compile(self, *args, **kwargs):
        self.compiled = self.kernel.warmup(*args, **kwargs)


def facts(compiled):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        sass = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    count = {
        "wgmma": r"\bHGMMA\b",
        "wgmma waits": r"\bWARPGROUP\.DEPBAR\b",
        "mma": r"\bHMMA\b",
        "tma loads": r"\bUTMALDG\b",
        "spills": r"\b(STL|LDL)\b",
    }
    found = {name: len(re.findall(p, sass)) for name, p in count.items()}
    return {"shared": compiled.metadata.shared, **found, "spills of the last run": spills_of_the_last_run(sass)}


def spills_of_the_last_run(sass):
    """Spills between the first and the last product of the last of three loops, which is the unmasked one."""
    marks = re.findall(r"\b(HGMMA|STL|LDL)\b", sass)
    products = [i for i, mark in enumerate(marks) if mark == "HGMMA"]
    last = products[len(products) * 2 // 3 :]
    return len(last) and last[-1] - last[0] + 1 - len(last)


def random_layout(heads, seqlen, width, dtype):
    return torch.empty(1, seqlen, heads, width, dtype=dtype).transpose(1, 2)


def make_call(width, seqlen_q, dtype, terms):
    q = random_layout(8, seqlen_q, width, dtype)
    k, v = (random_layout(2, 256, width, dtype) for _ in range(2))
    return AttentionCall(q, k, v, 0.1, **terms)


CAUSAL = {"window_right": 0}
BOUNDS = {"key_bounds": key_bounds(0, torch.arange(256) + 1).expand(1, 8, 256, 3)}
MASK = {"attn_mask": torch.ones(1, 1, 256, 256, dtype=torch.bool).expand(1, 8, 256, 256)}
TERMS = {
    "full": {},
    "causal": CAUSAL,
    "window": {"window_left": 99, "window_right": 0},
    "bounds": BOUNDS,
    "bounds and band": {**BOUNDS, **CAUSAL},
    "bounds and mask": {**BOUNDS, **MASK},
    "terms": {**CAUSAL, "sinks": torch.zeros(8), "alibi_slopes": torch.zeros(8), "lse": torch.zeros(1, 8, 256)},
}


def compile_prefill(width, dtype, descriptors, terms):
    kernel = CompileOnly(prefill_launch._prefill_kernel)
    with (
        mock.patch.object(prefill_launch, "_prefill_kernel", kernel),
        mock.patch.object(prefill_launch, "uses_descriptors", return_value=descriptors),
    ):
        config = prefill_configs.table(dtype, descriptors, terms == "bounds and mask")[width]
        prefill_launch.prefill(make_call(width, 256, dtype, TERMS[terms]), config)
    return facts(kernel.compiled)


def compile_decode(width, dtype, **terms):
    split, merge = (CompileOnly(getattr(decode_launch, f"_{part}_kernel")) for part in ("split", "merge"))
    with (
        mock.patch.object(decode_launch, "_split_kernel", split),
        mock.patch.object(decode_launch, "_merge_kernel", merge),
    ):
        call = make_call(width, 1, dtype, {**CAUSAL, "q_offset": torch.tensor(5), **terms})
        decode_launch.decode(call, 2, decode_configs.table(dtype)[width])
    return facts(split.compiled), facts(merge.compiled)


def main():
    driver.set_active(HopperDriver())
    rows = {}
    for width in (64, 128, 256):
        for terms in ("full", "causal"):
            rows[f"prefill descriptor {width} {terms}"] = compile_prefill(width, torch.bfloat16, True, terms)
        rows[f"prefill pointer {width} causal"] = compile_prefill(width, torch.bfloat16, False, "causal")
        rows[f"prefill float32 {width} causal"] = compile_prefill(width, torch.float32, False, "causal")
        rows[f"decode half {width}"], rows["merge"] = compile_decode(width, torch.bfloat16)
        rows[f"decode float32 {width}"], _ = compile_decode(width, torch.float32)
    rows["prefill descriptor 128 window"] = compile_prefill(128, torch.bfloat16, True, "window")
    rows["prefill descriptor 128 terms"] = compile_prefill(128, torch.bfloat16, True, "terms")
    for width in (64, 128, 256):
        for terms in ("bounds", "bounds and band", "bounds and mask"):
            rows[f"prefill descriptor {width} {terms}"] = compile_prefill(width, torch.bfloat16, True, terms)
    one_row = {name: x[:, :, :1] for name, x in {**BOUNDS, **MASK}.items()}
    rows["decode half 128 bounds and mask"], _ = compile_decode(128, torch.bfloat16, **one_row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
