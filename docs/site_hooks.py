"""MkDocs hooks: pages that are made from the README, the contributor's guide and the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import reference  # noqa: E402


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages. Nothing is written into docs/."""
    pages = {
        "index.md": at_root("README.md"),
        "contributing.md": at_root("CONTRIBUTING.md"),
        "reference/commands.md": reference.commands(),
        "reference/settings.md": reference.settings(),
        "reference/python.md": reference.python(),
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def at_root(name: str) -> str:
    """Return a page of the repository's root, with its links as seen from docs/."""
    text = (DOCS.parent / name).read_text(encoding="utf-8")
    text = text.replace("](docs/", "](").replace("](CONTRIBUTING.md)", "](contributing.md)")
    return re.sub(r"\[([^\]]+)\]\(src/[^)]+\)", r"\1", text)  # the site has no source files
