"""The shapes that are measured, and the implementations that are measured on them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from harness import DEVICE, PAST_L2
from measure import Implementation, Implementations, our_name, ours
from peers import additive_mask, cudnn, fa3, fa3_prefill, flashinfer, hf_eager, sdpa_flash
from torch import Tensor

from attnpatch.attention_call import AttentionCall
from attnpatch.kernels.dense import dense
from attnpatch.testing.inputs import codes, integers, paged, quantised, random_call

SUITES = {
    "prefill": [
        "B4 H32/8 S4096 D128 causal",
        "B1 H32/8 S16384 D128 causal",
        "B1 H32/8 S16384 D128 full",
        "B1 H32/8 S32768 D128 causal",
        "B4 H32/32 S4096 D64 causal",
        "B2 H16/8 S8192 D256 causal",
        "B16 H32/8 S1024 D128 causal",
        "B32 H32/8 S512 D128 causal",
        "B4 H32/8 S4000 D128 causal",
        "B4 H32/8 S4096 D128 full",
        "B2 H32/8 S3333 D128 full",
        "B4 H32/8 S4096 D128 causal half",
        "B4 H32/8 S4096 D128 window 1024",
        "B1 H9/3 S4096 D64 causal",
    ],
    "decode": [
        "B1 H9/3 S4096 D64",
        "B1 H32/8 S1024 D128",
        "B1 H32/8 S4096 D128",
        "B1 H32/8 S32768 D128",
        "B1 H32/8 S131072 D128",
        "B8 H32/8 S8192 D128",
        "B8 H32/8 S32768 D128",
        "B32 H32/8 S4096 D128",
        "B64 H32/8 S1024 D128",
        "B1 H32/32 S32768 D128",
        "B1 H16/2 S65536 D128",
        "B8 H16/8 S16384 D256",
        "B1 H24/4 S262144 D256",
    ],
    "append": [f"B1 H32/8 S32768 D128 q {rows}" for rows in (1, 4, 8, 16, 64)],
    "paged": [
        "B1 H32/8 S32768 D128 page 16",
        "B8 H32/8 S32768 D128 page 16",
        "B8 H32/8 S32768 D128 page 64",
        "B8 H32/8 S32768 D128 page 256",
        "B32 H32/8 S4096 D128 page 16",
    ],
    "ragged": ["B32 H32/8 S32768 D128 from 128"],
    "static": ["B1 H32/8 S131072 D128 window 4096", "B1 H32/8 S131072 D128 holds 2048"],
    "quantised": ["B1 H32/8 S32768 D128", "B8 H32/8 S32768 D128"],
    "tbq4": [
        "B8 H32/8 S32768 D128",
        "B8 H64/8 S32768 D128",
        "B1 H32/8 S131072 D128",
        "B1 H32/32 S32768 D128",
        "B32 H32/8 S4096 D128",
        "B1 H32/8 S32768 D128",
        "B8 H16/8 S16384 D256",
        "B1 H24/4 S262144 D256",
        "B8 H32/8 S32768 D64",
        "B1 H32/8 S32768 D128 q 4",
    ],
    "invariant": ["B1 H32/8 S4096 D128", "B1 H32/8 S32768 D128", "B8 H32/8 S32768 D128"],
}
"""Cases by suite; H is query heads / key and value heads, S the keys. But for prefill the last row sees all S keys, or
the last ``window``, or the ``holds`` that a static cache of S holds, or as many as its sequence has, drawn from
``from`` to S on a logarithmic scale. All is bfloat16, or float16 where it says ``half``."""

MOST_BUFFERS = 64
EAGER_BYTES = 256 << 20
"""Of K and V, the most that Hugging Face's eager decode is measured on: it takes up to 30 times as long."""

EAGER_SCORES = 3 << 30
"""The most scores that Hugging Face's eager prefill is measured on: it keeps several times as many in memory."""


class Case(NamedTuple):
    """A case's name taken apart."""

    suite: str
    name: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen: int
    head_dim: int
    words: dict[str, int]

    @classmethod
    def parse(cls, suite: str, name: str) -> Case:
        """Read ``name``: sizes, then words, each with a number or without (0)."""
        match = re.fullmatch(r"B(\d+) H(\d+)/(\d+) S(\d+) D(\d+)((?: [a-z]+(?: \d+)?)*)", name)
        assert match, name
        words = {word: int(number or 0) for word, number in re.findall(r"([a-z]+)(?: (\d+))?", match[6])}
        return cls(suite, name, *(int(group) for group in match.groups()[:5]), words=words)

    @property
    def short(self) -> bool:
        """Whether a run is short beside the gap between two graphs."""
        return self.suite != "prefill"

    @property
    def rows(self) -> int:
        """Query rows per sequence."""
        return self.seqlen if self.suite == "prefill" else self.words.get("q", 1)

    @property
    def lengths(self) -> list[int]:
        """Keys that the last row of each sequence sees."""
        longest = self.words.get("window") or self.words.get("holds") or self.seqlen
        if "from" not in self.words:
            return [longest] * self.batch
        steps = torch.rand(self.batch, generator=torch.Generator().manual_seed(0)).tolist()
        return [round(self.words["from"] * (self.seqlen / self.words["from"]) ** step) for step in steps]

    @property
    def buffers(self) -> int:
        """Calls over different buffers that are together larger than L2."""
        vectors = 2 * (self.batch * self.rows * self.num_heads + sum(self._seen) * self.num_kv_heads)  # q, o and k, v
        channels = vectors * self.head_dim
        return min(MOST_BUFFERS, -(-PAST_L2 // (channels // 2 if self.suite == "tbq4" else 2 * channels)))

    @property
    def _seen(self) -> list[int]:
        """Keys of each sequence that some row sees."""
        return [self.seqlen] * self.batch if self.suite == "prefill" else self.lengths

    def call(self, seed: int) -> AttentionCall:
        """A call over buffers of its own; its cache is dense."""
        terms: dict[str, Any] = {} if "full" in self.words else {"window_right": 0}
        if "window" in self.words:
            terms["window_left"] = self.words["window"] - 1
        if self.suite != "prefill":
            terms["q_offset"] = self._positions()
        sizes = (self.batch, self.num_heads, self.num_kv_heads, self.rows, self.seqlen, self.head_dim)
        dtype = torch.float16 if "half" in self.words else torch.bfloat16
        return random_call(*sizes, dtype=dtype, device=DEVICE, seed=seed, **terms)

    def _positions(self) -> Tensor:
        """Of the first row, on the device: one, or one per sequence where they differ."""
        ends = self.lengths if "from" in self.words else self.words.get("holds") or self.seqlen
        return torch.tensor(ends, device=DEVICE) - self.rows

    def implementations(self, call: AttentionCall) -> Implementations:
        """Ours and its peers, by what the suite compares."""
        return IMPLEMENTATIONS[self.suite](self, call)

    def rate(self, ms: float, form: Any) -> dict[str, float]:
        """Useful work per second: bytes of the visible keys and values as stored, or products of visible pairs.

        Of ``tbq4`` also the bytes of keys and values that a run reads and writes.
        """
        if self.suite != "prefill":
            keys = sum(self._seen) * self.num_kv_heads
            rate = {"tbps": keys * self._key_bytes(form) / ms / 1e9}
            return {**rate, "bytes": keys * self._moved_bytes(form)} if self.suite == "tbq4" else rate
        pairs = self.seqlen**2 / (1 if "full" in self.words else 2)
        if window := self.words.get("window"):
            pairs = self.seqlen * window - window**2 / 2
        return {"tflops": 4 * self.batch * self.num_heads * self.head_dim * pairs / ms / 1e9}

    def _key_bytes(self, form: Any) -> int:
        """Bytes of one key and its value, with scales where they have their own."""
        if not isinstance(form, AttentionCall):
            return 4 * self.head_dim
        return _row_bytes(form.k, form.k_scale, form.k_shift) + _row_bytes(form.v, form.v_scale, form.v_shift)

    def _moved_bytes(self, form: Any) -> int:
        """Bytes that a run reads and writes for one key and its value."""
        written_and_read = 2 * 4 * self.head_dim if isinstance(form, DecodedFirst) else 0
        return self._key_bytes(form) + written_and_read


def _row_bytes(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> int:
    """Bytes of a row of K or V."""
    own = x.shape[3] * x.element_size()
    scales = [y for y in (scale, shift) if y is not None and y.stride(2) != 0]
    return own + sum(y[0, 0, 0].numel() * y.element_size() for y in scales)


class DecodedFirst(AttentionCall):
    """A call on TBQ4 codes that is run in two passes: all of K and V decoded, then attention over that."""


def _own(call: AttentionCall) -> Implementations:
    return {our_name(call): Implementation(ours)}


def _prefill(case: Case, call: AttentionCall) -> Implementations:
    is_short = case.batch * case.num_heads * case.seqlen**2 <= EAGER_SCORES
    additive = additive_mask(call) if call.is_banded and is_short else None
    found = {**_own(call), **_fp8(call), "cudnn": cudnn(additive if "window" in case.words else None)}
    if is_short:
        found["hf-eager"] = Implementation(partial(hf_eager, attn_mask=additive))
    if "window" in case.words:
        return found
    return {**found, "sdpa-flash": sdpa_flash(), **({} if "half" in case.words else fa3_prefill())}


def _fp8(call: AttentionCall) -> Implementations:
    """Ours on 8 bit floats, what makes them included, where it runs."""
    name = our_name(call._replace(prefill_dtype="fp8"))
    if name == our_name(call):
        return {}
    return {name: Implementation(ours, lambda call: call._replace(prefill_dtype="fp8"))}


def _decode(case: Case, call: AttentionCall) -> Implementations:
    found = {**_own(call), "cudnn": cudnn(), "sdpa-flash": sdpa_flash(), **fa3()}
    if case.head_dim <= 128:
        found |= flashinfer()
    if sum(case.lengths) * case.num_kv_heads * 4 * case.head_dim <= EAGER_BYTES:
        found["hf-eager"] = Implementation(hf_eager)
    return found


def _append(case: Case, call: AttentionCall) -> Implementations:
    # torch's is_causal counts from the upper left: cuDNN gets the mask as a tensor, FlashAttention-2 takes none
    return {**_own(call), "cudnn": cudnn(additive_mask(call) if case.rows > 1 else None), **fa3(), **flashinfer()}


def _in_pages(implementations: Implementations, page_size: int) -> Implementations:
    """The same, on pages: the cache is dealt out before the implementation prepares it."""

    def prepare(prepare_pages: Callable[[AttentionCall], Any], call: AttentionCall) -> Any:
        return prepare_pages(paged(call, page_size))

    return {name: Implementation(one.run, partial(prepare, one.prepare)) for name, one in implementations.items()}


def _paged(case: Case, call: AttentionCall) -> Implementations:
    page_size = case.words.get("page", 16)
    pages = {our_name(paged(call, page_size)): Implementation(ours), **flashinfer()}
    return {**_in_pages(pages, page_size), **_own(call)}


def _ragged(case: Case, call: AttentionCall) -> Implementations:
    return {**_own(call), **fa3(), **_paged(case, call)}


def _static(case: Case, call: AttentionCall) -> Implementations:
    """The cache of S keys, and beside it one of only the keys that are visible."""

    def cut(call: AttentionCall) -> AttentionCall:
        stop, length = case.words.get("holds") or case.seqlen, case.lengths[0]
        k, v = (x[:, :, stop - length : stop].transpose(1, 2).contiguous().transpose(1, 2) for x in (call.k, call.v))
        return call._replace(k=k, v=v, window_left=None, q_offset=torch.tensor(length - 1, device=DEVICE))

    own = our_name(call)
    on_cut = {f"{own}+cut": Implementation(ours, cut), "cudnn+cut": cudnn()._replace(prepare=cut)}
    return {**_own(call), **on_cut, **(fa3() if "holds" in case.words else {})}


def _quantised(case: Case, call: AttentionCall) -> Implementations:
    found = _own(call)
    for dtype, short in ((torch.float8_e4m3fn, "fp8"), (torch.int8, "int8")):
        for per in ("token", "head"):
            form = partial(quantised, dtype=dtype, per=per)
            found[f"{our_name(form(call))}+{short} per {per}"] = Implementation(ours, form)
    for groups in (1, 2, 4):
        size = call.head_dim // groups
        form = partial(integers, groups=groups, groups_v=groups, dtype=torch.float16)
        found[f"{our_name(form(call))}+int4 groups of {size}"] = Implementation(ours, form)
    return found


def _tbq4(case: Case, call: AttentionCall) -> Implementations:
    """Errors of ours on codes are against attention over what they decode to."""
    return {
        **_own(call),
        "cudnn": cudnn(additive_mask(call) if case.rows > 1 else None),
        f"{our_name(codes(call))}+codes": Implementation(ours, codes),
        f"{our_name(call)}+decoded first": Implementation(
            lambda form: ours(dense(form)), lambda call: DecodedFirst._make(codes(call))
        ),
    }


def _invariant(case: Case, call: AttentionCall) -> Implementations:
    found = _own(call)
    found[f"{our_name(call)}+batch_invariant"] = Implementation(ours, lambda call: call._replace(batch_invariant=True))
    if case.batch == 1:
        found[f"{our_name(call)}+over queries only"] = Implementation(_one_split)
    return found


def _one_split(call: AttentionCall) -> Tensor:
    from attnpatch.kernels.decode.launch import decode

    return decode(call, num_splits=1)


IMPLEMENTATIONS: dict[str, Callable[[Case, AttentionCall], Implementations]] = {
    "prefill": _prefill,
    "decode": _decode,
    "append": _append,
    "paged": _paged,
    "ragged": _ragged,
    "static": _static,
    "quantised": _quantised,
    "tbq4": _tbq4,
    "invariant": _invariant,
}
"""What each suite compares. Ours on the dense cache as it is comes first, but for ``paged``."""
