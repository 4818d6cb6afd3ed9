"""Code written for TRL works unchanged: environment_factory, arguments of rewards, trl.rewards, datasets."""

from __future__ import annotations

import json
from typing import Any

import pandas
import pytest

import groupwise as gw
from groupwise.config.schema import TaskConfig, ToolsConfig
from groupwise.errors import ConfigError
from groupwise.isolation.time_limit import TimeLimits
from groupwise.records import Example, Group, Sampling
from groupwise.rewards.runner import RewardContext, TrainerState, score_group, score_within
from groupwise.rollout.collect import collect
from groupwise.tasks import isolated, load_task
from groupwise.tasks.examples import load_examples
from tests.support.scripted_rollouts import ScriptedEngine, ToolCodec


class Counter:
    """An environment as TRL's documentation writes them."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.count = 0

    def reset(self, start: int, **kwargs: Any) -> str | None:
        self.count = start
        return f" It starts at {start}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step (`int`): The number to add.

        Returns:
            The new value of the counter.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count)

    def _hidden(self) -> None: ...


def reaches(prompts, completions, environments, goal, log_extra, log_metric, trainer_state, **kwargs):
    log_extra("count", [environment.count for environment in environments])
    log_metric("step", trainer_state.global_step + trainer_state.epoch)
    return [float(one.count == wanted) for one, wanted in zip(environments, goal, strict=True)]


ROWS = [{"prompt": [{"role": "user", "content": "Count."}], "start": 2, "goal": 5}]


def counted(task: gw.Task, *lines: str, context: RewardContext | None = None) -> Group:
    (group,) = collect(
        list(task.examples),
        ask=task.ask,
        codec=ToolCodec(),
        engine=ScriptedEngine(*lines),
        sampling=Sampling(max_tokens=200),
        group_size=2,
        seed_parts=(0,),
        tools=task.multi_turn(ToolsConfig()),
    )
    with TimeLimits(5.0) as limit:
        return score_within(limit, group, rewards=task.rewards, weights={}, context=context)


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'increment', 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("worker", [False, True])
def test_the_methods_of_an_environment_are_tools_and_rewards_see_the_environments(worker):
    task = gw.Task(name="t", examples=ROWS, rewards=[reaches], environment_factory=Counter)
    assert [*task.rewards] == ["reaches", "Counter"]
    assert task.asks(task.examples[0]).count("Count. It starts at 2.") == 1
    (schema,) = task.multi_turn(ToolsConfig()).toolbox.schemas
    assert schema["function"] == {
        "name": "increment",
        "description": "Increment the counter.",
        "parameters": {
            "type": "object",
            "properties": {"step": {"type": "integer", "description": "The number to add."}},
            "required": ["step"],
        },
    }
    context = RewardContext(trainer_state=TrainerState(global_step=3, epoch=0.5))
    if worker:
        with isolated(task) as moved:
            group = counted(moved, call(step=3), "done", context=context)
    else:
        group = counted(task, call(step=3), "done", context=context)
    for rollout in group.rollouts:
        assert rollout.error is None
        assert rollout.rewards == {"reaches": 1.0, "Counter": 5.0}
        assert rollout.turns[0].calls[0].result == "5"
        assert rollout.extra == {"count": 5}
        assert rollout.state.count == 5, "each rollout has an environment of its own"
    assert context.metrics == {"step": [3.5]}


def test_a_call_that_the_method_does_not_take_is_answered_with_the_reason():
    task = gw.Task(name="t", examples=ROWS, environment_factory=Counter)
    group = counted(task, call(by=3), "done")
    assert "needs the argument 'step'" in group.rollouts[0].turns[0].calls[0].result
    assert group.rollouts[0].rewards == {"Counter": 2.0}


def test_a_task_without_prompts_gets_them_from_reset():
    task = gw.Task(name="t", examples=[{"start": 1}], environment_factory=lambda: Counter())
    assert task.ask(task.examples[0]) == [{"role": "user", "content": " It starts at 1."}]


def test_a_reset_that_fails_fails_its_rollouts_only():
    class Broken(Counter):
        def reset(self, start: int, **kwargs: Any) -> None:
            if type(self).made > 2:  # the first is looked at, the second makes the prompt
                raise OSError("no board left")

    Broken.made = 0
    group = counted(gw.Task(name="t", examples=ROWS, environment_factory=Broken), "done")
    assert all("state: OSError: no board left" in rollout.error for rollout in group.rollouts)


class Bare(Counter):
    def go(self, x):
        """Go."""


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ({"a": Counter}, "define a task for each environment"),
        (dict, "has no method reset"),
        (Bare, "annotate the type of x"),
    ],
)
def test_what_is_no_environment_factory_is_refused(factory, reason):
    with pytest.raises(ConfigError, match=reason):
        gw.Task(name="t", examples=ROWS, rewards=[reaches], environment_factory=factory)


def test_log_extra_needs_a_value_for_each_completion():
    def short(completions, log_extra):
        log_extra("length", [1])
        return [0.0] * len(completions)

    task = gw.Task(name="t", examples=ROWS, rewards=[short], environment_factory=Counter)
    group = counted(task, "done")
    assert "log_extra('length') needs one value for each of the 2 completions" in group.rollouts[0].error


# trl.rewards


def test_all_rewards_of_trl_work_unchanged():
    rewards = pytest.importorskip("trl.rewards")
    functions = {
        "accuracy": rewards.accuracy_reward,
        "reasoning": rewards.reasoning_accuracy_reward,
        "cosine": rewards.get_cosine_scaled_reward(max_len=100),
        "format": rewards.think_format_reward,
        "repetition": rewards.get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0),
        "overlong": rewards.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20),
    }
    row = {"prompt": [{"role": "user", "content": "7 · 6?"}], "solution": r"\boxed{42}"}
    task = gw.Task(name="t", examples=[row], rewards=functions)
    (group,) = collect(
        list(task.examples),
        ask=task.ask,
        codec=ToolCodec(),
        engine=ScriptedEngine("<think>\n7 · 6\n</think>\n" + r"\boxed{42}"),
        sampling=Sampling(max_tokens=200),
        group_size=2,
        seed_parts=(0,),
    )
    scored = score_group(group, rewards=task.rewards, weights={}, seconds=20.0)
    for rollout in scored.rollouts:
        assert rollout.error is None
        assert set(rollout.rewards) == set(functions)
        assert rollout.rewards["accuracy"] == rollout.rewards["reasoning"] == rollout.rewards["format"] == 1.0


# Data


def dataset_dict() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.DatasetDict(
        train=datasets.Dataset.from_list([{"prompt": f"{n} + 1", "n": [n]} for n in range(5)]),
        test=datasets.Dataset.from_list([{"prompt": "9 + 1", "n": [9]}]),
    )


def right(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


def test_a_dataset_dict_gives_training_and_held_out_examples():
    task = gw.Task(name="t", examples=dataset_dict(), rewards=[right])
    assert [example["n"] for example in task.examples] == [[0], [1], [2], [3], [4]]
    assert [example["n"] for example in task.held_out] == [[9]]
    assert task.ask(task.examples[2]) == "2 + 1"
    given = gw.Task(name="t", examples=dataset_dict(), held_out=[{"prompt": "0 + 0"}], rewards=[right])
    assert [example["prompt"] for example in given.held_out] == ["0 + 0"]


def test_a_dataset_and_a_split_of_a_dataset_dict_are_examples():
    splits = dataset_dict()
    assert len(load_examples(splits["train"])) == 5
    assert len(load_examples(splits, split="test")) == 1
    del splits["test"]
    assert len(load_examples(splits, split="test")) == 5, "of a single split, the name does not matter"
    splits["more"] = splits["train"]
    with pytest.raises(ConfigError, match="there is no split 'dev'; choose one of 'train', 'more'"):
        load_examples(splits, split="dev")


def test_folders_of_save_to_disk_are_data(tmp_path):
    splits = dataset_dict()
    splits.save_to_disk(tmp_path / "both")
    splits["train"].save_to_disk(tmp_path / "one")
    assert len(load_examples(tmp_path / "one")) == 5
    assert len(load_examples(str(tmp_path / "both"))) == 5
    assert len(load_examples(f"{tmp_path / 'both'}@test")) == 1
    (tmp_path / "task.py").write_text(
        "import groupwise as gw\n"
        "def right(completions, **kwargs): return [1.0] * len(completions)\n"
        "task = gw.Task(name='t', examples=[{'prompt': 'x'}], rewards=[right])\n"
    )
    folder = str(tmp_path / "both")
    task = load_task(TaskConfig(name=str(tmp_path / "task.py"), data=folder, test_data=folder))
    assert (len(task.examples), len(task.held_out)) == (5, 1)
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="save_to_disk"):
        load_examples(tmp_path / "other")


def test_frames_with_lists_and_structs_are_plain_values(tmp_path):
    frame = pandas.DataFrame({"prompt": [[{"role": "user", "content": "a"}]], "n": [[1, 2]], "x": [0.5]})
    frame.to_parquet(tmp_path / "rows.parquet")
    (example,) = load_examples(pandas.read_parquet(tmp_path / "rows.parquet"))
    assert dict(example) == {"prompt": [{"role": "user", "content": "a"}], "n": [1, 2], "x": 0.5}


def test_a_polars_frame_is_read():
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"prompt": ["a"], "n": [[1, 2]]})
    assert [dict(example) for example in load_examples(frame)] == [{"prompt": "a", "n": [1, 2]}]


def test_a_csv_with_a_column_prompt_needs_no_function(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer\n1 + 1,2\n")
    task = gw.Task(name="t", examples=gw.load_examples(tmp_path / "rows.csv"), rewards=[right])
    assert task.ask(Example({"prompt": "1 + 1"})) == "1 + 1"
