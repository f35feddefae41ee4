"""Layers of a cache in 4 bits, 8 bits or none of these: buffers of one capacity, and the tokens that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from attnpatch.attention_call import MAX_APPEND
from attnpatch.caches.forward import FIRST_CAPACITY
from attnpatch.ops import cache_write
from attnpatch.recent import FIRST, rows_for, with_recent
from attnpatch.tbq4 import blocks_of, decode


class Format(NamedTuple):
    """How one of K and V is kept.

    Args:
        empty: of states ``[batch, num_kv_heads, new, head_dim]`` and a capacity, makes zeroed codes
            ``[batch, num_kv_heads, capacity, ..]`` and their scale, or None where there is none.
        read: of codes, scale, head_dim and a dtype, makes ``[batch, num_kv_heads, capacity, head_dim]``.
    """

    empty: Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
    read: Callable[[Tensor, Any, int, torch.dtype], Tensor]


_PLANAR = (0, 1, 3, 2)
"""Order of the dimensions of norms in memory: those of one block side by side, so that kernels load them at once."""


def _laid_as(like: Tensor, x: Tensor) -> Tensor:
    """``x`` with the dimensions in memory in the order of ``like``'s, which has as many."""
    is_planar = like.dim() == 4 and like.stride(2) < like.stride(3)
    return x.transpose(2, 3).contiguous().transpose(2, 3) if is_planar else x


def _zeros(states: Tensor, capacity: int, *last: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*states.shape[:2], capacity, *last, dtype=dtype, device=states.device)


def _empty_tbq4(states: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    codes = _zeros(states, capacity, states.shape[3] // 2, dtype=torch.uint8)
    num_blocks = len(blocks_of(states.shape[3]))
    if num_blocks == 1:  # either order; the plain one has no stride that grows with the capacity
        return codes, _zeros(states, capacity, 1, dtype=torch.float16)
    shape = (*states.shape[:2], capacity, num_blocks)
    return codes, torch.empty_permuted(shape, _PLANAR, dtype=torch.float16, device=states.device).zero_()


def _empty_int8(states: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    codes = _zeros(states, capacity, states.shape[3], dtype=torch.int8)
    return codes, _zeros(states, capacity, dtype=torch.float32)


FORMATS = {
    "tbq4": Format(_empty_tbq4, decode),
    "int8": Format(_empty_int8, lambda codes, scale, _, dtype: (codes.float() * scale[..., None]).to(dtype)),
    "dense": Format(lambda x, capacity: (_zeros(x, capacity, x.shape[3], dtype=x.dtype), None), lambda x, *_: x),
}
BUFFERS = ("key_buffer", "value_buffer", "key_scale", "value_scale")
"""What holds a layer's tokens, and grows."""
RINGS = ("key_ring", "value_ring")
KEYS, VALUES = ("tbq4", "int8", "dense"), ("tbq4", "dense")


MOST_ROOM = 2
"""Times the room that a first forward would make, up to which it takes the room that there is."""


@contextmanager
def lasting() -> Iterator[None]:
    """For tensors that live longer than one call: without a gradient, and never of an inference mode around it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Tokens:
    """What all layers of a cache share: how much it holds, and the forward in progress.

    Args:
        limit: tokens that buffers are made for at once, and that are never exceeded; None = they grow.
        recent: how many of the last tokens layers also keep as they were, beside codes; 0 = none.
    """

    def __init__(self, limit: int | None, recent: int = 0) -> None:
        self.limit, self.recent = limit, recent
        self.capacity = self.first_capacity = limit or FIRST_CAPACITY
        self.length = self.new = 0
        self.hooked = False
        """Whether the caller of the model began this forward and will end it (see before_forward)."""
        self.written: int | None = None
        """Tokens that layers stored in this forward; None = not yet any."""
        self.padded = False
        """Whether this forward reads buffers up to their capacity, so that its graphs serve any length."""
        self.first = True
        """Whether nothing is stored before this forward."""
        self.held = 0
        """First position of those that rings hold, behind the first tokens; up to the last one ever stored."""
        with lasting():
            self.position = torch.zeros((), dtype=torch.int64)
            """``length`` on the device."""

    def begin(self, new: int, device: torch.device) -> None:
        """Room for ``new`` tokens more, on paper: the layers' buffers follow ``capacity``."""
        needed = self.length + new
        if self.limit is not None and needed > self.limit:
            raise ValueError(
                f"the cache holds {self.length} tokens and was given {new} more; max_cache_len is {self.limit}. "
                "Make it larger, or None, which lets the cache grow"
            )
        self.new, self.first, self.written = new, self.length == 0, None
        self.held = max(0 if self.first else self.held, needed - self.recent - MAX_APPEND)
        room = self.limit or _room(needed, self.first_capacity)
        if needed > self.capacity or (self.first and not room <= self.capacity <= MOST_ROOM * room):
            self.capacity = room
        if self.position.device != device:
            with lasting():
                self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.position.fill_(self.length)

    def lost(self) -> range:
        """Positions of the window that rings no longer hold, as tokens were taken back; they do from now on."""
        begin = max(self.length - self.recent + 1, FIRST)
        lost = range(begin, min(self.held, self.length) if self.recent else 0)
        self.held = min(self.held, begin)
        return lost


def _room(needed: int, first: int) -> int:
    """Tokens to make room for: twice as many as needed while they are few, later an eighth more, in whole ``first``."""
    if needed <= first:
        return first
    wanted = needed + max(needed // 8, min(needed, 2 * first))
    return -(-wanted // first) * first


class BufferedLayer(CacheLayerMixin):
    """One layer's buffers.

    Args:
        index: of the layer, for messages.
        tokens: what the cache's layers share.
        keys: name of the format of K.
        values: likewise of V.
        centre_keys: whether K is kept as its difference to its mean over the tokens of the first forward.
    """

    is_croppable = True
    is_sliding = False
    key_buffer: Any  # tensors, or None in an empty cache
    value_buffer: Any
    key_scale: Tensor | None
    value_scale: Tensor | None
    centre: Tensor | None
    key_ring: Any  # tensors, or None without recent tokens
    value_ring: Any

    def __init__(self, index: int, tokens: Tokens, keys: str, values: str, centre_keys: bool) -> None:
        super().__init__()
        self.index, self.tokens, self.formats, self.centre_keys = index, tokens, (keys, values), centre_keys
        self.reset()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make empty buffers of the cache's capacity for states like these.

        Raises:
            ValueError: a head_dim that TBQ4 cannot cut into blocks.
        """
        for name, states in zip(self.formats, (key_states, value_states), strict=True):
            if name == "tbq4" and states.shape[3] % 8:
                raise ValueError(
                    f"layer {self.index} has heads of {states.shape[3]} channels; TBQ4 keeps multiples of 8. "
                    f"Keep the layer dense: TBQ4Cache(model, skip_layers=({self.index},))"
                )
        with torch.inference_mode(False):  # tensors that live longer than one call are never of an inference mode
            self._make_buffers(key_states, value_states)
            self.centre = key_states.detach().mean(dim=2, keepdim=True) if self.centre_keys else None
            if self.tokens.recent and self.formats != ("dense", "dense"):
                self.key_ring, self.value_ring = (
                    _zeros(x, rows_for(self.tokens.recent), x.shape[3], dtype=x.dtype)
                    for x in (key_states, value_states)
                )
        self.dtype, self.head_dims = key_states.dtype, (key_states.shape[3], value_states.shape[3])
        self.device, self.is_initialized = key_states.device, True

    def _make_buffers(self, key_states: Tensor, value_states: Tensor) -> None:
        """Zeroed ones: those of :meth:`renew`, if they are for such states."""
        if self._are_for(key_states, value_states):
            for name in BUFFERS:
                x = getattr(self, name)
                if x is not None:
                    x.zero_()
            return
        capacity = self.tokens.capacity
        self.key_buffer, self.key_scale = FORMATS[self.formats[0]].empty(key_states, capacity)
        self.value_buffer, self.value_scale = FORMATS[self.formats[1]].empty(value_states, capacity)

    def _are_for(self, key_states: Tensor, value_states: Tensor) -> bool:
        if self.key_buffer is None:
            return False
        wanted = (*key_states.shape[:2], self.tokens.capacity), key_states.device, key_states.dtype
        found = tuple(self.key_buffer.shape[:3]), self.key_buffer.device, self.dtype
        return found == wanted and self.head_dims == (key_states.shape[3], value_states.shape[3])

    @property
    def keys(self) -> Tensor | None:
        """K of the tokens stored, ``[batch, num_kv_heads, length, head_dim]``; None in an empty cache.

        A view, which may be written to; multiplied out, and so a copy, where they are kept in 4 or 8 bits.
        """
        return self._stored(0)

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._overwrite(0, states)

    @property
    def values(self) -> Tensor | None:
        """V of the tokens stored, ``[batch, num_kv_heads, length, head_dim_v]``, like :attr:`keys`."""
        return self._stored(1)

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._overwrite(1, states)

    def _stored(self, which: int) -> Tensor | None:
        if not self.is_initialized:
            return None
        length, ring = self.tokens.length, self.key_ring
        position = None if ring is None else torch.tensor(length, device=ring.device)
        return self._read(which, slice(length), position, 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write to the buffers, which have room; see :meth:`attnpatch.BufferedCache.update`."""
        tokens = self.tokens
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        position = tokens.position
        if position.device != key_states.device:
            position = position.to(key_states.device)
        centred = key_states if self.centre is None else key_states - self.centre
        cache_write(
            *(self.key_buffer, self.value_buffer, centred, value_states, position, None),
            *(self.key_scale, self.value_scale),
        )
        new = tokens.written = key_states.shape[2]
        if tokens.first:
            self._keep(centred, value_states, position)
            return key_states, value_states
        end = None if tokens.padded else tokens.length + new
        if new <= MAX_APPEND:
            self._keep(centred, value_states, position)
            keys, values = (self._read(which, slice(end), position, new) for which in (0, 1))
        else:  # more tokens than a ring has room for beside the window: they come after it is read
            keys, values = (self._read(which, slice(end), position, 0) for which in (0, 1))
            self._keep(centred, value_states, position)
        return self._attended(0, keys, key_states, position), self._attended(1, values, value_states, position)

    def _keep(self, centred: Tensor, value_states: Tensor, position: Tensor) -> None:
        """Keep tokens as they are, K less its mean, from ``position`` on."""
        if self.key_ring is not None:
            cache_write(self.key_ring, self.value_ring, centred, value_states, position, ring_from=FIRST)

    def _read(self, which: int, tokens: slice, position: Any, new: int) -> Tensor:
        """K (0) or V (1), multiplied out, as a forward of ``new`` tokens from ``position`` on reads it."""
        states, ring = self._decoded(which, tokens), (self.key_ring, self.value_ring)[which]
        if ring is not None and self.formats[which] != "dense":
            states = with_recent(states, ring, position, new)
        return states if which or self.centre is None else states + self.centre

    def _decoded(self, which: int, tokens: slice) -> Tensor:
        """What codes of these tokens stand for, K less its mean."""
        codes, scale = ((self.key_buffer, self.key_scale), (self.value_buffer, self.value_scale))[which]
        if tokens.stop is not None:
            codes, scale = codes[:, :, tokens], None if scale is None else scale[:, :, tokens]
        return FORMATS[self.formats[which]].read(codes, scale, self.head_dims[which], self.dtype)

    def refill(self, lost: range) -> None:
        """Let rings hold these tokens as their codes stand for them."""
        if self.key_ring is not None and lost:
            keys, values = (self._decoded(which, slice(lost.start, lost.stop)) for which in (0, 1))
            self._keep(keys, values, torch.tensor(lost.start, device=self.key_ring.device))

    def _attended(self, which: int, stored: Tensor, new: Tensor, first: Tensor) -> Tensor:
        """What is stored, with ``new`` as it was where it is many tokens, and where gradients must reach it.

        Few tokens are read as they are stored, so that a result does not depend on how tokens were grouped.
        """
        rounded = self.formats[which] != "dense" and new.shape[2] > MAX_APPEND
        if rounded or (torch.is_grad_enabled() and new.requires_grad):
            return stored.index_copy(2, first + torch.arange(new.shape[2], device=new.device), new)
        return stored

    def _overwrite(self, which: int, states: Tensor | None) -> None:
        if states is None:  # transformers' constructor
            return
        stored = (self.keys, self.values)[which]
        if stored is None or self.formats[which] != "dense" or states.shape != stored.shape:
            raise ValueError(
                f"layer {self.index} keeps {'KV'[which]} in a buffer: what is assigned must have the shape of what is "
                f"stored, {stored is not None and list(stored.shape)}, and be kept as it is; got {list(states.shape)}. "
                "Shorten a cache with crop(-n), or give the model a DynamicCache that holds what you want"
            )
        stored.copy_(states)

    def get_seq_length(self) -> Any:
        """Tokens stored: an int, or a tensor where graphs serve any length."""
        return self.tokens.position if self.tokens.padded else self.tokens.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width of what :meth:`update` will return, and the position of its first key."""
        if self.tokens.padded:
            return self.key_buffer.shape[2], 0
        return self.tokens.length + query_length, 0

    def get_max_length(self) -> int:
        """``max_cache_len``; -1 without one."""
        return self.tokens.limit or -1

    def reset(self) -> None:
        """Let go of the buffers."""
        self.key_buffer = self.value_buffer = self.key_scale = self.value_scale = self.centre = None
        self.key_ring = self.value_ring = None
        self.is_initialized = False

    def renew(self, batch: int, capacity: int) -> None:
        """Forget the tokens, and keep buffers that are as large: steps captured on them go on being replayed."""
        fits = self.key_buffer is not None and self.key_buffer.shape[::2][:2] == (batch, capacity)
        if not fits or self.key_ring is not None:
            self.reset()
        self.is_initialized = False

    def inherit(self, other: BufferedLayer) -> None:
        """Take the buffers of a layer of a cache that is gone."""
        for name in (*BUFFERS, "dtype", "head_dims"):
            setattr(self, name, getattr(other, name))

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing: the cache counts tokens for all layers."""

    def offload(self) -> None:
        """Move to the CPU."""
        self.to("cpu")

    def prefetch(self) -> None:
        """Move back to the device of the states."""
        self.to(self.device)

    def to(self, device: torch.device | str) -> None:
        """Move to a device."""
        with lasting():
            for name, x in self._tensors():
                setattr(self, name, x.to(device, non_blocking=True))

    def grow(self, capacity: int) -> None:
        """Move to buffers of ``capacity``, unless these are as large."""
        if not self.is_initialized or self.key_buffer.shape[2] >= capacity:
            return  # asked at every step
        for name, x in self._tensors():
            if name in BUFFERS and x.shape[2] < capacity:
                grown = _laid_as(x, x.new_zeros(*x.shape[:2], capacity, *x.shape[3:]))
                grown[:, :, : x.shape[2]] = x
                setattr(self, name, grown)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of what the layer stores."""
        return ((name, x) for name, x in list(vars(self).items()) if isinstance(x, Tensor))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows: ids, which may repeat, or a bool per row. As many rows as before stay where they are."""
        with lasting():
            for name, x in self._tensors():
                rows = x[indices.to(x.device)]
                setattr(self, name, x.copy_(rows) if rows.shape == x.shape else _laid_as(x, rows))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` becomes row ``beam_idx[i]``."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes ``repeats`` of itself, one after the other."""
        with lasting():
            for name, x in self._tensors():
                setattr(self, name, _laid_as(x, x.repeat_interleave(repeats, dim=0)))
