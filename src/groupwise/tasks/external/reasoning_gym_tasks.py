"""The datasets of reasoning-gym as tasks: `gym:chain_sum`, or several as `gym:chain_sum,spell_backward`.

Examples are generated without end. The hash of a question says whether it is held out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import cycle, islice
from typing import Any

from groupwise.errors import ConfigError, requires
from groupwise.records import Example, Message, Rollout
from groupwise.tasks.task import Task, closest

PREFIX = "gym:"
HELD_OUT_ONE_IN = 4
POSITIONS, LISTED = 2**31, 4000
"""Items to draw from, and those of a dataset that lists them when it is created."""
MAX_DRAWS = 200
OPEN, CLOSE = "<answer>", "</answer>"


def reasoning_gym_task(
    name: str, *, config: Mapping[str, Any] | None = None, format_weight: float = 0.2
) -> Task:
    """Return a task of one or more reasoning-gym datasets.

    name: names of datasets, separated by commas; each example is drawn from one of them, all equally likely
    config: settings of the dataset; of several datasets, by name
    format_weight: weight of the reward for an answer in <answer> tags
    """
    datasets = load_datasets(name.removeprefix(PREFIX).split(","), config or {})
    from reasoning_gym.utils import SYSTEM_PROMPTS

    def prompt(example: Example) -> list[Message]:
        system = {"role": "system", "content": SYSTEM_PROMPTS["default"]}
        return [system, {"role": "user", "content": example["question"]}]

    return Task(
        name=name,
        examples=GymStream(datasets),
        prompt=prompt,
        rewards={"score": GymScorer(datasets), "format": has_answer},
        weights={"format": format_weight},
        format="format",
        predicted=stated_answer,
        gold=lambda example: f"{OPEN}{example['answer']}{CLOSE}",
        difficulty=lambda example: str(example["dataset"]),
    )


def load_datasets(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Create the datasets by name."""
    with requires("reasoning-gym", "gym: tasks"):
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    datasets = {}
    for name in names:
        if name not in DATASETS:
            raise ConfigError(f"reasoning-gym has no dataset {name!r}{closest(name, DATASETS)}")
        settings = dict(config if len(names) == 1 else config.get(name, {}))
        if name == "composite":
            settings["datasets"] = [DatasetSpec(**spec) for spec in settings.get("datasets", ())]
        try:
            datasets[name] = reasoning_gym.create_dataset(name, seed=0, size=LISTED, **settings)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"gym:{name}: {error}; set task.options.config") from error
    return datasets


class GymStream:
    """Draws examples from datasets; what the scorer needs is generated again from the position."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self.datasets = datasets
        self.positions = {name: positions_in(dataset) for name, dataset in datasets.items()}
        self._read = lru_cache(maxsize=4096)(self._generate)

    def train(self, index: int, *, seed: int) -> Example:
        rng = random.Random(f"train {seed} {index}")
        for _ in range(MAX_DRAWS):
            name = rng.choice(list(self.datasets))
            example = self._read(name, rng.randrange(self.positions[name]))
            if not is_held_out(example):
                return example
        raise ConfigError(f"gym:{','.join(self.datasets)} has no training examples with these settings")

    def held_out(self, count: int) -> list[Example]:
        """Return distinct examples, the same number of each dataset; fewer if there are not as many."""
        rng = random.Random("held out")
        examples: dict[str, Example] = {}
        for name in islice(cycle(self.datasets), count):
            for _ in range(MAX_DRAWS):
                example = self._read(name, rng.randrange(self.positions[name]))
                if is_held_out(example) and example["question"] not in examples:
                    examples[example["question"]] = example
                    break
        return list(examples.values())

    def _generate(self, name: str, position: int) -> Example:
        item = self.datasets[name][position]
        answer = "" if item["answer"] is None else str(item["answer"])
        about = {"dataset": name, "position": position}
        return Example({"question": item["question"], "answer": answer, **about})


def positions_in(dataset: Any) -> int:
    """Return how many items a dataset has."""
    try:
        dataset[POSITIONS - 1]
    except IndexError:
        return LISTED
    return POSITIONS


class GymScorer:
    """A dataset's own score of the stated answer, from 0 to 1. Runs in the worker: it is third-party code."""

    third_party = True

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self.datasets = datasets
        # The rollouts of a group share their item.
        self._item = lru_cache(maxsize=256)(lambda name, position: datasets[name][position])

    def __call__(self, rollout: Rollout, example: Example) -> float:
        name, position = example["dataset"], example["position"]
        answer = stated_answer(rollout.text)
        return float(self.datasets[name].score_answer(answer, self._item(name, position)))


def stated_answer(text: str) -> str | None:
    """Return the text between the last pair of answer tags."""
    _, opened, rest = text.rpartition(OPEN)
    answer, closed, _ = rest.partition(CLOSE)
    return answer.strip() if opened and closed else None


def has_answer(rollout: Rollout, example: Example) -> bool:
    return stated_answer(rollout.text) is not None


def is_held_out(example: Example) -> bool:
    return hashlib.sha256(example["question"].encode()).digest()[0] % HELD_OUT_ONE_IN == 0
