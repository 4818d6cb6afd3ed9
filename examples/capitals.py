"""A whole task in one file: `python capitals.py`, or in the shell `groupwise train capitals.py --model …`."""

import groupwise as gw


def correct(rollout: gw.Rollout, example: gw.Example) -> float:
    return float(rollout.text.strip().endswith(example["answer"]))


task = gw.Task(
    name="capitals",
    examples=gw.load_examples("capitals.jsonl"),  # HF dataset id, JSON(L), Parquet or a generator
    prompt=lambda example: f"What is the capital of {example['country']}?",
    rewards={"correct": correct, "short": gw.rewards.length(at_most=40)},
    weights={"short": 0.2},
    tools=[],  # typed Python functions
)
gw.train(task, model="Qwen/Qwen2.5-0.5B-Instruct", max_steps=100)
