"""Majority: the answer that most of several completions state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Alike = Callable[[str, str], bool]


def ballots(answers: Sequence[str | None], alike: Alike) -> list[list[int]]:
    """Return who states each different answer, by index, the most stated first; no answer is no vote.

    Example: ["72", None, "70", "72.0"] -> [[0, 3], [2]]
    """
    votes: list[list[int]] = []
    for index, answer in enumerate(answers):
        if answer is None:
            continue
        for voters in votes:
            stated = answers[voters[0]]
            if stated is not None and alike(answer, stated):
                voters.append(index)
                break
        else:
            votes.append([index])
    return sorted(votes, key=len, reverse=True)  # stable: of equally many, the one stated first


def majority(answers: Sequence[str | None], alike: Alike) -> int | None:
    """Return the first index that states the most frequent answer; None when nobody states one."""
    votes = ballots(answers, alike)
    return votes[0][0] if votes else None
