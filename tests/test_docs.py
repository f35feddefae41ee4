"""What the guides tell a reader to type exists: commands, arguments, names. `make docs` checks links and pages."""

import argparse
import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnpatch
from attnpatch import cli
from attnpatch.options import OWN_NAMES

ROOT = Path(__file__).resolve().parents[1]
GUIDES = ("docs/index.md", "docs/how-to.md", "docs/report.md", "docs/tbq4.md", "README.md")

pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="not run from a checkout")


def blocks(path: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / path).read_text("utf-8"), re.M | re.S)


def commands() -> list[list[str]]:
    lines = [line for path in GUIDES for block in blocks(path, "bash") for line in block.splitlines()]
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def wrong_calls(code: str) -> Iterator[str]:
    """Names of attnpatch that do not exist, and arguments that what is called does not take."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("attnpatch.") and not found(node):
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("attnpatch.") and found(node.func):
            taken = inspect.signature(found(node.func)).parameters
            allowed = {*taken, *OWN_NAMES} if "options" in taken else set(taken)
            yield from (f"{ast.unparse(node)}: {k.arg}" for k in node.keywords if k.arg and k.arg not in allowed)


def found(node: ast.expr) -> object:
    """What a dotted name means; None where there is no such thing."""
    thing: object = attnpatch
    for name in ast.unparse(node).split(".")[1:]:
        thing = getattr(thing, name, None) or submodule(thing, name)
    return thing


def submodule(module: object, name: str) -> object:
    try:
        return importlib.import_module(f"{getattr(module, '__name__', '?')}.{name}")
    except ImportError:
        return None


@pytest.mark.parametrize("path", GUIDES)
def test_python_blocks_name_what_exists(path: str):
    pytest.importorskip("transformers")
    code = blocks(path, "python")
    assert code
    assert [wrong for block in code for wrong in wrong_calls(block)] == []


def test_a_wrong_name_or_argument_is_found():
    assert list(wrong_calls("attnpatch.fuse(model)")) == ["attnpatch.fuse"]
    assert list(wrong_calls("attnpatch.tbq4.guess(model)")) == ["attnpatch.tbq4.guess"]
    assert list(wrong_calls("attnpatch.patch(model, strct=True)")) == ["attnpatch.patch(model, strct=True): strct"]


@pytest.mark.parametrize("words", [w for w in commands() if w[0] == "attnpatch"], ids=" ".join)
def test_commands_take_these_arguments(words: list[str], monkeypatch: pytest.MonkeyPatch):
    parsed: list[argparse.Namespace] = []
    module = importlib.import_module(cli._MODULES[words[1]])
    monkeypatch.setattr(module, "run", lambda arguments: parsed.append(arguments) or 0)
    assert cli.main(words[1:]) == 0
    assert parsed


def test_other_commands_are_make_and_pip():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    others = [words for words in commands() if words[0] != "attnpatch"]
    assert others
    assert {words[0] for words in others} <= {"make", "pip"}
    assert {words[1] for words in others if words[0] == "make"} <= set(targets)


def test_api_page_has_every_public_name():
    page = (ROOT / "docs/api.md").read_text("utf-8")
    shown = re.findall(r"^::: attnpatch\.(\S+)$", page, re.M)
    public = {
        *attnpatch.__all__,
        *attnpatch._CACHES,
        *(f"tbq4.{name}" for name in importlib.import_module("attnpatch.tbq4").__all__),
    }
    assert public - set(shown) == set()
    assert len(shown) == len(set(shown))
