"""`groupwise verify`: what it prints, line by line, and whether each line is good news."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from groupwise.config.sections import TaskConfig
from groupwise.errors import ConfigError
from groupwise.tasks.load import NEEDS_FIRST, TASKS, load_task
from groupwise.tasks.verify import Check, check_cases, check_golds, check_pairs, table


class Line(NamedTuple):
    """A line to print; `ok`: nothing failed in it."""

    text: str
    ok: bool = True


def self_test(
    config: TaskConfig | None, *, pairs: str | None, examples: int, as_json: bool
) -> Iterator[Line]:
    """Test the rewards of one task, or of every built-in one."""
    if config is not None and pairs is not None:
        task = load_task(config)
        yield from report(list(check_pairs(task, pairs, config=config)), title=task.name, as_json=as_json)
    elif config is not None:
        yield from tested(config, examples=examples, as_json=as_json)
    else:
        for name in TASKS:
            if name in NEEDS_FIRST:
                yield Line(f"{name}: not tested; it needs {NEEDS_FIRST[name]} first")
                continue
            try:
                yield from tested(TaskConfig(name=name), examples=examples, as_json=as_json)
            except ConfigError as error:  # an extra that is not installed
                yield Line(f"{name}: not tested: {error}", ok=False)


def tested(config: TaskConfig, *, examples: int, as_json: bool) -> Iterator[Line]:
    task = load_task(config)
    # The cases are written for the scores that a task has unless told otherwise.
    cases = [] if config.options else check_cases(task, seconds=config.reward_seconds)
    golds = check_golds(task, count=examples, config=config)
    if as_json:
        yield from report([*cases, *golds], title=task.name, as_json=True)
        return
    if cases:
        yield from report(cases, title=task.name, as_json=False)
    refused = [gold for gold in golds if not gold.passed]
    yield Line(f"{task.name}: {len(golds) - len(refused)} of {len(golds)} gold answers accepted", not refused)
    if refused:
        yield from (Line(line) for line in table(refused))
    yield Line("")


def report(checks: Sequence[Check], *, title: str, as_json: bool) -> Iterator[Line]:
    if as_json:
        yield from (Line(json.dumps(check.as_json(), ensure_ascii=False), check.passed) for check in checks)
        return
    passed = sum(check.passed for check in checks)
    yield Line(f"{title}: {passed} of {len(checks)} as expected", passed == len(checks))
    yield from (Line(line) for line in table(checks))
    yield Line("")
