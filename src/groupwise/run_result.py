"""The result of a run: its folder, its metrics as tables, and the trained policy ready to generate.

Everything is read from the folder on demand, so any run can be opened: `RunResult("runs/my-run")`.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config import Config, read_config
from groupwise.config.schema import NO_TASK
from groupwise.errors import ConfigError
from groupwise.evaluate.target import find_named
from groupwise.records import Message, Request, derive_seed
from groupwise.report.run_reader import EvaluationFiles, StoredEvaluation
from groupwise.tracking.rollout_files import read_rollouts
from groupwise.tracking.run_files import read_metrics
from groupwise.tracking.run_folder import RunFolder, step_of

if TYPE_CHECKING:
    import pandas as pd

    from groupwise.engine.engine import Engine
    from groupwise.model.policy import Policy

Prompt = str | Sequence[Message]


class RunResult(os.PathLike[str]):
    """What `gw.train` returns. It also stands for the path of the run's folder wherever one is expected."""

    def __init__(
        self, folder: str | os.PathLike[str], *, logits_processor: Callable[..., Any] | None = None
    ) -> None:
        """`logits_processor`: the sampling rule of the run, if it cannot be imported by its name."""
        self._run = RunFolder.open(Path(folder))
        self._logits_processor = logits_processor

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._run.path

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return read_config(self._run.config)

    @property
    def steps(self) -> int:
        """The steps that were trained."""
        rows = read_metrics(self._run.metrics) if self._run.metrics.is_file() else []
        return max((int(row["step"]) for row in rows), default=0)

    @property
    def finished(self) -> bool:
        """Whether the run made all of its steps. A run that was stopped can be resumed."""
        return self.steps >= self.config.run.max_steps

    @property
    def stats(self) -> Mapping[str, Any]:
        """The closing figures (training_stats.json); empty if the run has not ended."""
        if not self._run.stats.is_file():
            return {}
        stats: dict[str, Any] = json.loads(self._run.stats.read_text(encoding="utf-8"))
        return stats

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per step, one column per metric."""
        rows = read_metrics(self._run.metrics) if self._run.metrics.is_file() else []
        return frame(rows).set_index("step") if rows else frame(rows)

    @property
    def evaluations(self) -> pd.DataFrame:
        """One row per evaluation and score: step, score, mean, low and high (95 % interval), prompts."""
        columns = ("step", "score", "mean", "low", "high", "prompts")
        return frame(
            [
                dict(zip(columns, (one.step, name, *values, one.prompts), strict=True))
                for one in self._evaluated()
                for name, values in one.scores.items()
            ]
        )

    def rollouts(self, step: int | None = None) -> pd.DataFrame:
        """One row per answer of a step; None: of all steps."""
        paths = [path for path in sorted(self._run.rollouts.glob("*.parquet")) if step_of(path.name)]
        if step is not None:
            paths = [path for path in paths if step_of(path.name) == step]
            if not paths:
                raise ConfigError(f"{self.folder} has no rollouts of step {step}")
        return frame([row for path in paths for row in read_rollouts(path)])

    @cached_property
    def policy(self) -> Policy:
        """The trained policy, loaded from the last checkpoint."""
        from groupwise.model.load import load_for_generation

        named = find_named(str(self.folder), ())
        target = named.target
        return load_for_generation(named.config.model, rank=target.rank, trained=target.trained)

    @cached_property
    def _engine(self) -> Engine:
        from groupwise.engine.engine import Engine
        from groupwise.model.grammar import compiled_grammar
        from groupwise.tasks.user_code import IN_PYTHON, load_function

        if (name := self.config.rollout.logits_processor) is not None:
            if self._logits_processor is None and name.startswith(f"{IN_PYTHON}:"):
                raise ConfigError(
                    f"the sampling rule {name.partition(':')[2]} of {self.folder} was defined in Python: "
                    "open the run with RunResult(folder, logits_processor=…)"
                )
            rule = self._logits_processor or load_function("rollout.logits_processor", name)
            self.policy.use_logits_processor(name, rule)
        self.policy.grammar = compiled_grammar(self.config, self.policy, self.policy.end_tokens)
        return Engine(self.policy, replace(self.config.engine.without_fp8(), kind="own"))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        samples: int | None = None,
        temperature: float = 0.0,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> Any:
        """Answer prompts with the trained policy: a string for each, or `samples` strings for each.

        A prompt is a string or a list of messages, as a task gives it. A single prompt gets a single answer.
        Sampling is greedy unless a temperature is given; the rest is as in training.
        """
        single = isinstance(prompts, str) or bool(prompts and isinstance(prompts[0], Mapping))
        every: Sequence[Any] = [prompts] if single else list(prompts)
        sampling = self.config.rollout.sampling
        sampling = replace(
            sampling,
            temperature=temperature,
            max_tokens=sampling.max_tokens if max_tokens is None else max_tokens,
        )
        requests = [
            Request(
                prompt=self.policy.encode(prompt),
                seeds=tuple(derive_seed(seed, "generate", number, member) for member in range(samples or 1)),
            )
            for number, prompt in enumerate(every)
        ]
        with self._engine.ready():
            completions = self._engine.generate(requests, sampling)
        texts = [[self.policy.decode(one.tokens) for one in group] for group in completions]
        answers: list[Any] = texts if samples is not None else [group[0] for group in texts]
        return answers[0] if single else answers

    def _evaluated(self) -> list[StoredEvaluation]:
        return EvaluationFiles(self._run).read()

    def _scores(self) -> list[tuple[str, str, str]]:
        """The name of each score with its first and last value."""
        evaluated = self._evaluated()
        if not evaluated:
            return []
        first, last = evaluated[0].scores, evaluated[-1].scores
        return [
            (name, interval(first[name]) if name in first else "", interval(value))
            for name, value in last.items()
        ]

    def _headline(self) -> str:
        config = self.config
        done = f"{self.steps} of {config.run.max_steps} steps"
        task = "" if config.task.name == NO_TASK else f" · {config.task.name}"
        return f"{done}{task} · {config.model.name}"

    def __repr__(self) -> str:
        changes = [f"{name} {first} → {last}" for name, first, last in self._scores()[:1]]
        return f"RunResult({str(self.folder)!r}: {'; '.join([self._headline(), *changes])})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{first}</td><td>{last}</td></tr>"
            for name, first, last in self._scores()
        )
        table = f"<table><tr><th>held-out</th><th>first</th><th>last</th></tr>{rows}</table>" if rows else ""
        resume = ""
        if not self.finished:
            call = html.escape(f"gw.train(task, resume={str(self.folder)!r})")
            resume = f"<p>Resume it: <code>{call}</code></p>"
        head = f"<b>{html.escape(self._headline())}</b><br><code>{html.escape(str(self.folder))}</code>"
        return f"<div>{head}{table}{resume}</div>"

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return str(self.folder)

    def __truediv__(self, other: str | os.PathLike[str]) -> Path:
        return self.folder / other

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RunResult):
            return self.folder == other.folder
        return isinstance(other, Path) and self.folder == other

    def __hash__(self) -> int:
        return hash(self.folder)

    def __getattr__(self, name: str) -> Any:
        # Code that was written for the path, such as `run.name` or `run.glob(…)`, keeps working.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.folder, name)


def interval(value: tuple[float, float, float]) -> str:
    mean, low, high = (100 * number for number in value)
    return f"{mean:.1f} % [{low:.1f}, {high:.1f}]"


def frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise ConfigError("tables of a run need pandas: pip install 'groupwise[notebook]'") from None
    return pd.DataFrame(list(rows))
