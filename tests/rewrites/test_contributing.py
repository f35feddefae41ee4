"""The worked example of CONTRIBUTING: it does what it says, in fewer than 30 lines."""

import re
from pathlib import Path

import torch

from attnpatch.rewrites import kv_repeat, operands
from attnpatch.testing.recording import check_rewrite
from tests.rewrites.test_kv_repeat import eager

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_new_spelling_works_once_it_is_in_the_table(monkeypatch):
    code, test = re.findall(r"```python\n(.*?)```", GUIDE.read_text().split("## Add a spelling")[1], re.DOTALL)
    assert code.count("\n") + test.count("\n") < 30
    names = {**vars(kv_repeat), "torch": torch, "check_rewrite": check_rewrite, "eager": eager}
    exec(compile(code + test, str(GUIDE), "exec"), names)
    monkeypatch.setattr(operands, "REPEATS", (*kv_repeat.REPEATS, names["_tile"]))
    names["test_tile"]()
