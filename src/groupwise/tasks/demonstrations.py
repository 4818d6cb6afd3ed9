"""What a warm start imitates: rows of a file, worked answers of a task, or a run's own best answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.config import read_config
from groupwise.config.sections import NO_TASK, Config
from groupwise.errors import ConfigError
from groupwise.records import Example
from groupwise.rewards.score import weighted_sum
from groupwise.rollout.tools import tool_of
from groupwise.tasks.demonstration import (
    Demonstration,
    SampledTokens,
    check_rows,
    fault_in_calls,
    is_chat,
    of_rollout,
    of_row,
    turns_of,
)
from groupwise.tasks.examples import load_examples
from groupwise.tasks.load import load_task
from groupwise.tasks.split import MAX_HELD_OUT_SHARE, Split, by_fingerprint, split_rows
from groupwise.tasks.task import Task, same_prompt
from groupwise.tasks.verify import gold_of
from groupwise.tracking.rollouts import read_rollouts
from groupwise.tracking.run_folder import RunFolder

Make = Callable[[Example, random.Random], Demonstration | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """A cursor through demonstrations, and those kept back to measure the loss on."""

    split: Split
    make: Make
    seed: int
    dropped: int = 0
    """Rows left out because they ask what a held-out example asks."""

    def take(self, cursor: int, count: int) -> tuple[list[Demonstration], int]:
        """Return the next `count` demonstrations and the cursor after them."""
        taken: list[Demonstration] = []
        while len(taken) < count:
            taken += self.between(cursor, cursor + 1)
            cursor += 1
        return taken, cursor

    def between(self, start: int, end: int) -> list[Demonstration]:
        """Return the demonstrations at some positions; an example without an answer makes none."""
        # The noise belongs to the position, so a checkpoint needs no random state.
        made = (
            self.make(self.split.at(position), random.Random(f"demonstration {self.seed} {position}"))
            for position in range(start, end)
        )
        return [demonstration for demonstration in made if demonstration is not None]

    def held_out(self) -> list[Demonstration]:
        made = (
            self.make(example, random.Random(f"held out {example.fingerprint}"))
            for example in self.split.held_out
        )
        return [demonstration for demonstration in made if demonstration is not None]

    def steps_for(self, epochs: int, *, batch: int) -> int:
        """Steps in which every demonstration is seen `epochs` times."""
        if self.split.size is None:
            raise ConfigError("sft.passes: the task makes examples without end; give run.max_steps")
        return max(1, -(-epochs * self.split.size // batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A warm start, settled before a model loads."""

    config: Config
    task: Task | None
    """Whose answers to imitate, unless rows say; and what accuracy to measure."""
    demonstrations: Demonstrations

    @property
    def title(self) -> str:
        """What to call it: after its data, else after its task."""
        if self.config.sft.data is not None:
            return Path(self.config.sft.data).name.partition(".")[0]
        assert self.task is not None, "without data, a task says what to imitate"
        return self.task.name


def plan_warm_start(config: Config, *, task: Task | None = None, resumed: bool = False) -> Plan:
    """Settle what to imitate and for how long; a resumed run keeps its batches as they are."""
    if config.sft.from_run is not None and config.task.name == NO_TASK:
        # The run's own task says which of its prompts are held out, and measures what imitation is worth.
        own = read_config(RunFolder.open(config.sft.from_run).config).task
        same = {key: getattr(own, key) for key in ("name", "data", "columns", "test_data", "options")}
        config = replace(config, task=replace(config.task, **same))
    config = config.resolve()
    if task is None and config.task.name != NO_TASK:
        task = load_task(config.task)
    if task is None and config.sft.data is None:
        raise ConfigError("say what to imitate: --data FILE, --from-run RUN, or --task NAME")
    demonstrations = demonstrations_for(config, task)
    if (passes := config.sft.passes) is not None:
        size = demonstrations.split.size
        if size is not None and not resumed:  # no batch holds a row twice: a pass stays one
            config = replace(config, sft=replace(config.sft, batch=min(config.sft.batch, size)))
        steps = demonstrations.steps_for(passes, batch=config.sft.batch)
        config = replace(config, run=replace(config.run, max_steps=steps))
    return Plan(config=config, task=task, demonstrations=demonstrations)


def demonstrations_for(config: Config, task: Task | None) -> Demonstrations:
    """Return what the configuration says to imitate."""
    held_out = set() if task is None else {same_prompt(task.ask(e)) for e in held_out_of(config, task)}
    if config.sft.from_run is not None:
        tools = () if task is None else schemas_of(task)
        rows = best_answers(config, weights={} if task is None else task.weights)
        return of_rows(rows, config=config, held_out=held_out, make=partial(of_rollout, tools=tools))
    if config.sft.data is not None:
        rows = load_examples(config.sft.data)
        check_rows(rows, source=config.sft.data)
        return of_rows(rows, config=config, held_out=held_out, make=of_row)
    assert task is not None, "without data, a task says what to imitate"
    return of_task(task, config=config)


def held_out_of(config: Config, task: Task) -> tuple[Example, ...]:
    return task.split(config.task, config.run.seed).held_out


def of_task(task: Task, *, config: Config) -> Demonstrations:
    """Worked answers to the task's training examples, or its golds where it has no others."""
    if task.tools and task.worked is None:
        raise ConfigError(
            f"task {task.name} has tools and no worked answers: its gold answers call no tool, and imitating "
            "them would teach the policy not to; give the task worked=…, or imitate rows by --data"
        )
    tools = schemas_of(task)

    def make(example: Example, rng: random.Random) -> Demonstration | None:
        answer = gold_of(task, example) if task.worked is None else task.worked(example, rng)
        if answer is None:
            return None
        if isinstance(answer, str):
            return Demonstration(prompt=task.ask(example), completion=answer, tools=tools)
        if not is_chat(answer) or fault_in_calls(answer):
            raise ConfigError(
                f"task {task.name}: worked must return text, or messages with role and content; "
                f"got {str(answer)[:80]!r}"
            )
        try:
            turns = turns_of(answer)
        except ConfigError as error:
            raise ConfigError(f"task {task.name}: worked: {error}") from None
        return Demonstration(prompt=task.ask(example), completion=turns[-1].text, tools=tools, turns=turns)

    split = task.split(config.task, config.run.seed)
    probe = Demonstrations(split=split, make=make, seed=config.run.seed)
    tries = [make(split.at(position), random.Random(position)) for position in range(64)]
    if not any(tries):
        raise ConfigError(f"task {task.name}: none of its first 64 examples has a worked answer")
    return probe


def schemas_of(task: Task) -> tuple[Mapping[str, Any], ...]:
    """What prompts tell of a task's tools."""
    return tuple(tool_of(function).schema for function in task.tools)


def of_rows(
    rows: Sequence[Example], *, config: Config, held_out: set[str], make: Callable[[Example], Demonstration]
) -> Demonstrations:
    """Demonstrations that the rows hold, without those that ask what evaluation will ask."""
    prompts = {id(row): same_prompt(make(row).prompt) for row in rows}  # each is asked for several times

    def asks(row: Example) -> str:
        return prompts[id(row)]

    kept = [row for row in rows if asks(row) not in held_out]
    if not kept:
        raise ConfigError("no demonstration is left: each asks what a held-out example asks")
    back = [] if config.sft.from_run else kept_back(kept, asks=asks, most=config.task.held_out)
    split = split_rows(kept, held_out=back, asks=asks, config=config.task, seed=config.run.seed)
    return Demonstrations(
        split=split,
        make=lambda example, _: make(example),
        seed=config.run.seed,
        dropped=len(rows) - len(kept) + split.dropped - len(back),
    )


def kept_back(rows: Sequence[Example], *, asks: Callable[[Example], str], most: int) -> list[Example]:
    """The rows to measure the loss on, by the smallest fingerprints: all answers to a prompt or none."""
    unique = by_fingerprint(rows)
    answers: dict[str, list[Example]] = {}
    for _, row in sorted(unique.items()):
        answers.setdefault(asks(row), []).append(row)
    chosen: list[Example] = []
    for group in answers.values():
        if len(chosen) + len(group) <= min(most, int(len(unique) * MAX_HELD_OUT_SHARE)):
            chosen += group
    return chosen


def best_answers(config: Config, *, weights: Mapping[str, float]) -> list[Example]:
    """Rejection sampling: of each prompt's recorded answers the best few, if they are good enough.

    Good enough is a reward of `sft.min_reward`, by default the highest that any answer of the run got. An
    answer that failed or was cut off never is. Of equal ones the later is taken: the policy was better then.
    """
    assert config.sft.from_run is not None
    run = RunFolder.open(config.sft.from_run)
    paths = sorted(run.rollouts.glob("step-*.parquet"))
    rows = [row for path in paths for row in read_rollouts(path)]
    if read_config(run.config).algo.combine != "sum":  # the others compare answers to one prompt alone
        rows = [row | {"reward": weighted_sum(row["rewards"], weights)} for row in rows]
    ended = [row for row in rows if row["error"] is None and row["finish"] != "length"]
    if not ended:
        raise ConfigError(f"{run.path} has no recorded answer that came to its end: nothing to imitate")
    best = max(row["reward"] for row in ended)
    least = best if config.sft.min_reward is None else config.sft.min_reward
    good = sorted((row for row in ended if row["reward"] >= least), key=lambda r: (-r["reward"], -r["step"]))
    if not good:
        raise ConfigError(f"no answer in {run.path} has a reward of {least:g}; the best has {best:g}")
    chosen: list[Example] = []
    count: Counter[str] = Counter()
    seen: set[tuple[Any, ...]] = set()
    for row in good:
        prompt = str(row["prompt"])
        # Of an answer that used tools the text is the last turn: what came before it may be another way.
        turns = tuple(row["tokens"]) if SampledTokens.of(row).read_more else ()
        said = (prompt, row["text"], turns)
        if count[prompt] < config.sft.per_prompt and said not in seen:
            count[prompt] += 1
            seen.add(said)
            chosen.append(Example({key: row[key] for key in ROLLOUT_COLUMNS}))
    return chosen


ROLLOUT_COLUMNS = ("prompt", "text", "tokens", "trained", "prompt_length")
