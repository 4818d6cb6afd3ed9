"""What `groupwise eval` found, written for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from groupwise.evaluate.statistics import Difference, Interval

MOST_KINDS = 20
"""Kinds of questions that are listed; more are no help."""


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Write one report of `evaluate_command`."""
    verifier = report.get("verifier", report["task"])
    asked = report["task"] if verifier == report["task"] else f"{report['task']} asked as {verifier}"
    yield f"{asked} · {report['model']} · {report['prompts']} prompts, seed {report['seed']}"
    changes = report.get("change", {})
    yield f"{'':<35}since before training" if changes else ""
    if (nothing := unscored(report)) is not None:
        yield f"  {nothing}"
        return
    k = report["samples"]
    for name in ("greedy", f"avg@{k}", f"maj@{k}", f"pass@{k}", "format"):
        if name in report:
            line = f"  {name:<9}{Interval(**report[name])!s:<22}"
            if name in changes:
                line += f"  {Difference(**changes[name])}"
            yield line.rstrip()
    for name, interval in report.get("rewards", {}).items():
        if name not in report:
            line = f"  {name:<9}{Interval(**interval)!s:<22}"
            if f"reward/{name}" in changes:
                line += f"  {Difference(**changes[f'reward/{name}'])}"
            yield line.rstrip()
    yield ""
    yield from strategy_lines(report)
    yield from question_lines(report)
    yield f"  {report['length']:.1f} tokens an answer, {failures(report)}"
    if report.get("left_out"):
        yield f"  {report['left_out']} examples were left out: the run was trained on them"
    if "unchecked" in report:
        yield f"  whether some of these were trained on cannot be told: {report['unchecked']}"
    if "edited" in report:
        parts = ", ".join(report["edited"])
        yield f"  the task's code is not what it was in training ({parts}): nothing is compared with before"
    if "saved" in report:
        yield f"  saved in {report['saved']}, answers to read beside it"


def failures(report: Mapping[str, Any]) -> str:
    """Count the answers that could not be scored, with the most frequent cause."""
    causes = Counter(question["error"] for question in report.get("questions", ()) if question.get("error"))
    words = f"{report['failed']} answers could not be scored"
    if not causes:
        return words
    ((cause, _),) = causes.most_common(1)
    return f"{words}, most often: {' '.join(str(cause).split())}"


def unscored(report: Mapping[str, Any]) -> str | None:
    """Say that no answer at all could be scored, so that nothing was measured; None where some was."""
    if report["failed"] < report["prompts"] * (1 + report["samples"]):
        return None
    return f"nothing was measured: {failures(report)}"


def strategy_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Set the accuracy of test-time strategies against the tokens they spend."""
    strategies = report.get("strategies", {})
    if not strategies:
        return
    yield f"  {'strategy':<20}{'accuracy':<24}{'tokens a question':>17}"
    for name, one in strategies.items():
        yield f"  {name:<20}{Interval(**one['accuracy'])!s:<24}{one['tokens']:>17.1f}"
    yield ""


def question_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say how the questions divide into those that are always, sometimes and never answered."""
    questions = report.get("questions", ())
    if not questions:
        return
    right = [question["right"] for question in questions]
    always, never = right.count(report["samples"]), right.count(0)
    yield (
        f"  of {len(right)} questions {always} are always right, "
        f"{len(right) - always - never} sometimes, {never} never"
    )
    yield from kind_lines(questions, samples=report["samples"])


def kind_lines(questions: Sequence[Mapping[str, Any]], *, samples: int) -> Iterator[str]:
    """Set the kinds of questions beside each other, the easiest first."""
    kinds: dict[str, list[float]] = {}
    for question in questions:
        if question["kind"] is not None:
            kinds.setdefault(question["kind"], []).append(question["right"] / samples)
    if 1 < len(kinds) <= MOST_KINDS:
        for kind, shares in sorted(kinds.items(), key=lambda item: -fmean(item[1])):
            yield f"    {kind:<28}{100 * fmean(shares):>5.1f} % of {len(shares)}"
