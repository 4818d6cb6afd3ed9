"""Held-out prompts in two parts: some that selection looks at, and others that only judge the outcome.

The best of several measurements is partly luck, so it must not be the measure of the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from groupwise.config.sections import Config
from groupwise.evaluate.held_out import Evaluation, compare, evaluate
from groupwise.evaluate.saved import read_evaluation, write_evaluation
from groupwise.population.base import Base
from groupwise.records import Completion, Request, Sampling
from groupwise.tasks import Split, Task
from groupwise.tracking.run_folder import RunFolder

BEFORE, AFTER = "before", "after"


class Judge:
    """Knows which prompts are for what."""

    def __init__(self, config: Config, *, task: Task, split: Split, base: Base, folder: RunFolder) -> None:
        self.config, self.task, self.base, self.folder = config, task, base, folder
        held_out = () if config.evaluate.skip else split.held_out
        alone = config.evolve.population == 1
        self.choosing = () if alone else held_out[: config.evaluate.during]
        """What selection looks at."""
        self.judging = held_out if alone else held_out[config.evaluate.during :]
        """What nobody looks at before the end."""

    def notices(self) -> Iterator[str]:
        if self.choosing and not self.judging:
            yield (
                f"all {len(self.choosing)} held-out examples are used to select: the best is not judged on "
                "others; raise task.held_out"
            )

    def judge(self, when: str, *, place: int, step: int) -> Evaluation | None:
        """Measure one member on the prompts that played no part, and keep the result."""
        if not self.judging:
            return None
        result = evaluate(
            self.task,
            self.judging,
            codec=self.base.policy,
            engine=OneMember(self.base, place),
            sampling=self.config.rollout.sampling,
            samples=self.config.evaluate.samples,
            seed=self.config.run.seed,
            seconds=self.config.task.reward_seconds,
        )
        about: dict[str, object] = {"step": step, "seed": self.config.run.seed}
        if when == AFTER and (before := self.recall(BEFORE)) is not None:
            about["change"] = {name: asdict(change) for name, change in compare(before, result).items()}
        write_evaluation(self.folder.evaluations, when, result, about=about)
        return result

    def recall(self, when: str) -> Evaluation | None:
        return read_evaluation(self.folder, when)


class OneMember:
    """The engine, answering as one member."""

    def __init__(self, base: Base, place: int) -> None:
        self.base, self.place = base, place

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return self.base.engine.alone(self.place, requests, sampling)
