"""An evaluation question by question: what was asked, what was answered, how often it was right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupwise.evaluate.votes import ballots, majority
from groupwise.records import Group, Rollout
from groupwise.tasks.task import Prompt, Task
from groupwise.tasks.verify import truth_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One held-out example and what became of it."""

    asked: str
    kind: str | None
    """How hard it is, in the task's words."""
    truth: str
    greedy: str | None
    """The answer that the greedy completion states."""
    greedy_right: bool
    right: int
    """Sampled completions that are right."""
    formatted: int
    """Sampled completions in the form that was asked for."""
    majority_right: bool
    """Whether the answer that most of them state is right."""
    votes: Mapping[str, int]
    """How many sampled completions state each answer, the most stated first."""
    error: str | None = None
    """Why a completion could not be scored: of the first such one."""


def question_by_question(task: Task, greedy: Sequence[Group], sampled: Sequence[Group]) -> list[Question]:
    """Look at each example's greedy answer and at its sampled ones, all of them scored."""
    return [question(task, one, several) for one, several in zip(greedy, sampled, strict=True)]


def question(task: Task, greedy: Group, sampled: Group) -> Question:
    (best,) = greedy.rollouts
    stated = [states(task, rollout) for rollout in sampled.rollouts]
    chosen = majority(stated, task.alike)
    return Question(
        asked=question_in(best.prompt),
        kind=task.difficulty(greedy.example) if task.difficulty else None,
        truth=truth_of(task, greedy.example),
        greedy=states(task, best),
        greedy_right=task.is_right(best),
        right=sum(map(task.is_right, sampled.rollouts)),
        formatted=sum(map(task.is_formatted, sampled.rollouts)),
        majority_right=chosen is not None and task.is_right(sampled.rollouts[chosen]),
        votes={str(stated[voters[0]]): len(voters) for voters in ballots(stated, task.alike)},
        error=next((one.error for one in (best, *sampled.rollouts) if one.error is not None), None),
    )


def states(task: Task, rollout: Rollout) -> str | None:
    """Return the answer that a completion states: all of it, where the task does not say how to find it."""
    return task.predicted(rollout.text) if task.predicted else rollout.text.strip()


def question_in(prompt: Prompt) -> str:
    """Return the question alone: the last message that is the user's."""
    if isinstance(prompt, str):
        return prompt
    questions = [str(message["content"]) for message in prompt if message["role"] == "user"]
    return questions[-1] if questions else str(prompt)
