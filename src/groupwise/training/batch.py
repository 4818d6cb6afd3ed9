"""One step's groups: asked, answered, scored, compared, and replaced where they teach nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.algo.advantages import with_advantages, with_overlong_penalty
from groupwise.algo.samples import batch_size, to_samples
from groupwise.config.sections import Config
from groupwise.errors import InvariantError
from groupwise.invariants import check_disjoint
from groupwise.records import Example, Group, Sample
from groupwise.rewards.score import score_group
from groupwise.rollout.collect import Codec, Generate, collect
from groupwise.tasks import Split, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step trains on, and what was drawn for it in vain."""

    groups: tuple[Group, ...]
    replaced: tuple[Group, ...]
    """Groups without signal that fresh ones took the place of."""
    cursor: int
    """Where in the training data the next step begins."""
    rollout_seconds: float
    reward_seconds: float

    @property
    def drawn(self) -> tuple[Group, ...]:
        """Every group, trained on or not: what the policy's rewards are measured on."""
        return self.groups + self.replaced


class Collector:
    """Makes batches; holds what does not change between steps."""

    def __init__(self, config: Config, *, task: Task, split: Split, codec: Codec, engine: Generate) -> None:
        self.config = config
        self.task = task
        self.split = split
        self.codec = codec
        self.engine = engine
        self.held_out = {prompt_key(task, example) for example in split.held_out}

    def collect(self, step: int, *, cursor: int) -> Batch:
        """Draw prompts until enough groups have signal, or `rollout.refill` rounds are used up."""
        rollout = self.config.rollout
        kept: list[Group] = []
        silent: list[Group] = []
        times = [0.0, 0.0]
        for _ in range(1 + rollout.refill):
            missing = rollout.prompts - len(kept)
            if not missing:
                break
            examples, cursor = self.split.take(cursor, missing)
            groups = self._answer(examples, step=step, first=len(kept) + len(silent), times=times)
            kept += [group for group in groups if has_signal(group)]
            silent += [group for group in groups if not has_signal(group)]
        self._check_failures(kept + silent)
        if not rollout.refill:  # nothing was replaced: silent groups stay and count in the loss's mean
            kept, silent = kept + silent, []
        return Batch(
            groups=tuple(kept),
            replaced=tuple(silent),
            cursor=cursor,
            rollout_seconds=times[0],
            reward_seconds=times[1],
        )

    def samples(self, batch: Batch) -> tuple[list[Sample], int, int]:
        """The batch as token sequences, and its size in sequences and tokens, silent members included."""
        algo = self.config.algo
        # A KL penalty or an entropy bonus pulls on members of zero advantage too.
        keep_zero = algo.beta > 0 or algo.entropy_bonus != 0
        samples = to_samples(batch.groups, mask_truncated=algo.mask_truncated, keep_zero=keep_zero)
        sequences, tokens = batch_size(batch.groups, mask_truncated=algo.mask_truncated)
        return samples, sequences, tokens

    def _answer(self, examples: Sequence[Example], *, step: int, first: int, times: list[float]) -> list[Group]:
        check_disjoint((prompt_key(self.task, example) for example in examples), self.held_out)
        config, started = self.config, time.perf_counter()
        groups = collect(
            examples,
            ask=self.task.ask,
            codec=self.codec,
            engine=self.engine,
            sampling=config.rollout.sampling,
            group_size=config.rollout.group_size,
            # `first` tells apart the same example drawn twice in one step.
            seed_parts=(config.run.seed, "train", step, first),
        )
        answered = time.perf_counter()
        scored = [self._score(group) for group in groups]
        times[0] += answered - started
        times[1] += time.perf_counter() - answered
        return scored

    def _score(self, group: Group) -> Group:
        task, algo = self.task, self.config.algo
        group = score_group(
            group, rewards=task.rewards, weights=task.weights, seconds=self.config.task.reward_seconds
        )
        group = with_overlong_penalty(
            group,
            max_tokens=self.config.rollout.max_tokens,
            buffer=algo.overlong_buffer,
            penalty=algo.overlong_penalty,
        )
        return with_advantages(group, kind=algo.advantage, weights=task.weights)

    def _check_failures(self, groups: Sequence[Group]) -> None:
        errors = [r.error for group in groups for r in group.rollouts if r.error is not None]
        share = len(errors) / sum(len(group.rollouts) for group in groups)
        if share > self.config.task.max_failed:
            raise InvariantError(
                f"{share:.0%} of the rollouts failed (task.max_failed is {self.config.task.max_failed:g}); "
                f"the first: {errors[0]}"
            )


def has_signal(group: Group) -> bool:
    """Whether the group moves the policy: some answer was better than another."""
    return any(rollout.advantage != 0.0 for rollout in group.rollouts)


def prompt_key(task: Task, example: Example) -> str:
    """What the policy sees of an example: two that look the same to it are the same."""
    return str(task.ask(example))
