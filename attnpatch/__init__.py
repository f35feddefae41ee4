"""attnpatch finds attention in PyTorch graphs, puts fused kernels there, and says which kernel runs where and why.

model = attnpatch.patch(model)                  # in place; attnpatch.unpatch(model) takes it off
model.compile(backend="attnpatch")              # the same engine as a torch.compile backend
gm, report = attnpatch.rewrite(gm, inputs)      # the pass alone
print(attnpatch.report(model))
attnpatch.patch(model, cache="tbq4")            # keys and values in 4 bits, see attnpatch.TBQ4Cache
cache = attnpatch.PagedCache(model.config, 512)  # for model.generate(..., past_key_values=cache)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnpatch.errors import AttentionNotPatched, NoBackend
from attnpatch.ops import attention
from attnpatch.patching import patch, patched, report, unpatch
from attnpatch.reporting import Report, SiteReport
from attnpatch.rewriting import rewrite

if TYPE_CHECKING:
    from attnpatch.caches.buffered import BufferedCache as BufferedCache
    from attnpatch.caches.paged import PagedCache as PagedCache
    from attnpatch.caches.tbq4 import TBQ4Cache as TBQ4Cache

__version__ = "0.1.0"

__all__ = [
    "AttentionNotPatched",
    "NoBackend",
    "Report",
    "SiteReport",
    "attention",
    "patch",
    "patched",
    "report",
    "rewrite",
    "unpatch",
]


_CACHES = {
    "BufferedCache": "attnpatch.caches.buffered",
    "PagedCache": "attnpatch.caches.paged",
    "TBQ4Cache": "attnpatch.caches.tbq4",
}


def __getattr__(name: str) -> Any:
    """Caches are imported when they are asked for: they need transformers, and ``import attnpatch`` does not."""
    if name not in _CACHES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_CACHES[name]), name)
