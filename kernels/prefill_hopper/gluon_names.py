"""Names of Gluon that changed from Triton 3.6 to 3.9."""

from triton.experimental.gluon.language.nvidia.hopper import tma

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
