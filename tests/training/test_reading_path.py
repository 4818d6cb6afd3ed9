"""How much code one GRPO step passes through: the limits, and the figures in docs/design.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import reading_path
from reading_path import Count

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
LIMITS = {"the algorithm": Count(17, 5000, 2500), "with the CPU engine": Count(30, 8000, 4200)}


@pytest.fixture(scope="module")
def counts() -> dict[str, Count]:
    return reading_path.counts(reading_path.trace_step())


@pytest.mark.parametrize("part", LIMITS)
def test_one_step_can_be_followed_in_few_files(counts, part):
    count, limit = counts[part], LIMITS[part]
    assert (count.files <= limit.files, count.read <= limit.read, count.lines <= limit.lines) == (True,) * 3


@pytest.mark.parametrize("part", LIMITS)
def test_the_design_page_says_how_much_there_is_to_read(counts, part):
    row = re.search(rf"^\| {part} \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", DESIGN.read_text(), re.M)
    assert row is not None
    files, read, lines = (int(figure.replace(",", "")) for figure in row.groups())
    assert files == pytest.approx(counts[part].files, rel=0.1)
    assert read == pytest.approx(counts[part].read, rel=0.1)
    assert lines == pytest.approx(counts[part].lines, rel=0.1)


def test_questions_and_the_code_of_the_task_do_not_count():
    trace = reading_path.Trace()
    for module, lines in (("algo/losses.py", 3), ("training/evaluator.py", 2), ("rewards/extraction.py", 3)):
        trace.lines[module] = set(range(lines))
    assert reading_path.algorithm(trace) == ["algo/losses.py"]
