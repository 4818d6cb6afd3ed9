"""A run that is killed at any file operation and resumed ends with the same bits.

Every kind of run is killed at the kinds of file operations that it makes in its folder: the writing, renaming
and removing of each file, and the reading in between. By default, runs of different kinds try different
operations, over 100 in all, and one run is killed many times. With GROUPWISE_ALL_KILLS=1 every operation has
a run of its own.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from groupwise.tracking.rollout_files import read_rollouts
from tests.support.file_events import FileEvent, Observed, Strike, lasting_files, observe
from tests.support.small_models import small_model, tiny_tokenizer
from tests.support.small_runs import task_file

ALL = "GROUPWISE_ALL_KILLS" in os.environ
TINY = (
    *("run.max_steps=2", "run.save_every=1", "run.keep_last=1", "model.device=cpu"),
    *("rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=4", "rollout.temperature=1.5"),
    *("evaluate.every=1", "evaluate.samples=1", "evaluate.during=1", "task.held_out=2"),
    *("track.report=false", "track.trackers=[]"),
)


class Variant(NamedTuple):
    command: str
    task: str
    model: str
    settings: tuple[str, ...]
    kills: int
    """How many of the kinds of file operations are tried by default."""


VARIANTS = {
    "full": Variant("train", "luck.py", "model", ("lora.r=0", "algo.beta=0.1", "rollout.refill=1"), 20),
    "lora": Variant("train", "luck.py", "model", ("lora.r=4", "optim.schedule=linear"), 34),
    "sft": Variant("sft", "countdown", "model", ("lora.r=4", "sft.batch=2"), 32),
    "evolve": Variant(
        *("evolve", "luck.py", "model"),
        (
            *("lora.r=4", "evolve.population=2", "evolve.every=1", "evolve.certain=false"),
            *("evolve.method=tournament", "evolve.vary={optim.learning_rate: [1e-4, 1e-2]}"),
        ),
        9,
    ),
    "tools": Variant(
        *("train", "search_qa", "tiny-search"),
        ("lora.r=4", "rollout.max_tokens=24", "rollout.prompts=1", "task.held_out=1", "evaluate.every=0"),
        6,
    ),
}


SECOND_STEP = FileEvent("open", "a", "/metrics.jsonl")
"""Its second time is in the second step."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    task_file(folder)
    small_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    return folder


class Runs:
    """Runs of one variant, each begun when it is first struck."""

    def __init__(self, place: Path, name: str) -> None:
        self.place, self.name, self.variant = place, name, VARIANTS[name]
        self.number = 0

    @property
    def path(self) -> Path:
        return self.place / f"{self.name}-{self.number}"

    def proceed(self, strike: Strike | None = None) -> Observed:
        """Begin the run, or resume it where it has begun."""
        if (self.path / "config.yaml").exists():
            return observe([self.variant.command, "--resume", str(self.path)], self.path, strike)
        at = [f"run.output_dir={self.place}", f"run.name={self.path.name}"]
        where = {"luck.py": str(self.place / "luck.py")}
        named = where.get(self.variant.task, self.variant.task)
        task = ["--task", named] if self.variant.command == "sft" else [named]
        model = str(self.place / "model") if self.variant.model == "model" else self.variant.model
        settings = [f"model.name={model}", *TINY, *self.variant.settings]
        return observe([self.variant.command, *task, *at, *settings], self.path, strike)

    def strikes(self, events: dict[FileEvent, int]) -> Iterator[Strike]:
        """Yield the kills to try, in the order in which a run comes by them; another part for each variant.

        One half strikes the first step. Then a kill in the second step begins the other half, which strikes
        there, after a checkpoint.
        """
        if ALL:
            for kind, count in events.items():
                yield from (Strike(kind, nth) for nth in range(1, count + 1))
            return
        order = list(events)
        chosen = random.Random(self.name).sample(order, self.variant.kills - 1)
        later = [kind for kind in chosen[::2] if events[kind] > 1]
        yield from (Strike(kind, 1) for kind in sorted(set(chosen) - set(later), key=order.index))
        yield Strike(SECOND_STEP, 2)
        yield from (Strike(kind, 1) for kind in sorted(later, key=order.index))

    def finish(self, whole: dict[str, object]) -> None:
        """Resume until the end, compare with the run that was never killed, and begin another."""
        ended = self.proceed()
        assert ended.code == 0, ended.err
        found = lasting_files(self.path)
        assert found.keys() == whole.keys()
        assert [name for name in whole if found[name] != whole[name]] == []
        shutil.rmtree(self.path)
        self.number += 1


@pytest.mark.parametrize("name", VARIANTS)
def test_killed_at_every_kind_of_file_operation_and_resumed_it_gives_the_same_bits(place, name):
    runs = Runs(place, name)
    unharmed = runs.proceed()
    assert unharmed.code == 0, unharmed.err
    whole = lasting_files(runs.path)
    if name == "tools":
        rows = read_rollouts(runs.path / "rollouts" / "step-000001.parquet")
        assert any(turn["calls"] for row in rows for turn in row["turns"])
    strikes = list(runs.strikes(unharmed.events))
    kills = 0
    for strike in strikes:
        if ALL:
            runs.number += 1
        ended = runs.proceed(strike)
        if ended.code == 0:  # the run had come past the last such operation
            runs.finish(whole)
            ended = runs.proceed(strike)
        assert ended.code == -signal.SIGKILL, (strike, ended.code, ended.err)
        kills += 1
        if ALL:
            runs.finish(whole)
    assert kills == len(strikes) >= VARIANTS[name].kills
    if not ALL:
        runs.finish(whole)
