"""A transformers cache whose keys and values live in pages of one pool.

Pages are allocated by the host before a forward, never inside a graph: a compiled forward sees pools, a block table
and a length, all of them tensors, and compiles again only when the table's width changes, which doubles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from attnpatch.caches.forward import FIRST_CAPACITY, decoder_config, inputs_of, takes_padded_keys, with_padded_mask
from attnpatch.caches.pages import PageAllocator, PageTable
from attnpatch.ops import cache_write

OnFull = Callable[["PagedCache", int], bool]

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Windows and chunks are a matter of the mask: their layers keep every token."""


class _Sequences:
    """The batch that a cache holds, on the host (``table``) and on the device (``block_table``, ``length``).

    Args:
        table: pages of each sequence.
        pools: every pool that the pages index.
    """

    def __init__(self, table: PageTable, pools: Sequence[Tensor]) -> None:
        self.table, self.pools = table, pools
        self.reserved = 0
        """New tokens that the forward in progress has pages for."""
        self.hooked = False
        """Whether the caller of the model prepared this forward and will end it (see before_forward)."""
        self.padded = False
        """Whether this forward gets the block table's full width, so that its graphs serve any length."""
        self._uploaded = -1
        with torch.inference_mode(False):  # tensors that live longer than one call are never of an inference mode
            self.block_table = torch.zeros(0, 0, dtype=torch.int32, device=pools[0].device)
            self.length = torch.zeros((), dtype=torch.int64, device=pools[0].device)

    def capacity(self) -> int:
        """Keys per sequence that the block table has room for."""
        return self.block_table.shape[1] * self.table.page_size

    def reserve(self, batch: int, new: int) -> None:
        """Pages for ``new`` more tokens; the device learns of them. What :meth:`PageTable.reserve` raises."""
        copies = self.table.reserve(batch, new)
        self.reserved = new
        with torch.no_grad(), torch.inference_mode(False):
            if copies:
                self._copy_pages(copies)
            if self._uploaded != self.table.version:
                self._upload(self.table.blocks(self.table.length + new))
            self.length.fill_(self.table.length)

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        pages, new = torch.tensor(copies, device=self.length.device).unbind(1)
        for pool in self.pools:
            pool.index_copy_(0, new, pool.index_select(0, pages))

    def _upload(self, blocks: int) -> None:
        first = self.table.blocks(FIRST_CAPACITY)
        width = min(max(first, 1 << (blocks - 1).bit_length()), self.table.allocator.num_pages)
        rows = torch.tensor([row + [0] * (width - len(row)) for row in self.table.rows], dtype=torch.int32)
        if rows.shape == self.block_table.shape:  # in place: a recorded CUDA graph keeps its address
            self.block_table.copy_(rows)
        else:
            self.block_table = rows.to(self.block_table.device)
        self._uploaded = self.table.version

    def commit(self) -> None:
        """Count the reserved tokens as stored."""
        self.table.advance(self.reserved)
        self.reserved = 0


class PagedLayer(CacheLayerMixin):
    """One layer's pools of keys and values: ``[num_pages, num_kv_heads, page_size, head_dim]``."""

    is_croppable = True
    is_sliding = False

    def __init__(self, sequences: _Sequences, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.sequences, self.keys, self.values, self.is_initialized = sequences, keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the pools exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write to the reserved pages; see :meth:`PagedCache.update`."""
        sequences = self.sequences
        _check_fits(key_states, self.keys)
        _check_fits(value_states, self.values)
        cache_write(self.keys, self.values, key_states, value_states, sequences.length, sequences.block_table)
        keys, values = (self._gathered(pool, key_states.shape[2]) for pool in (self.keys, self.values))
        return _as_made_of(key_states, keys, sequences.length), _as_made_of(value_states, values, sequences.length)

    def _gathered(self, pool: Tensor, new: int) -> Tensor:
        """What is stored with ``new`` tokens more, or the block table's full width."""
        sequences = self.sequences
        if sequences.padded:
            return _gathered(pool, sequences.block_table)
        length = sequences.table.length + new
        return _gathered(pool, sequences.block_table[:, : sequences.table.blocks(length)])[:, :, :length]

    def get_seq_length(self) -> Any:
        """Tokens stored: an int, or a tensor where graphs serve any length."""
        return self.sequences.length if self.sequences.padded else self.sequences.table.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width of what :meth:`update` will return, and the position of its first key."""
        if self.sequences.padded:
            return self.sequences.capacity(), 0
        return self.sequences.table.length + query_length, 0

    def get_max_length(self) -> int:
        """Tokens of one sequence that has the pool to itself."""
        return self.keys.shape[0] * self.keys.shape[2]


def _check_fits(states: Tensor, pool: Tensor) -> None:
    if (states.shape[1], states.shape[3], states.dtype, states.device) != (
        pool.shape[1],
        pool.shape[3],
        pool.dtype,
        pool.device,
    ):
        raise ValueError(
            f"a layer caches {states.shape[1]} heads of {states.shape[3]}, {states.dtype} on {states.device}; this "
            f"PagedCache's pages hold {pool.shape[1]} heads of {pool.shape[3]}, {pool.dtype} on {pool.device}. "
            "dtype= and device= choose the latter; the heads are the config's, and other models are not supported"
        )


def _gathered(pool: Tensor, block_table: Tensor) -> Tensor:
    """Pages as one run of keys: ``[batch, num_kv_heads, blocks * page_size, head_dim]``."""
    batch, blocks = block_table.shape
    _, num_kv_heads, page_size, head_dim = pool.shape
    pages = pool.index_select(0, block_table.flatten()).unflatten(0, (batch, blocks))
    return pages.permute(0, 2, 1, 3, 4).reshape(batch, num_kv_heads, blocks * page_size, head_dim)


def _as_made_of(new: Tensor, stored: Tensor, first: Tensor) -> Tensor:
    """``stored``, which holds ``new`` from position ``first`` on, so that gradients reach ``new``: pages pass none."""
    if not (torch.is_grad_enabled() and new.requires_grad):
        return stored
    return stored.index_copy(2, first + torch.arange(new.shape[2], device=new.device), new)


class PagedCache(Cache):
    """Keys and values in pages that are allocated as sequences grow, and shared where sequences begin alike.

    Use it like transformers' own caches: ``model.generate(**inputs, past_key_values=cache)``. A patched model's kernels
    read the pages where they lie; other models get them gathered. Compiled by other means than
    :func:`attnpatch.patch`, a forward breaks its graph wherever pages are allocated. Gradients reach the tokens of the
    same forward, not those stored before.

    Args:
        config: the model's ``config``, of a decoder whose layers all attend.
        num_pages: pages of the pool, for all sequences together.
        page_size: tokens per page.
        device: of the pools; None = torch's default.
        dtype: of the pools; None = the config's.
        on_full: called as ``on_full(cache, missing)`` when the pool lacks ``missing`` pages. It may make room, for
            instance by ``reset()`` of other caches of the pool, and returns whether to try again.

    Raises:
        ValueError: ``num_pages`` or ``page_size`` is below 1, or the model has layers that do not attend, or keeps
            its keys in another form.
    """

    def __init__(
        self,
        config: Any,
        num_pages: int,
        page_size: int = 16,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        on_full: OnFull | None = None,
    ) -> None:
        table = PageTable(PageAllocator(num_pages), page_size)
        num_layers, num_kv_heads, head_dim = _dimensions(config)
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        dtype = dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
        if isinstance(dtype, str):  # what save_pretrained makes of a config's
            dtype = getattr(torch, dtype)
        with torch.inference_mode(False):  # zeros: what no row may see is still multiplied by 0 where nothing is fused
            pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * num_layers)]
        self._hold(table, pools, on_full)

    def _hold(self, table: PageTable, pools: Sequence[Tensor], on_full: OnFull | None) -> None:
        self.sequences, self.on_full = _Sequences(table, pools), on_full
        pairs = zip(pools[::2], pools[1::2], strict=True)
        super().__init__(layers=[PagedLayer(self.sequences, keys, values) for keys, values in pairs])

    @property
    def block_table(self) -> Tensor:
        """int32 ``[batch, num_blocks]``: the pages of each sequence, as of the last forward."""
        return self.sequences.block_table

    @property
    def free_pages(self) -> int:
        """Pages of the pool that no sequence uses."""
        return self.sequences.table.allocator.free

    @property
    def batch_size(self) -> int:
        """Sequences held; -1 if none is."""
        return len(self.sequences.table.rows) or -1

    def before_forward(self, model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Allocate pages for a forward of the model, and fit its mask to what :meth:`update` will return.

        Args:
            model: a model that transformers does not run on a static cache gets keys of their true length, and so a
                graph that depends on it; so does one that returns its attention weights.
            arguments: of the model's forward, by name.

        Returns:
            The arguments to call the model with.

        Raises:
            attnpatch.caches.pages.OutOfPages: the pool is full; nothing was changed.
            ValueError: the cache holds another number of sequences, or ``arguments`` name no input.
        """
        inputs = inputs_of(arguments, "PagedCache")
        batch, new = inputs.shape[:2]
        self._reserve(batch, new)
        padded, length = takes_padded_keys(model, arguments), self.sequences.table.length + new
        if padded:
            arguments = with_padded_mask(arguments, inputs, length, self.sequences.capacity())
        self.sequences.hooked, self.sequences.padded = True, padded
        return arguments

    def after_forward(self, stored: bool) -> None:
        """End what :meth:`before_forward` began; ``stored`` says whether the model ran to its end."""
        self.sequences.hooked = self.sequences.padded = False
        if stored:
            self._commit()
        else:
            self.sequences.table.crop(self.get_seq_length())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, and return those of the whole sequence.

        Args:
            key_states: ``[batch, num_kv_heads, new, head_dim]``.
            value_states: likewise.
            layer_idx: which layer; a forward visits layer 0 first and the last one last.
            *args: ignored, like what other caches take.
            **kwargs: likewise.

        Returns:
            Keys and values ``[batch, num_kv_heads, length, head_dim]``. In a patched model they have the block table's
            full width, and the mask hides what is not stored.

        Raises:
            attnpatch.caches.pages.OutOfPages: the pool is full; nothing was changed.
            ValueError: heads, dtype, device or batch are not the cache's.
        """
        sequences, (batch, _, new, _) = self.sequences, key_states.shape
        alone = not sequences.hooked
        if new != sequences.reserved or (alone and layer_idx == 0):
            self._reserve(batch, new)
        keys, values = self.layers[layer_idx].update(key_states, value_states)
        if alone and layer_idx == len(self.layers) - 1:
            self._commit()
        return keys, values

    @torch.compiler.disable(reason="a PagedCache allocates pages outside of graphs: use attnpatch.patch(model)")
    def _reserve(self, batch: int, new: int) -> None:
        table, free = self.sequences.table, self.free_pages
        missing = table.needed(batch, new) - free
        while missing > 0 and self.on_full and self.on_full(self, missing):
            before, missing = missing, table.needed(batch, new) - self.free_pages
            if missing >= before:  # nothing was freed: asking again would not end
                break
        self.sequences.reserve(batch, new)

    @torch.compiler.disable(reason="a PagedCache counts its tokens outside of graphs: use attnpatch.patch(model)")
    def _commit(self) -> None:
        self.sequences.commit()

    def fork(self, rows: Sequence[int] | None = None) -> PagedCache:
        """A cache of its own that begins with the tokens of these rows and shares their pages.

        A shared page is copied when one of its users comes to write to it. The pages go back to the pool with
        ``reset()``, or when the fork is deleted.

        Args:
            rows: sequences to take over, which may repeat; None = all, empty = an empty cache of the same pool.

        Raises:
            IndexError: no such row.
        """
        table = self.sequences.table
        child = object.__new__(type(self))
        forked = table.fork(range(len(table.rows)) if rows is None else rows)
        child._hold(forked, self.sequences.pools, self.on_full)
        return child

    def reset(self) -> None:
        """Forget all tokens; their pages go back to the pool."""
        self.sequences.table.crop(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: ``-n`` removes n, as transformers defines it; n keeps the first n."""
        count = int(tokens_to_remove)
        length = self.sequences.table.length
        if count:
            self.sequences.table.crop(count if count > 0 else max(length + count, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` becomes a fork of row ``beam_idx[i]``."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes ``repeats`` forks of itself, one after the other."""
        self.sequences.table.select([row for row in range(max(self.batch_size, 0)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep forks of these rows: ids, which may repeat, or a bool per row."""
        self.sequences.table.select(torch.arange(max(self.batch_size, 0))[indices.cpu()].tolist())


def _dimensions(config: Any) -> tuple[int, int, int]:
    """Layers that cache, their K/V heads, head_dim."""
    config = decoder_config(config, "PagedCache")
    layer_types, _ = get_layer_types_and_kwargs(config)
    others = sorted(set(layer_types) - set(LAYER_TYPES))
    if others:
        raise ValueError(f"PagedCache holds attention layers; {config.model_type} has {', '.join(others)}")
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return len(layer_types), num_kv_heads, head_dim
