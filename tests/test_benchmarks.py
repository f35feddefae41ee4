"""Every case of the benchmarks, tiny, built, run and checked on the CPU. FlashAttention-3 and FlashInfer are stand-ins
that compute from the arguments they get; nothing is timed.
"""

import importlib
import io
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.dense import dense
from attnpatch.kernels.reference import attention_reference
from attnpatch.testing.inputs import random_call

FOLDER = Path(__file__).parents[1] / "benchmarks"
GIB = 1 << 30

TINY = [
    ("prefill", "B1 H4/2 S40 D16 causal", "cudnn hf-eager sdpa-flash fa3"),
    ("prefill", "B1 H2/2 S40 D16 full", "cudnn hf-eager sdpa-flash fa3"),
    ("prefill", "B1 H4/2 S40 D16 window 8", "cudnn hf-eager"),
    ("decode", "B2 H4/2 S48 D16", "cudnn sdpa-flash fa3 flashinfer hf-eager"),
    ("decode", "B1 H2/2 S16 D144", "cudnn sdpa-flash fa3 hf-eager"),
    ("append", "B2 H4/2 S48 D16 q 1", "cudnn fa3 flashinfer"),
    ("append", "B2 H4/2 S48 D16 q 5", "cudnn fa3 flashinfer"),
    ("paged", "B2 H4/2 S48 D16 page 16", "flashinfer"),
    ("paged", "B2 H4/2 S48 D16 page 8", "flashinfer"),
    ("ragged", "B3 H4/2 S64 D16 from 4", "fa3 flashinfer"),
    ("static", "B1 H4/2 S64 D16 window 16", "cudnn+cut"),
    ("static", "B1 H4/2 S64 D16 holds 16", "cudnn+cut fa3"),
    ("quantised", "B2 H4/2 S48 D16", ""),
    ("tbq4", "B2 H4/2 S48 D16", "cudnn"),
    ("tbq4", "B1 H4/2 S48 D80 q 4", "cudnn"),
    ("invariant", "B1 H4/2 S48 D16", ""),
]
"""A case of each kind, and the peers that must run it."""


def _attend(q, k, v, sm_scale, causal):
    """Rows ``[rows, heads, width]`` on keys ``[keys, kv_heads, width]``, causal from the bottom right."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    terms = {"q_offset": k.shape[2] - q.shape[2], "window_right": 0} if causal else {}
    return attention_reference(AttentionCall(q, k, v, sm_scale, **terms))[0].transpose(0, 1).to(q.dtype)


def _fa3():
    """What fa3_fwd_interface computes, by its own parameter names."""

    def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, softmax_scale=None, causal=False):
        assert cache_seqlens is None or cache_seqlens.dtype == torch.int32
        lengths = [k_cache.shape[1]] * len(q) if cache_seqlens is None else cache_seqlens.tolist()
        sequences = zip(q, k_cache, v_cache, lengths, strict=True)
        return torch.stack([_attend(q, k[:n], v[:n], softmax_scale, causal) for q, k, v, n in sequences])

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        return torch.stack([_attend(*part, softmax_scale, causal) for part in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, num_splits=1
    ):
        (rows, keys), longest = (
            (cu.diff().tolist() for cu in (cu_seqlens_q, cu_seqlens_k)),
            (max_seqlen_q, max_seqlen_k),
        )
        assert (max(rows), max(keys)) == longest
        parts = zip(q.split(rows), k.split(keys), v.split(keys), strict=True)
        return torch.cat([_attend(*part, softmax_scale or q.shape[2] ** -0.5, causal) for part in parts])

    module = types.ModuleType("fa3_fwd_interface")
    for function in (flash_attn_with_kvcache, flash_attn_varlen_func, flash_attn_func):
        setattr(module, function.__name__, function)
    return module


def _flashinfer():
    """What flashinfer's two wrappers compute, by their own parameter names."""

    class Wrapper:
        def run(self, q, paged_kv_cache):
            assert q.is_contiguous()
            *sizes, page_size = self.sizes
            pools = [x.transpose(1, 2) if self.layout == "HND" else x for x in paged_kv_cache]
            assert sizes == [q.shape[1], pools[0].shape[2], q.shape[2]]
            assert pools[0].shape[1] == page_size
            parts, tables = q.split(self.rows), self.indices.split(self.indptr.diff().tolist())
            keys = [(len(table) - 1) * page_size + n for table, n in zip(tables, self.last.tolist(), strict=True)]
            sequences = zip(parts, tables, keys, strict=True)
            kv = [(q, *(pool[table.long()].flatten(0, 1)[:n] for pool in pools)) for q, table, n in sequences]
            return torch.cat([_attend(*part, self.sm_scale, self.causal) for part in kv])

        def _plan(self, rows, causal, indptr, indices, last, *sizes, q_data_type, kv_data_type, sm_scale):
            assert {x.dtype for x in (indptr, indices, last)} == {torch.int32}
            assert q_data_type == kv_data_type == torch.bfloat16
            assert len(last) == len(rows) == len(indptr) - 1
            self.rows, self.causal, self.sm_scale, self.sizes = rows, causal, sm_scale, sizes
            self.indptr, self.indices, self.last = indptr, indices, last

    class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
        def __init__(self, float_workspace_buffer, kv_layout, use_tensor_cores):
            self.layout = kv_layout

        def plan(self, indptr, indices, last_page_len, *sizes, **options):
            self._plan([1] * len(last_page_len), False, indptr, indices, last_page_len, *sizes, **options)

    class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
        def __init__(self, float_workspace_buffer, kv_layout, backend):
            self.layout = kv_layout

        def plan(self, qo_indptr, *arguments, causal, **options):
            self._plan(qo_indptr.diff().tolist(), causal, *arguments, **options)

    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return module


class Captured:
    """Runs what would be captured."""

    def __init__(self, function, inputs):
        for x in inputs:
            function(x)


def _interleave(captured, rounds):
    return {name: {"burst": 1.0, "hot": 2.0} for name in captured}


@pytest.fixture
def modules(monkeypatch):
    """The modules of the folder, which import each other by their plain names, with the stand-ins."""
    names = [path.stem for path in FOLDER.glob("*.py")]
    monkeypatch.syspath_prepend(FOLDER)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = types.SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for module in (found.measure, found.bandwidth, found.writes, found.linears, found.masks):
        monkeypatch.setattr(module, "Captured", Captured)
        monkeypatch.setattr(module, "interleave", _interleave)
    monkeypatch.setattr(found.peers, "WORKSPACE_BYTES", 1)
    stand_ins = {"fa3_fwd_config": types.ModuleType(""), "fa3_fwd_interface": _fa3(), "flashinfer": _flashinfer()}
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield found
    for name in names:
        sys.modules.pop(name, None)


def _peers(rows):
    return {row["impl"] for row in rows if not row["impl"].startswith("attnpatch")}


@pytest.mark.parametrize(("suite", "name", "peers"), TINY)
def test_a_tiny_case_of_each_kind_is_right_and_has_its_peers(modules, monkeypatch, suite, name, peers):
    if suite == "invariant":  # runs the Triton kernel itself, whose interpreter computes bfloat16 products wrongly
        monkeypatch.setattr(modules.suites, "random_call", lambda *sizes, dtype, **terms: random_call(*sizes, **terms))
    monkeypatch.setattr(modules.suites, "MOST_BUFFERS", 2)
    rows = list(modules.measure.measure(modules.suites.Case.parse(suite, name), 1))
    assert _peers(rows) == set(peers.split())
    assert [row["clock"] for row in rows] == ["burst", "hot"] * (len(rows) // 2)
    assert all(row["rel_err"] < 0.01 for row in rows)
    assert rows[0]["impl"].startswith("attnpatch")
    json.dumps(rows)


def test_rows_of_tbq4_count_the_bytes_that_a_run_moves(modules, monkeypatch):
    monkeypatch.setattr(modules.suites, "MOST_BUFFERS", 1)
    rows = list(modules.measure.measure(modules.suites.Case.parse("tbq4", "B2 H4/2 S48 D80"), 1))
    keys, stored, wide = 2 * 2 * 48, 2 * (40 + 2 * 2), 2 * 160  # of 80 channels there are blocks of 64 and of 16
    by_kind = {row["impl"].partition("+")[2] or row["impl"].partition(".")[0]: row for row in rows}
    assert {kind: row["bytes"] // keys for kind, row in by_kind.items()} == {
        "attnpatch": wide,
        "cudnn": wide,
        "codes": stored,
        "decoded first": stored + 2 * wide,
    }
    burst = {kind: row["tbps"] * row["ms"] * 1e9 / keys for kind, row in by_kind.items()}
    assert burst["codes"] == burst["decoded first"] == pytest.approx(stored)


def test_codes_that_are_wrong_raise(modules, monkeypatch):
    """Ours on codes is held to the tolerance of what the codes decode to."""
    monkeypatch.setattr(modules.suites, "MOST_BUFFERS", 1)
    case = modules.suites.Case.parse("tbq4", "B2 H4/2 S48 D16")
    monkeypatch.setattr(
        modules.suites, "dense", lambda call: modules.suites.DecodedFirst._make(dense(call._replace(v=call.v ^ 1)))
    )
    with pytest.raises(AssertionError, match="is above the allowed"):
        list(modules.measure.measure(case, 1))


def test_a_mixed_batch_of_each_kind_of_sequence(modules, monkeypatch):
    monkeypatch.setattr(modules.mixed, "PAST_L2", 1)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
    lengths = {"decodes": 3, "shortest": 4, "longest": 32, "append_rows": 3, "prefill_rows": 9}
    case = modules.mixed.MixedCase(**sizes, **lengths, appends=1, prefills=1)
    rows = list(modules.measure.measure(case, 1))
    assert _peers(rows) == {"fa3", "flashinfer"}
    assert sum(row["impl"].endswith("+packed") for row in rows) == 2
    assert all(row["rel_err"] < 0.01 for row in rows)
    table = case.call(0).block_table
    assert sorted(table[table >= 0].tolist()) == list(range(int(table.max()) + 1)), "a page belongs to one sequence"


def test_prompts_of_different_lengths_beside_equal_ones(modules):
    case = modules.varlen.VarlenCase(batch=3, num_heads=4, num_kv_heads=2, head_dim=16, shortest=4, longest=64)
    rows = list(modules.measure.measure(case, 1))
    assert _peers(rows) == {"fa3", "fa3+equal"}
    assert sum(row["impl"].startswith("attnpatch") and row["impl"].endswith("+equal") for row in rows) == 2
    assert all(row["rel_err"] < 0.01 for row in rows)
    rates = [row["tflops"] for row in rows if row["clock"] == "burst"]
    assert max(rates) < 1.1 * min(rates), "as much work"


def test_a_peer_that_is_wrong_or_fails_is_left_out_and_ours_is_not(modules, monkeypatch, capsys):
    case = modules.suites.Case.parse("decode", "B2 H4/2 S48 D16")
    monkeypatch.setattr(modules.suites, "MOST_BUFFERS", 1)
    monkeypatch.setattr(modules.suites, "sdpa_flash", lambda: modules.measure.Implementation(lambda call: 1.1 * call.q))
    monkeypatch.setattr(modules.suites, "hf_eager", lambda call: call.missing)
    monkeypatch.setattr(
        modules.suites, "fa3", lambda: {"fa3": modules.measure.Implementation(lambda call: call.q * torch.nan)}
    )
    assert _peers(modules.measure.measure(case, 1)) == {"cudnn", "flashinfer"}
    said = capsys.readouterr().out
    assert "fa3 is left out: AssertionError: its relative error is" in said
    assert "sdpa-flash is left out: AssertionError: its relative error is" in said
    assert "hf-eager is left out: AttributeError" in said

    monkeypatch.setattr(modules.suites, "ours", lambda call: 1.1 * call.q)
    with pytest.raises(AssertionError, match="is above the allowed"):
        list(modules.measure.measure(case, 1))


def test_a_peer_that_is_not_installed_is_left_out(modules, monkeypatch, capsys):
    for name in ("fa3_fwd_interface", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(modules.suites, "MOST_BUFFERS", 1)
    rows = list(modules.measure.measure(modules.suites.Case.parse("append", "B1 H4/2 S48 D16 q 5"), 1))
    assert _peers(rows) == {"cudnn"}
    said = capsys.readouterr().out
    assert "fa3_fwd_interface is not measured: ModuleNotFoundError" in said
    assert "flashinfer is not measured: ModuleNotFoundError" in said


@pytest.mark.parametrize("suite", ["decode", "append", "paged", "ragged", "static", "quantised", "tbq4", "invariant"])
def test_buffers_pass_l2_and_fit(modules, suite):
    for name in modules.suites.SUITES[suite]:
        case = modules.suites.Case.parse(suite, name)
        one = 4 * case.head_dim * case.num_kv_heads * case.seqlen * case.batch
        forms = 5 if suite in ("quantised", "static", "ragged") else 3
        assert case.buffers * one * forms < 90 * GIB, name
        seen = 4 * case.head_dim * case.num_kv_heads * sum(case.lengths)
        stored = seen // 4 if suite == "tbq4" else seen
        assert case.buffers * stored > 128 << 20, name
        assert all(1 <= length <= case.seqlen for length in case.lengths)
        assert len(case.lengths) == case.batch


@pytest.mark.parametrize("name", ["B2 H2 S16 D8", "B2 H2 S16 D8 page 4"])
def test_writes_are_the_same(modules, monkeypatch, name):
    monkeypatch.setattr(modules.writes, "STEPS", 3)
    rows = list(modules.writes.measure_write(name, 1))
    assert {row["impl"] for row in rows} == {
        "attnpatch.cache_write",
        "torch.index_put_" if "page" in name else "torch.index_copy_",
    }
    assert rows[0]["tbps"] == 2 * 2 * 2 * 2 * 8 * 2 / 1e9

    monkeypatch.setattr(modules.writes, "ours", lambda x: x.k_cache.zero_())
    with pytest.raises(AssertionError):
        list(modules.writes.measure_write(name, 1))


def test_linear_layers_are_the_same(modules, monkeypatch):
    monkeypatch.setattr(modules.linears, "PAST_L2", 1)
    monkeypatch.setitem(modules.linears.CASES, "tiny", (32, 8, 48))
    rows = list(modules.linears.measure_linears("tiny", 1))
    assert [row["impl"] for row in rows] == ["attnpatch.linear"] * 2 + ["torch"] * 2
    assert rows[0]["tbps"] == 2 * (2 * 32 + 32 * (2 * 32 + 2 * 8 + 3 * 48)) / 1e9
    assert all(0 < row["rel_err"] < 0.02 for row in rows)

    def ones(x, weights, *_, activation=None, **__):
        return [torch.ones_like(x)] * (1 if activation else len(weights))

    monkeypatch.setattr(modules.linears, "linear", ones)
    with pytest.raises(AssertionError):
        list(modules.linears.measure_linears("tiny", 1))


def test_a_read_is_a_sum_of_everything(modules, monkeypatch):
    monkeypatch.setattr(modules.bandwidth, "PROGRAMS", 3)
    rows = list(modules.bandwidth.measure_bandwidth("read 512 KiB", 1))
    assert {row["impl"] for row in rows} == {"triton", "torch.sum"}
    assert rows[0]["tbps"] == (512 << 10) / 4 / 1e9
    monkeypatch.setattr(modules.bandwidth, "read", lambda x: x[:100])
    with pytest.raises(AssertionError, match="the sum is off"):
        list(modules.bandwidth.measure_bandwidth("read 512 KiB", 1))


@pytest.fixture
def small_masks(modules, monkeypatch):
    masks = modules.masks
    sizes = {"HEADS": 4, "KV_HEADS": 2, "SEQLEN": 64, "HEAD_DIM": 16, "CACHE": 64, "VALID": 16, "STEPS": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(masks, name, size)
    monkeypatch.setattr(masks, "_flex_masks", dict)  # FlexAttention compiles for a long time
    return masks


def test_masks_are_right(modules, small_masks):
    peers = set()
    for name in small_masks.MASKS:
        rows = list(modules.measure.measure(small_masks.MaskCase(name), 1))
        assert all(row["rel_err"] < 0.01 for row in rows), name
        peers |= _peers(rows)
    assert peers == {"cudnn"}


def test_scans_are_the_same(small_masks):
    for name in small_masks.SCANS:
        rows = list(small_masks.measure_scan(name, 1))
        assert [row["impl"] for row in rows[::2]] == ["attnpatch.key_bounds", "torch"]


def _row(case, impl, clock, ms, **more):
    return {"suite": "append", "case": case, "impl": impl, "ms": ms, "rel_err": 0.001, "clock": clock, **more}


def test_rows_of_append_say_how_many_times_one_query_they_take(modules):
    rows = [
        _row("S8 q 1", "attnpatch.triton.decode", "burst", 2.0),
        _row("S8 q 1", "fa3", "burst", 9.0),
        _row("S8 q 1", "attnpatch.triton.decode", "hot", 4.0),
        _row("S8 q 16", "attnpatch.triton.append", "hot", 5.0),
        _row("S8 q 16", "attnpatch.triton.append", "burst", 3.0),
    ]
    assert [row["x_q1"] for row in modules.run.beside_one_row(rows)] == [1.0, 4.5, 1.0, 1.25, 1.5]


def test_the_table_has_the_factor_of_every_peer(modules):
    rows = [
        _row("B1", impl, clock, factor * clocks, tbps=2.0 / clocks)
        for impl, factor in (("attnpatch.triton.decode", 1.0), ("cudnn", 1.5), ("fa3", 2.0))
        for clock, clocks in (("burst", 1.0), ("hot", 2.0))
    ]
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(modules.run.table("decode", rows, 4.0))
    lines = console.export_text().splitlines()
    assert any("cudnn" in line and "1.50 / 1.50" in line and " 50 " in line for line in lines)
    assert any("fa3" in line and "2.00 / 2.00" in line for line in lines)


def test_every_suite_has_jobs_of_different_names(modules):
    for suite in modules.run.ALL:
        names = [job.name for job in modules.run.jobs(suite)]
        assert names
        assert len(set(names)) == len(names)


def test_a_failing_case_costs_no_other_and_the_exit_code(modules, monkeypatch, tmp_path, capsys):
    def fails(rounds=1):
        raise AssertionError("ours is wrong")

    good = [_row("S8 q 1", "attnpatch.triton.decode", clock, 2.0, tbps=1.0) for clock in ("burst", "hot")]
    jobs = [modules.run.Job("bad", fails, fails), modules.run.Job("S8 q 1", lambda rounds: good, lambda: None)]
    monkeypatch.setattr(modules.run, "jobs", lambda suite: jobs)
    monkeypatch.setattr(modules.run, "environment", lambda commit: {"gpu": "NVIDIA H200", "date": "2026-11-30"})
    options = types.SimpleNamespace(suites=["append"], quick=True, results=tmp_path, commit=None)
    assert modules.run.report(options) == 1
    assert "ours is wrong" in capsys.readouterr().out
    rows = json.loads((tmp_path / "2026-11-30-h200.json").read_text())["rows"]
    assert rows == [{**row, "x_q1": 1.0} for row in good]
    assert modules.run.once(["append"]) == 1


NCU = """==PROF== Connected
out of the program
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","_decode_split_kernel","dram__bytes_read.sum","byte","134,500,000"
"0","_decode_split_kernel","gpu__time_duration.sum","ns","37,000"
"1","_decode_merge_kernel","dram__bytes_read.sum","byte","500,000"
"1","_decode_merge_kernel","gpu__time_duration.sum","ns","3,000"
"""


def test_bytes_that_ncu_counted_are_those_of_all_kernels(modules):
    case = modules.suites.Case.parse("decode", "B1 H32/8 S32768 D128")
    row = modules.bytes_read.row(case, "hf-eager", modules.bytes_read.totals(NCU))
    assert (row["bytes_read"], row["ms"]) == (135e6, 0.04)
    assert row["x_kv"] == pytest.approx(135e6 / (2 * 8 * 32768 * 128 * 2))


@pytest.mark.parametrize("output", ["==ERROR== ERR_NVGPUCTRPERM", NCU[: NCU.index('"0"')]])
def test_ncu_that_counts_nothing_is_said(modules, monkeypatch, capsys, output):
    with pytest.raises(ValueError, match="no "):
        modules.bytes_read.totals(output)
    done = types.SimpleNamespace(stdout=output, stderr="may not")
    monkeypatch.setattr(modules.bytes_read.subprocess, "run", lambda *args, **options: done)
    assert modules.bytes_read.count(modules.suites.Case.parse("decode", "B1 H4/2 S16 D16")) == []
    assert "ncu counts nothing for attnpatch" in capsys.readouterr().out


def test_markdown_has_a_line_per_case_and_a_column_per_implementation(modules):
    rows = [
        _row(case, impl, clock, ms * factor, tbps=1.0)
        for case, impls in (("B1", {"attnpatch.triton.decode": 1, "fa3": 2}), ("B2", {"attnpatch.triton.decode": 1}))
        for impl, factor in impls.items()
        for clock, ms in (("burst", 0.01), ("hot", 2.0))
    ]
    assert modules.as_markdown.table(rows) == [
        "| case | attnpatch.triton.decode | fa3 |",
        "| --- | --- | --- |",
        "| B1 | 10.0 / 2000 us, 1.00 TB/s | 20.0 / 4000 us; x 2.00 / 2.00 |",
        "| B2 | 10.0 / 2000 us, 1.00 TB/s |  |",
    ]


@pytest.mark.parametrize("impl", ["attnpatch.eager-rest", "hf-sdpa"])
def test_a_row_of_generate(modules, impl):
    generate = modules.generate
    row = generate.measure_generate(generate.Case.parse("tiny S24 B2"), impl, new_tokens=6)
    assert (row["suite"], row["case"], row["impl"]) == ("generate", "tiny S24 B2", impl)
    assert 0 < row["first_token_s"] < row["fourth_token_s"]
    assert min(row[name] for name in ("ms", "step_ms", "loop_ms", "floor_ms")) > 0
    shown = Console(file=io.StringIO(), width=150)
    shown.print(generate.table([row]))
    assert impl in shown.file.getvalue()
    assert modules.as_markdown.table([row])[2].endswith("of the floor |")


def test_a_row_of_generate_in_two_processes(modules, monkeypatch):
    """What would be two GPUs are two processes on the CPU."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    row = modules.generate.in_child("tiny S24 B2", "attnpatch.eager-rest 2 GPUs", 4.3, 6)
    assert (row["case"], row["impl"]) == ("tiny S24 B2", "attnpatch.eager-rest 2 GPUs")
    assert 0 < row["floor_ms"] < row["step_ms"]


def test_the_floor_of_a_token(modules):
    """8.03 billion weights of two bytes, and 2 x 32 layers x 8 heads x 128 channels of two bytes per token."""
    generate = modules.generate
    case = generate.Case.parse("8B S65536 B1")
    weights = torch.nn.Linear(8_030_261_248, 1, bias=False, dtype=torch.bfloat16, device="meta")
    expected = (8_030_261_248 * 2 + 65536 * 2 * 32 * 8 * 128 * 2) / 4.3e12 * 1e3
    assert generate.floor_ms(weights, case, 4.3, gpus=1) == pytest.approx(expected)
    assert generate.floor_ms(weights, case, 4.3, gpus=2) == pytest.approx(expected / 2)
    assert expected == pytest.approx(5.7, abs=0.1)


def test_a_case_of_generate_that_is_none(modules):
    with pytest.raises(ValueError, match="case '9B S1 B1' is none like '8B S2048 B1'"):
        modules.generate.Case.parse("9B S1 B1")


def test_a_child_shows_its_row_at_once(modules, monkeypatch, capsys):
    generate = modules.generate
    row = dict.fromkeys((*generate.COLUMNS, "ms"), 2.0) | {"floor_ms": 1.0, "peak_gb": None}
    child = types.SimpleNamespace(returncode=0, stdout=f"a word before\n{json.dumps(row)}\n", stderr="")
    monkeypatch.setattr(generate.subprocess, "run", lambda *_, **__: child)
    assert generate.in_child("8B S2048 B1", "hf-sdpa", 4.3, 6) == row
    shown = capsys.readouterr().out
    assert shown.startswith("8B S2048 B1, hf-sdpa, ms 2.00, floor_ms 1.00")
    assert "x floor 2.00" in shown
    assert "peak" not in shown


def test_a_child_that_fails_is_told(modules, monkeypatch, capsys):
    child = types.SimpleNamespace(returncode=1, stdout="", stderr="out of memory")
    monkeypatch.setattr(modules.generate.subprocess, "run", lambda *_, **__: child)
    assert modules.generate.in_child("8B S2048 B1", "hf-eager", 4.3, 6) is None
    assert "FAILED generate: 8B S2048 B1 hf-eager\nout of memory" in capsys.readouterr().out
