"""attnpatch finds attention in PyTorch graphs, puts fused kernels there, and says which kernel runs where and why.

model = attnpatch.patch(model)                  # in place; attnpatch.unpatch(model) takes it off
model.compile(backend="attnpatch")              # the same engine as a torch.compile backend
gm, report = attnpatch.rewrite(gm, inputs)      # the pass alone
print(attnpatch.report(model))
"""

from attnpatch.errors import AttentionNotPatched, NoBackend
from attnpatch.ops import attention
from attnpatch.patching import patch, patched, report, unpatch
from attnpatch.reporting import Report, SiteReport
from attnpatch.rewriting import rewrite

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
