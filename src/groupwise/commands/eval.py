"""What `groupwise eval` found, written for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from groupwise.config import Config, read_config
from groupwise.config.schema import NO_TASK, ToolsConfig
from groupwise.errors import ConfigError
from groupwise.evaluate.contamination import asked_in_training, unseen
from groupwise.evaluate.intervals import Difference, Interval
from groupwise.evaluate.target import Target, benchmark_named, find_target, source_of
from groupwise.records import Example, Sampling
from groupwise.tasks import TASKS, ExampleStream, Task, isolated, load_rows, load_task, without_data
from groupwise.tasks.code_fingerprint import changed_code, code_of

if TYPE_CHECKING:
    from groupwise.engine.engine import Engine
    from groupwise.evaluate.held_out import Evaluation
    from groupwise.evaluate.strategies import Strategy
    from groupwise.model.policy import Policy


MOST_KINDS = 20
"""Kinds of questions that are listed; more are no help."""


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Write one report of `evaluate_command`."""
    verifier = report.get("verifier", report["task"])
    asked = report["task"] if verifier == report["task"] else f"{report['task']} asked as {verifier}"
    yield f"{asked} · {report['model']} · {report['prompts']} prompts, seed {report['seed']}"
    changes = report.get("change", {})
    yield f"{'':<35}since before training" if changes else ""
    if (nothing := unscored(report)) is not None:
        yield f"  {nothing}"
        return
    k = report["samples"]
    for name in ("greedy", f"avg@{k}", f"maj@{k}", f"pass@{k}", "format"):
        if name in report:
            line = f"  {name:<9}{Interval(**report[name])!s:<22}"
            if name in changes:
                line += f"  {Difference(**changes[name])}"
            yield line.rstrip()
    for name, interval in report.get("rewards", {}).items():
        if name not in report:
            line = f"  {name:<9}{Interval(**interval)!s:<22}"
            if f"reward/{name}" in changes:
                line += f"  {Difference(**changes[f'reward/{name}'])}"
            yield line.rstrip()
    yield ""
    yield from strategy_lines(report)
    yield from question_lines(report)
    yield f"  {report['length']:.1f} tokens an answer, {failures(report)}"
    if report.get("left_out"):
        yield f"  {report['left_out']} examples were left out: the run was trained on them"
    if "unchecked" in report:
        yield f"  whether some of these were trained on cannot be told: {report['unchecked']}"
    if "edited" in report:
        parts = ", ".join(report["edited"])
        yield f"  the task's code is not what it was in training ({parts}): nothing is compared with before"
    if "saved" in report:
        yield f"  saved in {report['saved']}, answers to read beside it"


def failures(report: Mapping[str, Any]) -> str:
    """Count the answers that could not be scored, with the most frequent cause."""
    causes = Counter(question["error"] for question in report.get("questions", ()) if question.get("error"))
    words = f"{report['failed']} answers could not be scored"
    if not causes:
        return words
    ((cause, _),) = causes.most_common(1)
    return f"{words}, most often: {' '.join(str(cause).split())}"


def unscored(report: Mapping[str, Any]) -> str | None:
    """Say that no answer at all could be scored, so that nothing was measured; None where some was."""
    if report["failed"] < report["prompts"] * (1 + report["samples"]):
        return None
    return f"nothing was measured: {failures(report)}"


def strategy_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Set the accuracy of test-time strategies against the tokens they spend."""
    strategies = report.get("strategies", {})
    if not strategies:
        return
    yield f"  {'strategy':<20}{'accuracy':<24}{'tokens a question':>17}"
    for name, one in strategies.items():
        yield f"  {name:<20}{Interval(**one['accuracy'])!s:<24}{one['tokens']:>17.1f}"
    yield ""


def question_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say how the questions divide into those that are always, sometimes and never answered."""
    questions = report.get("questions", ())
    if not questions:
        return
    right = [question["right"] for question in questions]
    always, never = right.count(report["samples"]), right.count(0)
    yield (
        f"  of {len(right)} questions {always} are always right, "
        f"{len(right) - always - never} sometimes, {never} never"
    )
    yield from kind_lines(questions, samples=report["samples"])


def kind_lines(questions: Sequence[Mapping[str, Any]], *, samples: int) -> Iterator[str]:
    """Set the kinds of questions beside each other, the easiest first."""
    kinds: dict[str, list[float]] = {}
    for question in questions:
        if question["kind"] is not None:
            kinds.setdefault(question["kind"], []).append(question["right"] / samples)
    if 1 < len(kinds) <= MOST_KINDS:
        for kind, shares in sorted(kinds.items(), key=lambda item: -fmean(item[1])):
            yield f"    {kind:<28}{100 * fmean(shares):>5.1f} % of {len(shares)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """What the user asks for, besides what is measured."""

    samples: int | None = None
    examples: int | None = None
    seed: int | None = None
    output: str | None = None
    """A folder for the results. None: a run's own, or none."""
    strategies: Sequence[str] = ()
    """Test-time strategies to measure besides, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalJob:
    """What to ask, settled before anything heavy loads."""

    name: str
    task: Task
    examples: Sequence[Example]
    left_out: int
    """Rows that the run was trained on."""
    unchecked: str | None
    """Why it cannot be told whether it was trained on some."""
    sampling: Sampling
    samples: int
    seed: int
    reward_seconds: float
    tools: ToolsConfig


def evaluate_command(
    target: str,
    *,
    task: str | None = None,
    data: str | None = None,
    benchmarks: Sequence[str] = (),
    overrides: Sequence[str] = (),
    **wishes: Any,
) -> list[dict[str, Any]]:
    """Measure a run, a checkpoint, an adapter or a model on one task or on benchmarks: a report for each.

    A run brings its settings and its task, and on that is compared with what it could do before training;
    results are then also saved in its folder. `wishes` are those of `Wish`.
    """
    if benchmarks and (task or data):
        raise ConfigError("a benchmark brings its task and its data: leave --task and --data out")
    found, wish = find_target(target), EvalOptions(**wishes)
    if benchmarks:
        exams = [benchmark_exam(name, found, overrides, wish) for name in benchmarks]
    else:
        exams = [task_exam(found, overrides, wish, task=task, data=data)]
    from groupwise.evaluate.held_out import make_writable
    from groupwise.evaluate.strategies import strategy_named

    tools = any(exam.task.tools for exam in exams)
    strategies = {name: strategy_named(name, tools=tools) for name in wish.strategies}
    if (folder := folder_for(found, wish)) is not None:
        make_writable(folder)
    with ExitStack() as workers:
        exams = [replace(exam, task=workers.enter_context(isolated(exam.task))) for exam in exams]
        policy, engine = load_target(found, settings(found, overrides).resolve())
        return [
            report(
                exam,
                take(exam, policy, engine),
                spendings(exam, policy, engine, strategies),
                target=found,
                wish=wish,
            )
            for exam in exams
        ]


def folder_for(target: Target, wish: EvalOptions) -> Path | None:
    """Return where results are saved: where the user says, or with the run."""
    return Path(wish.output) if wish.output else target.run.evaluations if target.run else None


def settings(target: Target, overrides: Sequence[str]) -> Config:
    config = read_config(target.settings, overrides=overrides)
    return replace(config, model=replace(config.model, name=target.base or config.model.name))


def other_task(config: Config, name: str, overrides: Sequence[str]) -> Config:
    """Return the settings with the task of this name, whose data and options are those in the overrides.

    The run's own task, named again, keeps what the run gave it.
    """
    if name == config.task.name:
        return config
    given = read_config(overrides=overrides).task
    other = replace(
        config.task,
        name=name,
        options=given.options,
        data=given.data,
        test_data=given.test_data,
        columns=given.columns,
    )
    if name.endswith(".py") and load_task(other).name == config.task.name:
        return replace(config, task=replace(config.task, name=name))  # the file of a task that Python knew
    return replace(config, task=other)


def task_exam(
    target: Target, overrides: Sequence[str], wish: EvalOptions, *, task: str | None, data: str | None
) -> EvalJob:
    """Ask what the task holds out, or all of `data`."""
    config = settings(target, overrides)
    if task is not None:
        config = other_task(config, task, overrides)
    elif config.task.name == NO_TASK:
        raise ConfigError(f"{target.name} was trained on rows alone: say what to measure by --task")
    elif not is_loadable(config.task.name):
        raise ConfigError(
            f"{target.name} learned a task named {config.task.name!r} that was defined in Python: "
            "give the file that defines it by --task FILE.py"
        )
    return settle(None, config.resolve(), target, data=data, wish=wish)


def benchmark_exam(name: str, target: Target, overrides: Sequence[str], wish: EvalOptions) -> EvalJob:
    """Ask a benchmark's questions: of a run in the way that it learned to answer, if its task can."""
    benchmark = benchmark_named(name)
    config = settings(target, overrides)
    data = source_of(benchmark, config.evaluate.data_dir)
    own = target.run is not None and config.task.name == benchmark.task
    if not own and not (target.run is not None and data and can_ask(config, data)):
        config = settings(target, [f"rollout.max_tokens={benchmark.max_tokens}", *overrides])
        config = other_task(config, benchmark.task, overrides)
    if data:  # the run's names for columns are those of its own data
        config = replace(config, task=replace(config.task, columns={}))
    return settle(name, config.resolve(), target, data=data, wish=wish)


def can_ask(config: Config, data: str) -> bool:
    """Whether the task of a run can ask these rows and has what it takes to judge the answers."""
    plain = without_data(config.task)
    if not is_loadable(plain.name):
        return False
    try:
        task = load_task(plain)
        if plain.name in TASKS and not task.columns:
            return False  # what its rows hold is made for it alone
        task.ask(load_rows(data, task=task, config=plain, split="test")[0])
    except ConfigError:
        return False
    return True


def is_loadable(task: str) -> bool:
    """Whether a task can be loaded by its name: one that was defined in Python cannot."""
    return task in TASKS or task.endswith(".py")


def settle(
    name: str | None, config: Config, target: Target, *, data: str | None, wish: EvalOptions
) -> EvalJob:
    """Load the task and choose the examples."""
    learn = config.task
    task = load_task(without_data(learn) if data else learn)
    rows: Sequence[Example] = (
        load_rows(data, task=task, config=learn, split="test")
        if data
        else task.split(learn, config.run.seed).held_out
    )
    if not rows:
        raise ConfigError(f"task {task.name} holds no examples out: give some by --data FILE")
    asked, unchecked = trained_on(config, target, task=task, data=data)
    kept = unseen(rows, task=task, asked=asked) if asked else rows
    return EvalJob(
        name=name or task.name,
        task=task,
        examples=kept[: wish.examples],
        left_out=len(rows) - len(kept),
        unchecked=unchecked,
        sampling=config.rollout.sampling,
        samples=config.evaluate.samples if wish.samples is None else wish.samples,
        seed=config.run.seed if wish.seed is None else wish.seed,
        reward_seconds=learn.reward_seconds,
        tools=config.tools,
    )


def trained_on(
    config: Config, target: Target, *, task: Task, data: str | None
) -> tuple[set[str], str | None]:
    """Return what the run was asked in training that the rows may ask again, and why that is unknown."""
    if target.run is None:
        return set(), None
    trained = read_config(target.run.config).resolve()
    # What the run itself holds out, and nothing more; or a stream, which keeps its own sides apart.
    count = trained.task.held_out if isinstance(task.examples, ExampleStream) else config.task.held_out
    if not data and replace(config.task, held_out=count) == trained.task:
        return set(), None
    try:
        return asked_in_training(trained, cursor=target.cursor, task=task, named=config.task.name), None
    except ConfigError as error:
        return set(), str(error)


def load_target(target: Target, config: Config) -> tuple[Policy, Engine]:
    from groupwise.engine.engine import Engine
    from groupwise.model.load import load_policy

    policy = load_policy(config.model, replace(config.lora, r=target.rank), trained=target.trained)
    return policy, Engine(policy, config.engine)


def take(exam: EvalJob, policy: Policy, engine: Engine) -> Evaluation:
    from groupwise.evaluate.held_out import evaluate
    from groupwise.rollout.collect import Tools

    return evaluate(
        exam.task,
        exam.examples,
        codec=policy,
        engine=engine,
        sampling=exam.sampling,
        samples=exam.samples,
        seed=exam.seed,
        seconds=exam.reward_seconds,
        tools=Tools.of(exam.task.tools, exam.tools, state=exam.task.state),
    )


def spendings(
    exam: EvalJob, policy: Policy, engine: Engine, strategies: Mapping[str, Strategy]
) -> dict[str, Any]:
    """Return what each test-time strategy reaches and spends."""
    from groupwise.evaluate.strategies import Sampler
    from groupwise.evaluate.strategies.strategy_registry import spend
    from groupwise.rollout.collect import Tools

    draws = Sampler(
        codec=policy,
        engine=engine,
        sampling=exam.sampling,
        seed=exam.seed,
        tools=Tools.of(exam.task.tools, exam.tools, state=exam.task.state),
    )
    found = {
        name: spend(strategy, exam.task, exam.examples, draws=draws, seconds=exam.reward_seconds)
        for name, strategy in strategies.items()
    }
    return {name: {"accuracy": asdict(one.accuracy), "tokens": one.tokens} for name, one in found.items()}


def report(
    exam: EvalJob, result: Evaluation, strategies: dict[str, Any], *, target: Target, wish: EvalOptions
) -> dict[str, Any]:
    """Return what was found, for scripts and for `report_lines`, saved where it belongs.

    Where that fails, "unsaved" says why: what was measured is not lost with it.
    """
    from groupwise.evaluate.held_out import (
        cannot_save,
        compare,
        read_evaluation,
        unused_name,
        write_evaluation,
    )

    before = read_evaluation(target.run, "before") if target.run else None
    about: dict[str, Any] = {
        "target": target.name,
        "model": target.description,
        "task": exam.name,
        "verifier": exam.task.name,
        "prompts": len(exam.examples),
        "left_out": exam.left_out,
        **({"unchecked": exam.unchecked} if exam.unchecked else {}),
        "samples": exam.samples,
        "seed": exam.seed,
        **{name: asdict(interval) for name, interval in result.intervals().items()},
        **{name: asdict(interval) for name, interval in result.details().items()},
        "rewards": {name: asdict(interval) for name, interval in result.reward_intervals().items()},
        "failed": result.failed,
        "length": result.length,
        **({"strategies": strategies} if strategies else {}),
    }
    edited = changed_code(target.code, code_of(exam.task))
    if before is not None and edited and exam.task.name not in TASKS:
        about["edited"] = edited
    elif before is not None and not edited and (changes := compare(before, result)):
        about["change"] = {name: asdict(change) for name, change in changes.items()}
    if (folder := folder_for(target, wish)) is not None:
        # A name of its own: nothing that was measured earlier is overwritten.
        again = exam.name if wish.output else f"again-{Path(target.description).name}"
        try:
            path = write_evaluation(folder, unused_name(folder, again), result, about=about)
            about["saved"] = str(path)
        except OSError as error:
            about["unsaved"] = cannot_save(folder, error)
    return about | {"questions": [asdict(question) for question in result.questions]}
