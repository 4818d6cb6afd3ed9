"""The friendly names: what `--max-steps 10` in the shell and `max_steps=10` in Python set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from groupwise.config.checks import between
from groupwise.config.values import convert

FLAGS = {
    "model": "model.name",
    "lora_r": "lora.r",
    "task": "task.name",
    "data": "task.data",
    "max_examples": "task.max_examples",
    "batch_size": "rollout.prompts",
    "gradient_accumulation_steps": "rollout.prompts",
    "group_size": "rollout.group_size",
    "max_tokens": "rollout.max_tokens",
    "temperature": "rollout.temperature",
    "advantage": "algo.advantage",
    "loss": "algo.loss",
    "beta": "algo.beta",
    "learning_rate": "optim.learning_rate",
    "skip_evaluation": "evaluate.skip",
    "max_steps": "run.max_steps",
    "seed": "run.seed",
    "output_dir": "run.output_dir",
    "run_name": "run.name",
    "project_name": "track.project",
    "no_trackio": "track.trackers",
    "track": "track.trackers",
}
"""Each flag and the setting it sets. `settings_of` treats the few whose value is not simply taken over."""


def settings_of(flags: Mapping[str, Any], *, prompts: int) -> Iterator[tuple[str, Any]]:
    """Yield the setting and the value that each flag stands for; `prompts` is the default batch size."""
    sizes = [name for name in ("batch_size", "gradient_accumulation_steps") if name in flags]
    for name in sizes:
        between(name, convert(flags[name], to=int, setting=name), 1)
    if sizes:
        # Memory is bounded by optim.micro_batch_tokens, so accumulating only means more prompts in a step.
        batch = flags.get("batch_size", prompts)
        yield "rollout.prompts", batch * flags.get("gradient_accumulation_steps", 1)
    if convert(flags.get("no_trackio", False), to=bool, setting="no_trackio"):
        yield "track.trackers", ()
    for name, value in flags.items():
        if name in (*sizes, "no_trackio"):
            continue
        use_all = name == "max_examples" and value == 0
        yield FLAGS[name], None if use_all else value
