"""The documentation names files, settings, public names and pages that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import groupwise
from groupwise.config import Config
from groupwise.records import Rollout

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/groupwise"
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}
SECTIONS = {section.name: section for section in fields(Config)}
FOREIGN = {"docs/migrating.md"}
"""Pages that name files of other projects."""
MADE = {"config.yaml", "train.yaml", "capitals.py", "even.py", "music.py"}
"""Files that users or runs make."""
every_page = pytest.mark.parametrize("page", PAGES)


def quoted(text: str) -> Iterator[str]:
    """Yield what stands between single backquotes, code blocks left out."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("page", sorted(PAGES.keys() - FOREIGN))
def test_paths_to_code_exist(page: str) -> None:
    paths = [word for word in quoted(PAGES[page]) if re.fullmatch(r"[\w./-]+\.(py|ya?ml|toml)", word)]
    names = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    places = (SOURCE, ROOT, ROOT / "benchmarks", ROOT / "configs/accelerate")
    missing = [
        path
        for path in paths
        if not any((place / path).exists() for place in places)
        and not ("/" not in path and path in names | MADE)
    ]
    assert missing == []


@every_page
def test_settings_exist(page: str) -> None:
    config = Config()
    unknown = []
    words = " ".join(quoted(PAGES[page]))
    for section, key in re.findall(r"(?<![\w./-])([a-z_]+)\.([a-z_0-9]+)(?![\w(/.-])", words):
        if section in SECTIONS and key not in {"py", "md", "json", "yaml"}:
            known = {field.name for field in fields(getattr(config, section))}
            known |= set(dir(Rollout)) if section == "rollout" else set()  # a reward's argument
            if key not in known:
                unknown.append(f"{section}.{key}")
    assert unknown == []


@every_page
def test_public_names_exist(page: str) -> None:
    names = set(re.findall(r"\bgw\.([A-Za-z_]+)", PAGES[page]))
    assert sorted(name for name in names if not hasattr(groupwise, name)) == []


@every_page
def test_links_lead_somewhere(page: str) -> None:
    here = (ROOT / page).parent
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        target, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        path = here / target if target else ROOT / page
        if not path.exists() and "reference/" not in target:
            broken.append(link)
        elif anchor and path.suffix == ".md" and path.exists():
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            if anchor not in {slug(title) for title in titles}:
                broken.append(link)
    assert broken == []


def slug(title: str) -> str:
    """Return a heading's anchor, as GitHub and MkDocs make it."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
