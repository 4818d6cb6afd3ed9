"""A step's stages together: batches with refill, evaluation that changes nothing, what a run writes."""

from __future__ import annotations

import json
import re
import resource
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from groupwise.algo.samples import training_batch
from groupwise.config import Config, read_config
from groupwise.config.schema import AlgoConfig, RolloutConfig, TaskConfig
from groupwise.errors import CheckpointError, ConfigError, InvariantError
from groupwise.records import Completion, Example, Message, Request, Rollout, Sample, Sampling
from groupwise.report.run_reader import RunReader
from groupwise.tasks import Task
from groupwise.tracking import trackers
from groupwise.tracking.rollout_files import read_rollouts
from groupwise.tracking.run_folder import RunFolder, step_of
from groupwise.tracking.terminal import RunSummary
from groupwise.tracking.trackers import Metrics, Rows, TrackerInfo
from groupwise.training import train
from groupwise.training.collector import Batch, Collector, check_failures
from groupwise.training.loop import collect_batch
from groupwise.training.recorder import sample_rows
from groupwise.training.resume import RunState, read_state
from groupwise.training.run_end import next_commands, summary_of
from groupwise.training.step_metrics import batch_metrics
from tests.support.small_runs import (
    LUCK,
    Artifacts,
    deterministic_metrics,
    run_artifacts,
    small_config,
    task_file,
)

# Batches, with a policy that is written down: each prompt's answers are a digit each.


class CharacterCodec:
    """A Codec whose tokens are characters."""

    end_tokens = frozenset({0})

    def encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        assert isinstance(prompt, str)
        return tuple(map(ord, prompt))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token)


class Script:
    """A Generate that gives each prompt its answers from a table, and remembers what it was asked."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        prompts = ["".join(map(chr, request.prompt)) for request in requests]
        self.asked.append(prompts)
        return [[self.complete(digit) for digit in self.answers[prompt]] for prompt in prompts]

    def complete(self, digit: str) -> Completion:
        return Completion(tokens=(ord(digit), 0), logprobs=(-1.0, -1.0), entropies=(1.0, 1.0), finish="end")


def value(rollout: Rollout, example: Example) -> float:
    if rollout.text == "9":
        raise ValueError("nine")
    return float(rollout.text)


def collector(answers: dict[str, str], *, prompts: int, refill: int, max_failed: float = 0.5) -> Collector:
    task = Task(
        name="digits",
        examples=[{"q": q} for q in answers],
        prompt=lambda example: str(example["q"]),
        rewards={"value": value},
    )
    config = Config(
        task=TaskConfig(held_out=0, max_failed=max_failed),
        rollout=RolloutConfig(prompts=prompts, group_size=2, refill=refill),
    )
    return Collector(
        config,
        task=task,
        split=task.split(config.task, config.run.seed),
        codec=CharacterCodec(),
        engine=Script(answers),
    )


def samples_of(made: Collector, batch: Batch) -> tuple[list[Sample], int, int]:
    algo = made.config.algo
    keep_zero = algo.beta > 0 or algo.entropy_bonus != 0
    return training_batch(batch.groups, mask_truncated=algo.mask_truncated, keep_zero=keep_zero)


def test_pca_centres_rewards_on_0_and_shows_their_weighted_sum():
    made = collector({"a": "13", "b": "37"}, prompts=2, refill=0)
    made.config = replace(made.config, algo=replace(made.config.algo, combine="pca"))
    made.task = replace(made.task, weights={"value": 2.0})
    batch = collect_batch(made, 1, cursor=0)
    assert [r.reward for group in batch.groups for r in group.rollouts] == [-1.0, 1.0, -1.0, 1.0]
    metrics = batch_metrics(batch, shown_reward=made.shown_reward)
    assert metrics["reward/mean"] == 7.0  # 2 · (1 + 3 + 3 + 7) / 4
    assert metrics["reward/value/mean"] == 3.5


def order(made: Collector, count: int) -> list[str]:
    """The prompts in the order in which the cursor meets them."""
    return [str(example["q"]) for example in made.split.take(0, count)[0]]


def scripted(silent: Sequence[int], *, prompts: int, refill: int) -> tuple[Collector, list[str]]:
    """A collector of eight prompts, those at the given positions of the run without signal."""
    blank = collector(dict.fromkeys("abcdefgh", "11"), prompts=prompts, refill=refill)
    names = order(blank, 8)
    answers = {name: "11" if position in silent else "01" for position, name in enumerate(names)}
    blank.engine = Script(answers)
    return blank, names


def asked(made: Collector) -> list[list[str]]:
    assert isinstance(made.engine, Script)
    return made.engine.asked


def names_of(groups: Sequence[object]) -> list[str]:
    return [group.example["q"] for group in groups]  # type: ignore[attr-defined]


def test_groups_without_signal_are_replaced_by_fresh_ones_and_counted():
    made, names = scripted([1, 2, 4], prompts=3, refill=3)
    batch = collect_batch(made, 1, cursor=0)
    # Three prompts, of which 1 and 2 are silent; two for them, of which 4 is silent; one for that.
    assert asked(made) == [names[0:3], names[3:5], names[5:6]]
    assert names_of(batch.groups) == [names[0], names[3], names[5]]
    assert names_of(batch.dropped) == [names[1], names[2], names[4]]
    assert batch.cursor == 6
    metrics = batch_metrics(batch)
    assert metrics["rollout/groups"] == 3
    assert metrics["rollout/replaced"] == 3
    assert metrics["advantage/zero_variance"] == pytest.approx(3 / 6)
    assert metrics["reward/mean"] == pytest.approx((3 * 0.5 + 3 * 1.0) / 6)


def test_refill_stops_at_its_limit_with_what_there_is():
    made, names = scripted([0, 1, 2, 3], prompts=2, refill=1)
    batch = collect_batch(made, 1, cursor=0)
    assert asked(made) == [names[0:2], names[2:4]]
    assert (batch.groups, len(batch.dropped), batch.replaced, batch.cursor) == ((), 4, 2, 4)
    assert samples_of(made, batch) == ([], 0, 0)


def test_without_refill_groups_without_signal_stay_and_count_in_the_mean():
    made, names = scripted([1], prompts=3, refill=0)
    batch = collect_batch(made, 1, cursor=0)
    assert (names_of(batch.groups), batch.dropped, batch.replaced, batch.cursor) == (
        [names[0], names[2], names[1]],
        (),
        0,
        3,
    )
    samples, sequences, tokens = samples_of(made, batch)
    assert (len(samples), sequences, tokens) == (4, 6, 12)  # two tokens an answer, the end token included


def test_the_next_step_begins_where_the_last_one_stopped_drawing():
    made, names = scripted([0], prompts=2, refill=1)
    first = collect_batch(made, 1, cursor=0)
    collect_batch(made, 2, cursor=first.cursor)
    assert asked(made) == [names[0:2], names[2:3], names[3:5]]


def test_an_example_drawn_in_two_rounds_of_a_step_gets_other_noise():
    class Seeds(Script):
        def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
            seeds.extend(request.seeds for request in requests)
            return super().generate(requests, sampling)

    seeds: list[tuple[int, ...]] = []
    made = collector({"a": "11"}, prompts=2, refill=2)
    made.engine = Seeds({"a": "11"})
    collect_batch(made, 1, cursor=0)
    assert len(set(seeds)) == len(seeds) == 6


def test_failed_rollouts_are_counted_and_left_out():
    made = collector({"a": "19", "b": "01"}, prompts=2, refill=0)
    batch = collect_batch(made, 1, cursor=0)
    check_failures(batch, limit=0.25)
    assert batch_metrics(batch)["rollout/failed"] == 0.25
    assert batch_metrics(batch)["reward/mean"] == pytest.approx(2 / 3)
    assert samples_of(made, batch)[1] == 3


def test_too_many_failures_end_the_step_early_and_stop_the_run():
    answers = dict.fromkeys("abcdefgh", "99")
    made = collector(answers, prompts=8, refill=3, max_failed=0.5)
    batch = collect_batch(made, 1, cursor=0)
    assert asked(made) == [order(made, 8)]
    assert len(batch.all_groups) == 5  # ten of sixteen rollouts have failed: more than half, whatever comes
    with pytest.raises(InvariantError, match="the first: reward value: ValueError: nine"):
        check_failures(batch, limit=0.5)


def test_a_reward_that_hangs_fails_its_rollout_in_every_group_and_no_other():
    def hangs(rollout: Rollout, example: Example) -> float:
        while rollout.text == "8":
            pass
        return float(rollout.text)

    made = collector({"a": "81", "b": "02", "c": "38"}, prompts=3, refill=0)
    made.task = replace(made.task, rewards={"hangs": hangs})
    made.config = replace(made.config, task=replace(made.config.task, reward_seconds=0.02))
    groups = {group.example["q"]: group.rollouts for group in collect_batch(made, 1, cursor=0).groups}
    late = "reward hangs: took longer than 0.02 s"
    assert {q: [r.error or r.reward for r in rollouts] for q, rollouts in groups.items()} == {
        "a": [late, 1.0], "b": [0.0, 2.0], "c": [3.0, late],
    }  # fmt: skip


# The data.


def test_a_training_row_that_asks_what_a_held_out_one_asks_is_dropped():
    task = Task(
        name="same",
        examples=[{"q": q, "id": id} for id, q in enumerate("abca")],
        held_out=[{"q": "a", "id": 9}],
        prompt=lambda example: str(example["q"]),
        rewards={"value": value},
    )
    split = task.split(TaskConfig(), 0)
    assert isinstance(split.train, tuple)
    assert sorted(row["q"] for row in split.train) == ["b", "c"]
    assert (split.size, split.dropped) == (2, 2)
    with pytest.raises(ConfigError, match="every one asks the same as a held-out example"):
        replace(task, prompt=lambda example: "the same").split(TaskConfig(), 0)


def test_the_mean_filter_of_a_step_knows_the_weights_of_its_task():
    made = collector({"a": "05"}, prompts=1, refill=0)
    rewards = {"value": value, "cost": lambda rollout, example: -value(rollout, example)}
    made.task = replace(made.task, rewards=rewards, weights={"cost": -1.0})
    made.config = replace(made.config, algo=AlgoConfig(advantage="dr_grpo", mean_filter=True))
    (group,) = collect_batch(made, 1, cursor=0).groups
    # 0 and 5, and as much again for a cost of 0 and -5.
    assert [rollout.advantage for rollout in group.rollouts] == [-5.0, 5.0]


# Whole runs, in this process.


@pytest.fixture
def place(tmp_path) -> Path:
    task_file(tmp_path)
    return tmp_path


def weights(run: Path, step: int = 3) -> bytes:
    return (run / "checkpoints" / f"step-{step:06d}" / "model.safetensors").read_bytes()


def test_evaluating_after_every_step_leaves_the_same_weights_as_never(place):
    often = train(small_config(place, "run.max_steps=3", "evaluate.every=1", "run.name=often"))
    never = train(small_config(place, "run.max_steps=3", "evaluate.skip=true", "run.name=never"))
    assert weights(often) == weights(never)
    assert not (never / "eval").exists()
    # The same noise each time, and an untrained copy of the policy gives the same answers.
    again = train(small_config(place, "run.max_steps=1", "run.name=again"))
    assert (again / "eval" / "before.json").read_bytes() == (often / "eval" / "before.json").read_bytes()


def test_a_run_writes_its_whole_story(place, capfd):
    run = train(small_config(place, "algo.loss=gspo", "run.max_steps=4"))
    rows = deterministic_metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/greedy" in row] == [3, 4]
    names = ["after", "before", "step-000003"]
    assert sorted(path.name for path in (run / "eval").iterdir()) == sorted(
        f"{name}.{kind}" for name in names for kind in ("json", "txt")
    )
    after = json.loads((run / "eval" / "after.json").read_text())
    assert after["change"]["greedy"].keys() >= {"mean", "low", "high", "improved", "worsened"}
    assert len(after["greedy_right"]) == len(after["examples"]) == 4  # a fifth of 24 rows
    stats = json.loads((run / "training_stats.json").read_text())
    assert (stats["steps"], stats["after"]["eval/greedy"]) == (4, after["eval/greedy"])
    first = read_rollouts(run / "rollouts" / "step-000001.parquet")
    assert {row["group"] for row in first} == set(range(3 + int(rows[0]["rollout/replaced"])))
    lucky = sum(row["reward"] == 1.0 for row in first)
    completions = run / "completions" / "step-000001.txt"
    assert (completions.read_text().count("=" * 50) if lucky else 0) == lucky
    log = (run / "training.log").read_text()
    assert "algo.clip_low=0.2 is too wide for algo.loss=gspo" in log
    assert "is too wide" in capfd.readouterr().out


@pytest.mark.parametrize(("keep", "left"), [("true", [3, 6]), ("false", [6])])
def test_the_best_step_is_saved_and_kept_though_no_checkpoint_is_due_there(place, keep, left):
    task_file(place, LUCK.replace("% 4 == 0", "> 2**32"))  # all are as bad: the first to be measured is best
    settings = ("run.max_steps=6", "run.save_every=5", "run.keep_last=1", f"run.keep_best={keep}")
    run = train(small_config(place, *settings))
    assert json.loads((run / "training_stats.json").read_text())["best_step"] == 3
    found = {step_of(path.name): read_state(path) for path in (run / "checkpoints").iterdir()}
    assert sorted(found) == left
    assert {state.best_step for state in found.values()} == {3}


def test_the_same_settings_give_the_same_bits_and_another_seed_gives_others(place):
    one, two = (train(small_config(place, "run.max_steps=2", f"run.name={name}")) for name in ("one", "two"))
    other = train(small_config(place, "run.max_steps=2", "run.name=other", "run.seed=1"))
    assert run_artifacts(one) == run_artifacts(two)
    assert weights(one, 2) != weights(other, 2)


def test_adapters_begin_the_same_and_dropout_derives_from_the_step(place):
    settings = ("lora.r=4", "lora.dropout=0.1", "algo.max_gap=5", "run.max_steps=2")
    one, two = (train(small_config(place, *settings, f"run.name={name}")) for name in ("one", "two"))
    assert run_artifacts(one) == run_artifacts(two)


def test_trackers_get_a_few_answers_to_read():
    made, names = scripted([], prompts=6, refill=0)
    rows = sample_rows(collect_batch(made, 1, cursor=0))
    assert [row["prompt"] for row in rows] == [name for name in names[:4] for _ in range(2)]
    assert {*rows[0]} == {
        "prompt",
        "answer",
        "reward",
        "advantage",
        "error",
        *(f"reward/{r}" for r in made.task.rewards),
    }
    assert [(row["answer"], row["reward"]) for row in rows[:2]] == [("1", 1.0), ("0", 0.0)], "best and worst"


def test_a_step_whose_rollouts_fail_leaves_them_to_be_read(place):
    (place / "luck.py").write_text(
        "import groupwise as gw\n"
        "def broken(rollout, example):\n"
        "    raise KeyError('gold')\n"
        "task = gw.Task(name='broken', examples=[{'n': n} for n in range(9)],\n"
        "               prompt=lambda row: str(row['n']), rewards={'broken': broken})\n"
    )
    with pytest.raises(InvariantError, match="100% of the rollouts failed"):
        train(small_config(place, "evaluate.skip=true"))
    (rollouts,) = (place / "run" / "rollouts").iterdir()
    errors = {row["error"] for row in read_rollouts(rollouts)}
    assert errors == {"reward broken: KeyError: 'gold' (luck.py, line 3)"}


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_once_there_is_room(place):
    config = small_config(place, "evaluate.skip=true", "run.max_steps=1")
    run = place / "run"
    sentence = (
        f"cannot write {run}: File too large; make room, then resume with groupwise train --resume {run}"
    )
    with small_disk(100_000), pytest.raises(CheckpointError, match=f"^{re.escape(sentence)}$"):
        train(config)
    assert RunReader(RunFolder(run)).state() == "stopped"
    train(config, resume=run)
    assert RunReader(RunFolder(run)).state() == "finished"


# The last words


def next_words(config: Config, folder: str = "runs/x", *, done: bool = True) -> list[str]:
    return [words for words, _ in next_commands(config.resolve(), RunFolder(Path(folder)), done=done)]


def test_the_next_commands_repeat_this_run_whatever_its_settings() -> None:
    twice = 2 * Config().run.max_steps
    usual = ["groupwise watch runs/x", f"groupwise train --resume runs/x run.max_steps={twice}"]
    assert next_words(Config()) == [*usual, "groupwise train --seed 1"]
    assert next_words(read_config(overrides=["run.seed=3"]))[-1] == "groupwise train --seed 4"
    changed = read_config(overrides=["algo.beta=0.1", "run.name=mine"])
    assert next_words(changed)[-1] == (
        "groupwise train --config runs/x/config.yaml --seed 1 --run-name mine-seed-1"
    )


def last_words(config: Config, step: int) -> RunSummary:
    state = RunState(step=step, seconds=float(step))
    return summary_of(config.resolve(), state, folder=RunFolder(Path("runs/x")), before=None, after=None)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("run.kind=grpo", "groupwise train --resume runs/x"),
        ("run.kind=sft", "groupwise sft --resume runs/x"),
        ("task.name=own", "groupwise.train(task, resume='runs/x')"),
    ],
)
def test_with_a_run_that_has_no_checkpoint_there_is_one_thing_to_do(setting, expected) -> None:
    (words, _), *others = last_words(read_config(overrides=[setting]), 0).next_commands
    assert (words, others) == (expected, [])


def test_one_step_is_not_called_steps() -> None:
    config = read_config(overrides=["run.max_steps=1"])
    assert last_words(config, 1).headline == "1 step done"
    assert last_words(config, 2).headline == "2 steps done"


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("settings", [[], ["lora.r=4", "run.kind=sft"], ["run.kind=sft"], ["task.name=own"]])
def test_the_next_commands_name_folders_with_spaces_as_the_shell_reads_them(settings, done) -> None:
    config = read_config(overrides=["run.name=a b", "task.options.scoring=x y", "algo.beta=0.1", *settings])
    lines = next_words(config, "my runs/a b", done=done)
    in_shell = [line for line in lines if not line.startswith("groupwise.train(")]
    words = [word for line in in_shell for word in shlex.split(line)]
    spaced = {"my runs/a b", "my runs/a b/config.yaml", "my runs/a b-merged", "a b-seed-1"}
    spaced |= {"task.options.scoring=x y", f"my runs/a b/checkpoints/step-{config.run.max_steps:06d}"}
    assert {word for word in words if " " in word} <= spaced
    assert not {"my", "a", "b", "x", "y"} & set(words)
    assert any("my runs/a b" in word for word in words)


def test_a_task_made_in_python_is_measured_by_naming_its_file() -> None:
    assert next_words(Config(task=TaskConfig(name="digits"))) == ["groupwise eval runs/x --task FILE.py"]


# Trackers


class Unreliable:
    """A tracker whose server goes away at one kind of call."""

    def __init__(self, opening: TrackerInfo, *, at: str) -> None:
        self.at = at
        self.reach("open")

    def log(self, step: int, metrics: Metrics) -> None:
        self.reach("log")

    def samples(self, step: int, rows: Rows) -> None:
        self.reach("samples")

    def finish(self) -> None:
        self.reach("finish")

    def reach(self, call: str) -> None:
        if call == self.at:
            raise ConnectionError("server gone")


@pytest.fixture(scope="module")
def untracked(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    folder = tmp_path_factory.mktemp("untracked")
    task_file(folder)
    return run_artifacts(train(small_config(folder)))


@pytest.mark.parametrize("call", ["open", "log", "samples", "finish", "never"])
def test_a_tracker_that_fails_is_told_of_once_and_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    untracked: Artifacts,
    call: str,
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: True)
    monkeypatch.setitem(trackers.TRACKERS, "wandb", partial(Unreliable, at=call))
    task_file(tmp_path)
    run = train(small_config(tmp_path, "track.trackers=[wandb]"))
    assert run_artifacts(run) == untracked
    sentence = "wandb failed and is disabled for the rest of this run: ConnectionError('server gone')"
    told = 0 if call == "never" else 1
    assert capsys.readouterr().out.count(sentence) == told
    assert (run / "training.log").read_text().count(f"WARNING {sentence}") == told
