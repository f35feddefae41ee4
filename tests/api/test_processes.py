"""The backend by name in fresh processes: found through its entry point, and reported also on a warm compile cache."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json, sys
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return (self.q(x) @ self.k(x).transpose(-1, -2) * 0.3).softmax(-1) @ self.v(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

torch.manual_seed(0)
model, x = Model(), torch.randn(1, 2, 5, 8)
with torch.no_grad():
    expected = model(x)
    assert not any(name.split(".")[0] == "attnpatch" for name in sys.modules)
    options = json.loads(sys.argv[2])
    if sys.argv[1] == "torch.compile":
        compiled = torch.compile(model, backend="attnpatch", options=options)
    else:
        model.compile(backend="attnpatch", options=options)
        compiled = model
    difference = (compiled(x) - expected).abs().max().item()

import attnpatch
from torch._dynamo.utils import counters

report = attnpatch.report(compiled).to_dict()
print(json.dumps({"report": report, "difference": difference, "inductor": dict(counters["inductor"])}))
"""


def run(tmp_path, way, **options):
    """What a fresh process, away from the checkout, prints."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_VEC_ISA_OK": "1"}  # compiles no probes
    environment = {**os.environ, **cache, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), way, json.dumps(options)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(result):
    assert result["difference"] < 1e-5
    sites = result["report"]["sites"]
    assert [(site["module"], site["status"]) for site in sites] == [("layers.0", "fused"), ("layers.1", "fused")]
    assert all(site["dispatches"][0]["calls"] == 1 for site in sites)


def test_backend_is_found_without_importing_attnpatch(tmp_path):
    """By torch.compile too, in the test below."""
    check(run(tmp_path, "model.compile"))


def test_warm_compile_cache_still_reports_every_site(tmp_path):
    """Inductor skips its passes on a cache hit; matching and counting happen before and after it."""
    cold = run(tmp_path, "torch.compile", rest="inductor")
    warm = run(tmp_path, "torch.compile", rest="inductor")
    check(cold)
    check(warm)
    assert cold["inductor"].get("fxgraph_cache_hit", 0) == 0
    assert warm["inductor"]["fxgraph_cache_hit"] == 1
    assert warm["report"] == cold["report"]
