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
from attnpatch.kernels.common import support
from attnpatch.kernels.decode import configs as decode_configs
from attnpatch.kernels.decode import launch as decode_launch
from attnpatch.kernels.linear import launch as linear_launch
from attnpatch.kernels.prefill import configs as prefill_configs
from attnpatch.kernels.prefill import launch as prefill_launch
from attnpatch.kernels.prefill_hopper import fp8
from attnpatch.kernels.prefill_hopper import launch as hopper_launch
from attnpatch.kernels.prefill_hopper import packed as hopper_packed
from attnpatch.linear import Layers
from attnpatch.testing.inputs import integers, key_bounds, quantised
from tests.kernels.uniform_registers import unset

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
PRODUCTS = r"\b(?:HGMMA|QGMMA|HMMA|IMMA)\b"
SPILLS = r"\b(?:STL|LDL)\b"
NARROW_LOADS = r"\bLDG\.E\.U16\b"


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


def facts(compiled, runs):
    """Shared memory, counts of instructions, and spills inside of each of ``runs`` loops over keys, unmasked last."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        sass = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    count = {
        "wgmma": r"\b[HQ]GMMA\b",
        "8 bit wgmma": r"\bQGMMA\b",
        "byte moves": r"\bPRMT\b",
        "shared stores": r"\bSTS\b",
        "wgmma waits": r"\bWARPGROUP\.DEPBAR\b",
        "mma": r"\bHMMA\b",
        "int8 mma": r"\bIMMA\b",
        "tma loads": r"\bUTMALDG\b",
        "async loads": r"\bLDGSTS\b",
        "wide loads": r"\bLDG\.E\S*\.128\b",
        "waits for the kernel before": r"\bACQBULK\b",
        "spills": SPILLS,
    }
    found = {name: len(re.findall(p, sass)) for name, p in count.items()}
    in_loops = {name: by_run(sass, p, runs) for name, p in (("spills", SPILLS), ("narrow loads", NARROW_LOADS))}
    return {
        "shared": compiled.metadata.shared,
        "reads of unset registers": unset(sass),
        **found,
        **{f"{name} by run": counts for name, counts in in_loops.items()},
    }


def by_run(sass, pattern, runs):
    """Instructions between the first and the last product of each loop, all of which have as many."""
    marks = re.findall(rf"{PRODUCTS}|{pattern}", sass)
    products = [i for i, mark in enumerate(marks) if re.fullmatch(PRODUCTS, mark)]
    count = len(products) // runs
    loops = [products[run * count : (run + 1) * count] for run in range(runs)]
    return [loop[-1] - loop[0] + 1 - count if loop else 0 for loop in loops]


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
        mock.patch.object(support, "_plans", {}),
    ):
        config = prefill_configs.table(dtype, descriptors, terms == "bounds and mask")[width]
        prefill_launch.prefill(make_call(width, 256, dtype, TERMS[terms]), config)
    return facts(kernel.compiled, 3)


WINDOW = TERMS["window"]
OFFSET = torch.zeros(1, dtype=torch.int64)
PADDING_AND_OFFSET = {"key_padding": torch.ones(1, 256, dtype=torch.bool), "q_offset": OFFSET}
SEQLENS = torch.tensor([0, 100, 256], dtype=torch.int32)
PACKED = {**CAUSAL, "q_offset": torch.zeros(2, dtype=torch.int32), "cu_seqlens_q": SEQLENS, "cu_seqlens_k": SEQLENS}
HOPPER_TERMS = {
    **{f"{width} causal": CAUSAL for width in (64, 128, 256)},
    **{f"{width} causal, offset on the device": {**CAUSAL, "q_offset": OFFSET} for width in (128, 256)},
    "64 slopes and lse": {**CAUSAL, "alibi_slopes": torch.zeros(8), "lse": torch.zeros(1, 8, 256)},
    "128 window, sinks and lse": {**WINDOW, "sinks": torch.zeros(8), "lse": torch.zeros(1, 8, 256)},
    "256 window and softcap": {**WINDOW, "softcap": 30.0},
    **{f"{width} packed": PACKED for width in (64, 128, 256)},
    "128 packed, every term": {**PACKED, **TERMS["terms"], "window_left": 99, "softcap": 30.0},
    **{f"{width} bounds, padding and offset": {**BOUNDS, **CAUSAL, **PADDING_AND_OFFSET} for width in (64, 128, 256)},
    **{f"{width} bounds and mask": {**BOUNDS, **MASK} for width in (64, 128, 256)},
}
"""Every term at a width of models that have it."""


REST = {**prefill_configs.DESCRIPTOR_MASKED, 192: None}  # by the wider head dim; 192 has no row with masks


def compile_prefill_hopper(width, terms, width_v=None):
    """Facts of the kernel, and of triton.prefill on the tiles that it leaves where there are masks."""
    call = make_call(width, 256, torch.bfloat16, terms)
    call = call._replace(v=call.v[..., :width_v])
    kernel, rest = CompileOnly(hopper_launch._prefill_hopper_kernel), CompileOnly(prefill_launch._prefill_kernel)
    with (
        mock.patch.object(prefill_launch, "_prefill_kernel", rest),
        mock.patch.object(hopper_launch, "choose_rest", return_value=REST[width]),
        mock.patch.object(hopper_launch, "_prefill_hopper_kernel", kernel),
        mock.patch.object(hopper_launch, "_ranges_kernel", CompileOnly(hopper_launch._ranges_kernel)),
        mock.patch.object(hopper_packed, "_blocks_kernel", CompileOnly(hopper_packed._blocks_kernel)),
        mock.patch.object(hopper_packed, "_deal_kernel", CompileOnly(hopper_packed._deal_kernel)),
        mock.patch.object(support, "_plans", {}),
        mock.patch("torch.cuda.get_device_properties", return_value=mock.Mock(multi_processor_count=132)),
    ):
        hopper_launch.prefill_hopper(call)
    return facts(kernel.compiled, 1), rest.compiled and facts(rest.compiled, 3)


def compile_prefill_fp8(width, terms):
    """Facts of the kernel on 8 bit floats, of the two that make them, and of the one that finds the keys seen."""
    call = make_call(width, 256, torch.bfloat16, terms)
    kernel = CompileOnly(hopper_launch._prefill_hopper_kernel)
    made = {name: CompileOnly(getattr(fp8, name)) for name in ("_largest_kernel", "_quantise_kernel", "_seen_kernel")}
    rest = CompileOnly(prefill_launch._prefill_kernel)
    with (
        mock.patch.object(hopper_launch, "_prefill_hopper_kernel", kernel),
        mock.patch.multiple(fp8, **made),
        mock.patch.object(fp8, "uses_descriptors", return_value=True),
        mock.patch.object(prefill_launch, "_prefill_kernel", rest),
        mock.patch.object(hopper_launch, "choose_rest", return_value=REST[width]),
        mock.patch.object(hopper_launch, "_ranges_kernel", CompileOnly(hopper_launch._ranges_kernel)),
        mock.patch.object(support, "_plans", {}),
        mock.patch("torch.cuda.get_device_properties", return_value=mock.Mock(multi_processor_count=132)),
    ):
        fp8.prefill_fp8(call)
    return [facts(one.compiled, 1) for one in (kernel, *made.values()) if one.compiled]


ROWS = {
    "64 rows": 16,
    "64 rows, packed": 16,
    "128 rows": 60,
    "4 bit, 64 rows": 16,
    "codes, 8 rows": 2,
    "codes, 16 rows": 4,
    "codes, 64 rows": 16,
}
"""Queries of four heads each, where there are several."""


def decode_call(kind, width, dtype=torch.float8_e4m3fn, scales="token"):
    """A call of an entry of the table."""
    seqlen_q = ROWS.get(kind, 1)
    call = make_call(width, seqlen_q, torch.float32 if kind == "float32" else torch.bfloat16, CAUSAL)
    call = call._replace(q_offset=torch.tensor(5))
    if kind == "8 bit":
        return in_8_bits(call, dtype, scales)
    if kind.startswith("4 bit"):
        return in_integers(call, width // (64 if scales == "token" else scales))
    if kind.startswith("codes"):
        return in_codes(call, odd=kind.endswith("bytes"))
    if kind.endswith("packed"):
        return packed(call)
    return in_pages(call) if kind.startswith("pages") else call


def in_8_bits(call, dtype=torch.int8, scales="token"):
    scale = torch.ones(1, 2, 256 if scales == "token" else 1).expand(1, 2, 256)
    return call._replace(k=call.k.to(dtype), v=call.v.to(dtype), k_scale=scale, v_scale=scale)


def in_codes(call, odd=False):
    """``call`` on TBQ4 codes and planes of norms; rows of an ``odd`` length are no words."""
    width = call.head_dim
    x = torch.zeros(1, 2, 256, width // 2 + odd, dtype=torch.uint8)[..., : width // 2]
    norms = torch.ones(1, 2, max(1, width // 128), 256, dtype=torch.float16).transpose(2, 3)
    return call._replace(k=x, v=x, k_scale=norms, v_scale=norms)


def in_integers(call, groups):
    """``call`` on integers of 4 bits and planes of scales and shifts."""
    x = torch.zeros(1, 2, 256, call.head_dim // 2, dtype=torch.uint8)
    scale = torch.ones(1, 2, groups, 256, dtype=torch.float16).transpose(2, 3)
    return call._replace(k=x, v=x, k_scale=scale, v_scale=scale, k_shift=scale, v_shift=scale)


def in_integers_and_int8(call):
    """``call`` with one of K and V in int8 and the other in integers of 4 bits, by the one in int8."""
    fours, bytes8 = integers(call, 2, 2), quantised(call, torch.int8)
    return {
        "K": fours._replace(k=bytes8.k, k_scale=bytes8.k_scale, k_shift=None),
        "V": fours._replace(v=bytes8.v, v_scale=bytes8.v_scale, v_shift=None),
    }


def in_pages(call):
    k, v = (torch.empty(16, 2, 16, x.shape[3], dtype=x.dtype) for x in (call.k, call.v))
    scale = None if call.k_scale is None else torch.ones(16, 2, 16)
    return call._replace(k=k, v=v, k_scale=scale, v_scale=scale, block_table=torch.zeros(1, 16, dtype=torch.int32))


def packed(call):
    cu_seqlens_q = torch.tensor([0, 1, call.seqlen_q], dtype=torch.int32)
    return call._replace(
        q_offset=torch.zeros(2, dtype=torch.int64), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_q
    )


def compile_decode(call, config, num_splits=2):
    """Facts of the split kernel and the merge, with what is on only where tensors lie on a GPU of 9.0."""
    parts = ("rotate", "split", "merge")
    rotate, split, merge = (CompileOnly(getattr(decode_launch, f"_{part}_kernel")) for part in parts)
    masked = call.attn_mask is not None or call.key_bounds is not None
    with (
        mock.patch.object(decode_launch, "_rotate_kernel", rotate),
        mock.patch.object(decode_launch, "_split_kernel", split),
        mock.patch.object(decode_launch, "_merge_kernel", merge),
        mock.patch.object(decode_launch, "overlaps", return_value=True),
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(support, "_plans", {}),  # entries may be alike, and a plan keeps its kernels
    ):
        decode_launch.decode(call, num_splits, config)
    words = call.k.dtype == torch.uint8 and call.k.stride(2) % 2 == 0
    runs = 2 if masked or call.seqlen_q > 1 or words else 1
    return facts(split.compiled, runs), merge.compiled and facts(merge.compiled, 1)


def decode_rows():
    configs, rows = decode_configs.CONFIGS, {}
    for kind, by_width in configs.items():
        for width, config in by_width.items():
            rows[f"decode {kind} {width}"], rows["merge"] = compile_decode(decode_call(kind, width), config)
    for width, config in configs["64 rows"].items():
        call = decode_call("64 rows", width)
        rows[f"decode small 64 rows {width}"], _ = compile_decode(call, config._replace(num_stages=2))
    for dtype, scales in ((torch.int8, "token"), (torch.int8, "head"), (torch.float8_e5m2, "head")):
        call = decode_call("8 bit", 128, dtype, scales)
        rows[f"decode 8 bit 128 {str(dtype)[6:]} {scales}"], _ = compile_decode(call, configs["8 bit"][128])
    rows_64 = decode_call("64 rows", 128)
    calls = {
        "8 bit 128 in pages": in_pages(decode_call("8 bit", 128)),
        "16 bit 128 bounds and mask": make_call(128, 1, torch.bfloat16, first_row({**BOUNDS, **MASK})),
        "16 bit 128 terms": make_call(128, 1, torch.bfloat16, first_row(TERMS["terms"])),
        "64 rows, packed 128 in pages": packed(in_pages(rows_64))._replace(cu_seqlens_k=None),
        "64 rows 128 8 bit, padding": in_8_bits(rows_64)._replace(key_padding=torch.ones(1, 256, dtype=torch.bool)),
    }
    for width, size in ((64, 32), (128, 32), (128, 128), (256, 256)):
        config = decode_configs.CONFIGS["4 bit"][min(256, max(64, size) * (width // size))]
        rows[f"decode 4 bit, groups of {size} {width}"], _ = compile_decode(
            decode_call("4 bit", width, scales=size), config
        )
    for name, call in calls.items():
        kind = name[: name.index(" 128")]
        rows[f"decode {name}"], _ = compile_decode(call, configs[kind][128], 1 if "terms" in name else 2)
    for dtype in (torch.bfloat16, torch.float16):
        for side, call in in_integers_and_int8(make_call(128, 20, dtype, CAUSAL)).items():
            with mock.patch.object(torch.Tensor, "is_cuda", True):
                kind = decode_configs._kind(call, 16)
            rows[f"decode {kind} 128 {side} in int8, {dtype}"], _ = compile_decode(call, configs[kind][128])
    return rows


def first_row(terms):
    """Terms of the first query alone."""
    by_row = {"key_bounds", "attn_mask", "lse"}
    return {name: x[:, :, :1].contiguous() if name in by_row else x for name, x in terms.items()}


def compile_linear(rows, **options):
    """Facts of the linear kernel as an 8B Llama calls it, as on a GPU of 9.0."""
    kernel = CompileOnly(linear_launch._linear_kernel)
    x = torch.empty(1, 1, 4096, dtype=torch.bfloat16)
    weights = [x.new_empty(n, 4096) for n in rows]
    layers = Layers(x, weights, [None] * len(rows), eps=1e-5, **options)
    with (
        mock.patch.object(linear_launch, "_linear_kernel", kernel),
        mock.patch.object(linear_launch, "overlaps", return_value=True),
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(support, "_plans", {}),
    ):
        linear_launch.linear(layers)
    return facts(kernel.compiled, 1)


def main():
    driver.set_active(HopperDriver())
    rows = decode_rows()
    for width in (64, 128, 256):
        for terms in ("full", "causal"):
            rows[f"prefill descriptor {width} {terms}"] = compile_prefill(width, torch.bfloat16, True, terms)
        rows[f"prefill pointer {width} causal"] = compile_prefill(width, torch.bfloat16, False, "causal")
        rows[f"prefill float32 {width} causal"] = compile_prefill(width, torch.float32, False, "causal")
    rows["prefill descriptor 128 window"] = compile_prefill(128, torch.bfloat16, True, "window")
    rows["prefill descriptor 128 terms"] = compile_prefill(128, torch.bfloat16, True, "terms")
    for width in (64, 128, 256):
        for terms in ("bounds", "bounds and band", "bounds and mask"):
            rows[f"prefill descriptor {width} {terms}"] = compile_prefill(width, torch.bfloat16, True, terms)
    for name, terms in HOPPER_TERMS.items():
        rows[f"hopper descriptor {name}"], rest = compile_prefill_hopper(int(name.split()[0]), terms)
        if rest:
            rows[f"hopper descriptor {name}, rest"] = rest
    norm, residual = torch.empty(4096, dtype=torch.bfloat16), torch.empty(1, 1, 4096, dtype=torch.bfloat16)
    rows["linear qkv"] = compile_linear([4096, 1024, 1024], norm=norm)
    rows["linear gated"] = compile_linear([14336, 14336], norm=norm, activation="silu")
    rows["linear residual"] = compile_linear([4096], residual=residual)
    rows["hopper descriptor 192 by 128 causal"], _ = compile_prefill_hopper(192, CAUSAL, 128)
    for width in (64, 128, 256):
        for terms in ("full", "causal", "bounds and band"):
            found = compile_prefill_fp8(width, TERMS[terms])
            names = ("hopper descriptor fp8", "fp8 largest", "fp8 quantise", "fp8 seen")
            for name, row in zip(names, found, strict=False):
                rows[f"{name} {width} {terms}"] = row
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
