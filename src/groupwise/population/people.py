"""The members of a search: each with its settings, its learner and its way of scoring, on one base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from groupwise.algo.samples import keep_top_entropy
from groupwise.config.sections import Config
from groupwise.engine.sampler import derive_seed
from groupwise.errors import InvariantError
from groupwise.population.base import Base, Member
from groupwise.population.space import Values, applied
from groupwise.tasks import Split, Task
from groupwise.training.batch import Batch, Collector, check_failures


class People:
    """Members by place. A place's number among the base's members is the place itself."""

    def __init__(self, config: Config, *, task: Task, split: Split, base: Base) -> None:
        self.config, self.task, self.split, self.base = config, task, split, base
        self.members: dict[int, Member] = {}
        self.collectors: dict[int, Collector] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self.members)

    @property
    def tasks(self) -> Mapping[int, Task]:
        return {place: collector.task for place, collector in self.collectors.items()}

    def place(self, place: int, values: Values, *, parent: int | None = None) -> None:
        """Put a member in a place: as its parent is now, or fresh."""
        config, _ = applied(values, self.config, self.task)
        model = self.members.get(parent) if parent is not None else None
        if place in self.members and parent != place:
            self.members[place].drop()
            del self.members[place]
        if place not in self.members:
            weights = self.base.fresh if model is None else model.weights
            self.members[place] = Member(self.base, config, weights=weights, number=place)
            if model is not None:
                self.members[place].become(model)
        self.set_values(place, values)

    def set_values(self, place: int, values: Values) -> None:
        """Let a member go on with these values."""
        config, task = applied(values, self.config, self.task)
        self.members[place].configure(config)
        self.collectors[place] = Collector(
            config, task=task, split=self.split, codec=self.base.policy, engine=self.base.engine
        )

    def drop(self, place: int) -> None:
        """Empty a place, and give its memory back."""
        self.members.pop(place).drop()
        del self.collectors[place]

    def learn(self, place: int, batch: Batch, *, step: int) -> dict[str, float]:
        """Update one member; raises `InvariantError` where that breaks it, and harms nobody else."""
        member, collector = self.members[place], self.collectors[place]
        check_failures(batch, limit=self.config.task.max_failed)
        samples, sequences, tokens = collector.samples(batch)
        samples = keep_top_entropy(samples, share=collector.config.algo.top_entropy)
        torch.manual_seed(derive_seed(self.config.run.seed, "update", step))
        member.put_in_place()
        try:
            report = member.learner.update(samples, sequences=sequences, tokens=tokens)
        finally:
            member.learner.optimizer.zero_grad(set_to_none=True)  # the parameters are everyone's
        if not self.base.members.finite(place):
            raise InvariantError("its weights are no numbers any more")
        return report

    def save(self, folder: Path) -> None:
        for place, member in self.members.items():
            member.save(folder / folder_of(place), tokenizer=False)

    def load(self, folder: Path) -> None:
        for place, member in self.members.items():
            member.load(folder / folder_of(place))


def folder_of(place: int) -> str:
    return f"member-{place}"
