"""The rows of the compatibility page whose packages are small, and the page itself."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("compatibility")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def context(script, tmp_path_factory) -> Iterator[dict[str, Any]]:
    with script.prepared(tmp_path_factory.mktemp("compatibility")) as context:
        yield context


def test_software_of_others_works_unchanged(script, context):
    """One test: each row takes a moment, but training and serving for it take seconds."""
    small = [name for name, row in script.ROWS.items() if row.small]
    results = script.in_process(small, context, sys.executable)
    failed = {name: result for name, result in results.items() if result["status"] == "fails"}
    assert failed == {}
    assert sum(result["status"] == "works" for result in results.values()) >= 12


def test_the_page_is_what_the_script_writes_of_its_results(script):
    results = json.loads(script.RESULTS.read_text())
    assert script.PAGE.read_text() == script.page(results)
    assert set(results) <= set(script.ROWS)
    assert sum(result["status"] == "works" for result in results.values()) >= 25
    assert [name for name, result in results.items() if result["status"] == "fails"] == []
