"""GSM8K: what a model answers before training, and what it learns in some minutes of GRPO.

    python benchmarks/gsm8k_study.py before --model FOLDER --train TRAIN.jsonl --test TEST.jsonl --output OUT
    python benchmarks/gsm8k_study.py train --model FOLDER --train TRAIN.jsonl --minutes 3 --output TRIES
    python benchmarks/gsm8k_study.py train --model FOLDER --train TRAIN.jsonl --test TEST.jsonl --minutes 10 \
        --seeds 0 1 2 --output OUT
    python benchmarks/gsm8k_study.py plot --output OUT                    # OUT/result.json as OUT/curve.png
    python benchmarks/gsm8k_study.py train --quick --output /tmp/quick    # does it run? Built-in model, a CPU

Every question is answered greedily with three prompts: the task's own (`task`: tags for `gsm8k`, a box for
`math`), a plain request for step-by-step work (`plain`), and worked training examples as earlier turns of the
chat (`few-shot`). Each answer is read in two ways: `strict` counts a right answer in the format of the task,
`last number` compares the last number of the text, whatever surrounds it. A model that only learns the format
gains in the first row and not in the others.

`train` without `--test` measures on a dev split of the training rows: choose settings that way. With
`--test`, the whole test set is answered once before training and once at the end of each seed. The curve is
measured on the dev split. The clock counts training only, from the first prompt on, without measurements.

OUT/before.json has the first table. Each seed leaves a run folder (config.yaml, metrics.jsonl, the last
checkpoint) with after.json. OUT/result.json has both, with the curves; before.txt and after.txt have answers
to read; config.yaml has the settings of the first seed. These are the files of a folder in docs/runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import machine, markdown

import groupwise
from groupwise.config import Config, read_config
from groupwise.engine.engine import Engine
from groupwise.evaluate.held_out import transcript
from groupwise.evaluate.intervals import Interval, exact_interval, paired_difference
from groupwise.model.load import load_for_generation
from groupwise.model.policy import Policy
from groupwise.records import Example, Group, Message
from groupwise.rewards.extraction import NUMBER
from groupwise.rewards.runner import score_group
from groupwise.rollout.collect import collect
from groupwise.tasks import Split, Task, UserFunctions, load_rows, load_task
from groupwise.training.callbacks import Callback, RunControl
from groupwise.training.grpo_run import GRPORun
from groupwise.training.loop import train_step
from groupwise.training.resume import RunStart

PLAIN = "Solve this problem step by step. State the final number at the end."
ANNOTATION = re.compile(r"<<.*?>>")
"""What GSM8K's solutions have for calculators: `48/2 = <<48/2=24>>24`."""
SHOWN = 10
"""Answers in before.txt and after.txt."""
STRICT, LAST = "strict", "last number"

Ask = Callable[[Example], Sequence[Message]]


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, with its sign: "… so -1,200.50." -> -1200.5."""
    found = list(NUMBER.finditer(text))
    if not found:
        return None
    number = found[-1]
    before = text[: number.start()].rstrip("$€£")
    negative = before.endswith(("-", "−")) and not before[-2:-1].isalnum()  # "20-5" is a subtraction
    return (-1 if negative else 1) * Fraction(number[0].replace(",", ""))


def plain_prompt(example: Example) -> list[Message]:
    return [{"role": "user", "content": f"{PLAIN}\n\n{example['question']}"}]


def few_shot_prompt(worked: Sequence[Example]) -> Ask:
    """Return the prompt with worked examples as earlier turns, each ending in `#### number`."""
    turns: list[Message] = []
    for example in worked:
        solution = ANNOTATION.sub("", str(example.get("solution") or f"#### {example['answer']}"))
        turns += [
            {"role": "user", "content": example["question"]},
            {"role": "assistant", "content": solution},
        ]
    return lambda example: [*turns, {"role": "user", "content": example["question"]}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Greedy answers to questions with one prompt, and how each reading judges them."""

    right: Mapping[str, tuple[bool, ...]]
    length: float
    truncated: float
    """Share of answers that reached the maximum number of tokens."""
    groups: Sequence[Group]

    def intervals(self) -> dict[str, Interval]:
        return {reading: exact_interval(sum(right), len(right)) for reading, right in self.right.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "accuracy": {reading: asdict(value) for reading, value in self.intervals().items()},
            "right": {reading: [int(one) for one in right] for reading, right in self.right.items()},
            "length": self.length,
            "truncated": self.truncated,
        }

    def to_text(self) -> str:
        shown = zip(self.groups[:SHOWN], self.right[STRICT], strict=False)
        return ("=" * 78 + "\n").join(transcript(group.rollouts[0], right=right) for group, right in shown)


class Examination:
    """Answers questions greedily with a policy and judges the answers."""

    def __init__(self, config: Config, *, strict: Task, worked: Sequence[Example], max_tokens: int) -> None:
        self.sampling = replace(config.rollout.sampling, temperature=0.0, max_tokens=max_tokens)
        self.strict = strict
        prompt = strict.prompt
        assert prompt is not None
        self.prompts: dict[str, Any] = {
            "task": prompt,
            "plain": plain_prompt,
            "few-shot": few_shot_prompt(worked),
        }

    def answers(self, policy: Policy, engine: Engine, rows: Sequence[Example], prompt: str) -> Answers:
        with engine.ready():
            groups = collect(
                rows,
                ask=self.prompts[prompt],
                codec=policy,
                engine=engine,
                sampling=self.sampling,
                group_size=1,
                seed_parts=(0, "study"),
            )
        strict = self.strict
        scored = [
            score_group(g, rewards=strict.rewards, weights=strict.weights, seconds=10.0) for g in groups
        ]
        rollouts = [group.rollouts[0] for group in scored]
        golds = [last_number(str(row["answer"])) for row in rows]
        pairs = zip(rollouts, golds, strict=True)
        return Answers(
            right={
                STRICT: tuple(strict.is_right(rollout) for rollout in rollouts),
                LAST: tuple(last_number(rollout.text) == gold for rollout, gold in pairs),
            },
            length=statistics.fmean(rollout.length for rollout in rollouts),
            truncated=statistics.fmean(rollout.finish == "length" for rollout in rollouts),
            groups=scored,
        )

    def all_prompts(self, policy: Policy, engine: Engine, rows: Sequence[Example]) -> dict[str, Answers]:
        return {prompt: self.answers(policy, engine, rows, prompt) for prompt in self.prompts}


def table(measured: Mapping[str, Mapping[str, Answers]]) -> str:
    """Return what was measured, as Markdown: a row for each policy and prompt."""
    rows = [
        [
            policy,
            prompt,
            *(str(interval) for interval in answers.intervals().values()),
            f"{answers.length:.0f}",
            f"{answers.truncated:.1%}",
        ]
        for policy, by_prompt in measured.items()
        for prompt, answers in by_prompt.items()
    ]
    return markdown(("policy", "prompt", STRICT, LAST, "tokens an answer", "truncated"), rows)


def settings(options: argparse.Namespace, *, seed: int = 0) -> Config:
    words = [
        f"model.name={options.model}",
        f"task.name={options.task}",
        f"task.held_out={options.dev}",
        *([f"task.data={options.train}"] if options.train else []),
        "lora.r=32",
        "lora.alpha=64",
        "rollout.prompts=32",
        "rollout.group_size=16",
        "rollout.max_tokens=320",
        "rollout.temperature=1.0",
        "optim.learning_rate=5e-5",
        f"run.seed={seed}",
        f"run.name=seed-{seed}",
        f"run.output_dir={options.output}",
        f"run.max_steps={options.steps}",
        f"run.save_every={options.steps}",
        "track.trackers=[]",
        "evaluate.skip=true",
    ]
    return read_config(overrides=[*words, *options.set]).resolve()


class Study:
    """The data of a study: training rows without the dev split, the dev split, the test set."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        config = settings(options)
        self.task = load_task(config.task)
        strict = {**config.task.options, "scoring": "strict"}
        self.strict = load_task(replace(config.task, options=strict))
        self.split = self.task.split(config.task, 0)
        self.test = load_rows(options.test, task=self.task, config=config.task) if options.test else None
        self.exam = Examination(
            config,
            strict=self.strict,
            worked=worked_rows(self.split, options.shots),
            max_tokens=options.max_tokens,
        )
        if self.test is not None:
            trained = {self.task.key_of(row) for row in self.training_rows()}
            both = sum(self.task.key_of(row) in trained for row in self.test)
            if both:
                raise SystemExit(f"{both} test questions occur in the training rows: remove them there")

    def training_rows(self) -> Sequence[Example]:
        return () if self.split.size is None else [self.split.at(place) for place in range(self.split.size)]

    @property
    def measured_rows(self) -> Sequence[Example]:
        """The rows of the tables: the test set if it is given, otherwise the dev split."""
        return self.split.held_out if self.test is None else self.test

    @property
    def measured_on(self) -> str:
        return f"{len(self.measured_rows)} {'dev' if self.test is None else 'test'} questions"

    def before(self) -> dict[str, Answers]:
        """Measure the model as it comes."""
        config = settings(self.options)
        policy = load_for_generation(config.model, rank=0, trained=None)
        answers = self.exam.all_prompts(policy, Engine(policy, config.engine), self.measured_rows)
        stored = {prompt: one.to_json() for prompt, one in answers.items()}
        write_json(self.options.output / "before.json", {"on": self.measured_on, **stored})
        (self.options.output / "before.txt").write_text(answers["task"].to_text(), encoding="utf-8")
        print(table({"before": answers}), flush=True)
        return answers

    def train(self, seed: int) -> tuple[dict[str, Answers], dict[str, Any]]:
        """Train one seed until its time is over; measure the dev split meanwhile, the rows at the end."""
        config = settings(self.options, seed=seed)
        clock = Clock(60 * self.options.minutes)
        dev: list[dict[str, Any]] = []
        seconds: list[float] = []

        def measure(step: int) -> None:
            with clock.paused():
                answers = self.exam.answers(run.policy, run.engine, self.split.held_out, "task")
            interval = answers.intervals()[STRICT]
            dev.append({"step": step, "seconds": clock.spent(), "strict": asdict(interval)})
            print(f"seed {seed}, step {step}, {clock.spent():.0f} s: dev {interval}", flush=True)

        start = RunStart.new(config, task=self.task.name)
        with GRPORun(config, task=self.task, start=start, functions=UserFunctions(callbacks=(clock,))) as run:
            measure(0)
            for step in run.steps():
                train_step(run, step)
                seconds.append(clock.spent())
                if step % self.options.every == 0:
                    measure(step)
            if dev[-1]["step"] != len(seconds):
                measure(len(seconds))
            after = self.exam.all_prompts(run.policy, run.engine, self.measured_rows)
            curve = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
            folder = run.folder.path
        write_json(folder / "after.json", {prompt: one.to_json() for prompt, one in after.items()})
        (folder / "after.txt").write_text(after["task"].to_text(), encoding="utf-8")
        return after, {
            "seed": seed,
            "steps": len(seconds),
            "seconds": seconds[-1],
            "after": {prompt: one.to_json() for prompt, one in after.items()},
            "dev": dev,
            "curve": [step_of(row, at, self.task) for row, at in zip(curve, seconds, strict=True)],
        }


class Clock(Callback):
    """Counts the time of training, and ends it."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.started: float | None = None
        self.stopped = 0.0
        """Time spent on measurements."""

    def spent(self) -> float:
        return 0.0 if self.started is None else time.monotonic() - self.started - self.stopped

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        if self.started is not None:
            self.stopped += time.monotonic() - began

    def before_rollout(self, run: RunControl) -> None:
        self.started = self.started or time.monotonic()

    def after_update(self, run: RunControl, metrics: Mapping[str, float]) -> None:
        if self.spent() >= self.limit:
            run.stop(f"{self.limit / 60:g} minutes are over")


def worked_rows(split: Split, count: int) -> list[Example]:
    """Return training rows as examples for the few-shot prompt: the first ones with a solution."""
    rows = (split.at(place) for place in range(split.size or count))
    return [row for _, row in zip(range(count), (row for row in rows if row.get("solution")), strict=False)]


def step_of(row: Mapping[str, Any], seconds: float, task: Task) -> dict[str, Any]:
    names = {
        "right": f"reward/{task.accuracy_reward}/mean",
        "reward": "reward/mean",
        "length": "rollout/length",
        "entropy": "policy/entropy",
        "kl": "policy/kl",
        "grad_norm": "optim/grad_norm",
        "step_seconds": "time/step",
    }
    return {"step": row["step"], "seconds": seconds, **{name: row.get(key) for name, key in names.items()}}


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train(study: Study, about: Mapping[str, Any]) -> None:
    options = study.options
    before = study.before()
    free_memory()
    measured, seeds = {"before": before}, []
    for seed in options.seeds:
        after, record = study.train(seed)
        free_memory()
        changes = {
            prompt: {
                reading: asdict(
                    paired_difference(before[prompt].right[reading], after[prompt].right[reading])
                )
                for reading in (STRICT, LAST)
            }
            for prompt in after
        }
        seeds.append({**record, "change": changes})
        measured[f"seed {seed}, {record['steps']} steps, {record['seconds']:.0f} s"] = after
        stored = {prompt: one.to_json() for prompt, one in before.items()}
        result = {**about, "on": study.measured_on, "before": stored, "seeds": seeds}
        write_json(options.output / "result.json", result)
    first = options.output / f"seed-{options.seeds[0]}"
    for name in ("config.yaml", "after.txt"):
        shutil.copyfile(first / name, options.output / name)
    print(f"\n{study.measured_on}, greedy, 95 % intervals\n\n{table(measured)}")
    for one in seeds:
        change = one["change"]["task"][STRICT]
        print(f"seed {one['seed']}: strict {100 * change['mean']:+.1f} points, p = {change['p_value']:.1e}")


def plot(folder: Path) -> None:
    """Draw accuracy against the seconds of training, from result.json."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    figure, field = pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")
    for number, seed in enumerate(result["seeds"]):
        colour, name = f"C{number}", f"seed {seed['seed']}"
        rows = [row for row in seed["curve"] if row["right"] is not None]
        field.plot([r["seconds"] for r in rows], [r["right"] for r in rows], color=colour, lw=0.8, alpha=0.5,
                   label=f"{name}: samples, training questions")  # fmt: skip
        dev = [(row["seconds"], row["strict"]) for row in seed["dev"]]
        field.errorbar(
            [seconds for seconds, _ in dev], [one["mean"] for _, one in dev],
            [[one["mean"] - one["low"] for _, one in dev], [one["high"] - one["mean"] for _, one in dev]],
            color=colour, marker="o", ms=3, capsize=2, label=f"{name}: greedy, dev questions",
        )  # fmt: skip
        test = seed["after"]["task"]["accuracy"][STRICT]
        field.errorbar(
            [1.03 * seed["seconds"]], [test["mean"]],
            [[test["mean"] - test["low"]], [test["high"] - test["mean"]]],
            color="black", marker="s", ms=4, capsize=3, label=f"{name}: greedy, {result['on']}",
        )  # fmt: skip
    before = result["before"]["plain"]["accuracy"][LAST]["mean"]
    field.axhline(before, color="grey", ls=":", label="untrained, last number, test questions")
    field.set(xlabel="seconds of training", ylabel="right", ylim=(0, None))
    field.grid(alpha=0.3)
    field.legend(loc="lower right", fontsize=8)
    figure.savefig(folder / "curve.png", dpi=110)


def main() -> None:
    options = parsed()
    output: Path = options.output
    if options.part == "plot":
        plot(output)
        return
    result = output / ("before.json" if options.part == "before" else "result.json")
    if result.exists():
        raise SystemExit(f"{result} is there already: choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    about = {
        "machine": machine(threads=torch.get_num_threads(), torch=torch.__version__),
        "versions": {
            "groupwise": groupwise.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "command": shlex.join(["python", *sys.argv]),
        "model": options.model,
    }
    if torch.cuda.is_available():
        about["machine"] = f"{torch.cuda.get_device_name()} · {about['machine']}"
    print(about["machine"], flush=True)
    study = Study(options)
    if options.part == "before":
        study.before()
    else:
        train(study, about)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("part", choices=("before", "train", "plot"))
    parser.add_argument("--model", default="tiny", help="a folder in Hugging Face layout")
    parser.add_argument(
        "--task", choices=("gsm8k", "math"), default="gsm8k", help="the prompt: tags or a box"
    )
    parser.add_argument("--train", help="training rows; the dev split is taken from them")
    parser.add_argument("--test", help="test rows, for the final measurement only")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=10.0, help="of training for each seed")
    parser.add_argument("--steps", type=int, default=2000, help="at most; a schedule decays over them")
    parser.add_argument("--every", type=int, default=20, help="steps between measurements on the dev split")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--dev", type=int, default=256, help="training rows held out for the curve")
    parser.add_argument("--shots", type=int, default=4, help="worked examples in the few-shot prompt")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer that is measured")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="any other setting")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    if options.quick:
        options.dev, options.minutes, options.steps, options.every = 4, 0.5, 2, 1
        options.shots, options.max_tokens = 0, 24
        small = ["rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=24", "lora.r=4"]
        options.set = [*small, *options.set]
    return options


if __name__ == "__main__":
    main()
