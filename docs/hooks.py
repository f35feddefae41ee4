"""What MkDocs does not know of this repository: a page that lies beside docs/, and how docstrings write references."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Module, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """CONTRIBUTING.md becomes a page."""
    files.append(File.generated(config, "contributing.md", content=(ROOT / "CONTRIBUTING.md").read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Pages name it where it lies, so that the link works in the repository, too."""
    return markdown.replace("](../CONTRIBUTING.md", "](contributing.md")


class Docstrings(Extension):
    """:func:`name` in a docstring becomes `name` (roles are Sphinx's), and a default that is a lambda becomes dots."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called with everything that has a docstring, before it is read."""
        if obj.docstring:
            obj.docstring.value = re.sub(r":\w+:(`[^`]+`)", r"\1", obj.docstring.value)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Called when all is read, fields of dataclasses included."""
        for parameter in pkg["options.Options.__init__"].parameters:
            if str(parameter.default).startswith("(lambda"):
                parameter.default = "..."
