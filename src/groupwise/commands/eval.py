"""`groupwise eval`: evaluate a run, a checkpoint, an adapter or a model, and print the results.

`evaluate_command` prepares an `EvalJob` for the task or for each benchmark, runs them on one loaded model and
returns a report for each. `report_lines` formats a report as text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.commands.options import loading
from groupwise.config import Config, read_config
from groupwise.config.schema import NO_TASK, AgentConfig, TaskConfig, ToolsConfig
from groupwise.errors import ConfigError
from groupwise.evaluate.contamination import TrainingRecord, lineage_of_target, prompts_in_training, unseen
from groupwise.evaluate.intervals import Difference, Interval, MeanReward
from groupwise.evaluate.target import Target, benchmark_named, find_target, source_of
from groupwise.records import Example, Sampling
from groupwise.tasks import (
    TASKS,
    ExampleStream,
    Task,
    is_loadable,
    isolated,
    load_rows,
    load_task,
    without_data,
)
from groupwise.tasks.task import correct_rule
from groupwise.tasks.user_code import changed_code, code_of, load_function, of_task

if TYPE_CHECKING:
    from groupwise.engine.engine import Engine
    from groupwise.evaluate.held_out import Evaluation
    from groupwise.evaluate.strategies import Strategy
    from groupwise.model.policy import Policy


MOST_KINDS = 40
"""The breakdown by kind of question is shown only up to this many kinds."""


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one report of `evaluate_command`."""
    verifier = report.get("verifier", report["task"])
    title = report["task"] if verifier == report["task"] else f"{report['task']} with the {verifier} verifier"
    yield f"{title} · {report['model']} · {report['prompts']} prompts, seed {report['seed']}"
    if report.get("correct"):
        yield f"an answer is correct if {report['correct']}"
    changes = report.get("change", {})
    yield f"{'':<35}since before training" if changes else ""
    if (reason := unscored(report)) is not None:
        yield f"  {reason}"
        return
    k = report["samples"]
    for name in ("greedy", f"avg@{k}", f"maj@{k}", f"pass@{k}", "format"):
        if name in report:
            line = f"  {name:<9}{Interval(**report[name])!s:<22}"
            if name in changes:
                line += f"  {Difference(**changes[name])}"
            yield line.rstrip()
    yield from reward_lines(report)
    yield ""
    yield from strategy_lines(report)
    yield from question_lines(report)
    yield f"  {report['length']:.1f} tokens per completion, {failures(report)}"
    if report.get("left_out"):
        yield f"  {report['left_out']} examples were skipped: the model was trained on them"
    if "unchecked" in report:
        yield f"  could not check for training examples among these: {report['unchecked']}"
    if "edited" in report:
        parts = ", ".join(report["edited"])
        yield f"  the task's code has changed since training ({parts}): no comparison with before training"
    if "saved" in report:
        yield f"  results saved in {report['saved']}, completions next to it"


def reward_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each reward: mean, standard deviation, interval of the mean, and the change."""
    rewards, changes = report.get("rewards", {}), report.get("change", {})
    if not rewards:
        return
    width = max(9, 2 + max(map(len, rewards)))
    yield f"  {'reward':<{width}}mean ± spread of the sampled completions"
    for name, stored in rewards.items():
        reward = MeanReward(**stored)
        ends = f"[{reward.low:.3f}, {reward.high:.3f}]"
        line = f"  {name:<{width}}{reward.mean:.3f} ± {reward.std:.3f}  {ends:<18}"
        if f"reward/{name}" in changes:
            change = Difference(**changes[f"reward/{name}"])
            line += f"  {change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
        yield line.rstrip()


def failures(report: Mapping[str, Any]) -> str:
    """Return the number of completions that could not be scored, with the most frequent cause."""
    causes = Counter(question["error"] for question in report.get("questions", ()) if question.get("error"))
    count = f"{report['failed']} completions could not be scored"
    if not causes:
        return count
    ((cause, _),) = causes.most_common(1)
    return f"{count}; most frequent error: {' '.join(str(cause).split())}"


def unscored(report: Mapping[str, Any]) -> str | None:
    """Return an error message if no completion could be scored; None otherwise."""
    if report["failed"] < report["prompts"] * (1 + report["samples"]):
        return None
    return f"no results: {failures(report)}"


def strategy_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of test-time strategies: accuracy and tokens per question."""
    strategies = report.get("strategies", {})
    if not strategies:
        return
    yield f"  {'strategy':<20}{'accuracy':<24}{'tokens/question':>17}"
    for name, result in strategies.items():
        yield f"  {name:<20}{Interval(**result['accuracy'])!s:<24}{result['tokens']:>17.1f}"
    yield ""


def question_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many questions are answered correctly always, sometimes and never."""
    questions = report.get("questions", ())
    if not questions:
        return
    right = [question["right"] for question in questions]
    always, never = right.count(report["samples"]), right.count(0)
    yield (
        f"  {len(right)} questions: {always} always correct, "
        f"{len(right) - always - never} sometimes, {never} never"
    )
    yield from kind_lines(report)


def kind_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the accuracy for each kind of question, easiest first, and its change since training began."""
    kinds, metric = report.get("kinds", {}), f"avg@{report['samples']}"
    if not 1 < len(kinds) <= MOST_KINDS:
        return
    width = 2 + max(map(len, kinds))
    yield f"  {metric} by kind of question"
    for kind, result in kinds.items():
        line = f"    {kind:<{width}}{Interval(**result[metric])!s:<22} of {result['prompts']:<5}"
        if "change" in result:
            line += str(Difference(**result["change"]))
        yield line.rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """The user's options, apart from what to evaluate."""

    samples: int | None = None
    examples: int | None = None
    seed: int | None = None
    output: str | None = None
    """Folder for the results. None: the run's folder, if the target is a run."""
    strategies: Sequence[str] = ()
    """Names of test-time strategies to evaluate too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalJob:
    """One evaluation: a task, its examples and how to sample. Built before torch loads."""

    name: str
    task: Task
    examples: Sequence[Example]
    left_out: int
    """Number of rows skipped because the run was trained on them."""
    unchecked: str | None
    """Why the check for training examples was impossible; None if it ran."""
    sampling: Sampling
    samples: int
    seed: int
    limits: TaskConfig
    """Time limit, concurrency and workers of the rewards."""
    tools: ToolsConfig
    agent: AgentConfig


def evaluate_command(
    target: str,
    *,
    task: str | None = None,
    data: str | None = None,
    benchmarks: Sequence[str] = (),
    overrides: Sequence[str] = (),
    **option_values: Any,
) -> list[dict[str, Any]]:
    """Evaluate a run, a checkpoint, an adapter or a model on one task or on benchmarks; return the reports.

    A run provides its settings and its task. On its own task it is compared with the evaluation before
    training, and the results are saved in its folder. `option_values` are the fields of `EvalOptions`.
    """
    if benchmarks and (task or data):
        raise ConfigError("a benchmark has its own task and data; remove --task and --data")
    resolved, options = find_target(target), EvalOptions(**option_values)
    if benchmarks:
        jobs = [benchmark_job(name, resolved, overrides, options) for name in benchmarks]
    else:
        jobs = [task_job(resolved, overrides, options, task=task, data=data)]
    from groupwise.evaluate.held_out import make_writable
    from groupwise.evaluate.strategies import strategy_named

    tools = any(job.task.is_multi_turn for job in jobs)
    strategies = {name: strategy_named(name, tools=tools) for name in options.strategies}
    if (folder := folder_for(resolved, options)) is not None:
        make_writable(folder)
    with ExitStack() as workers:
        jobs = [
            replace(job, task=workers.enter_context(isolated(job.task, workers=job.limits.reward_workers)))
            for job in jobs
        ]
        with loading(f"PyTorch and {resolved.description}"):
            from groupwise.model.load import load_reward_models

        policy, engine = load_target(resolved, settings(resolved, overrides).resolve())
        for job in jobs:
            load_reward_models(job.task.rewards, policy.device)
        return [
            report(
                job,
                run_job(job, policy, engine),
                strategy_results(job, policy, engine, strategies),
                target=resolved,
                options=options,
            )
            for job in jobs
        ]


def folder_for(target: Target, options: EvalOptions) -> Path | None:
    """Return the folder for the results: the user's, or that of the run."""
    return Path(options.output) if options.output else target.run.evaluations if target.run else None


def settings(target: Target, overrides: Sequence[str]) -> Config:
    known = {} if target.base is None else {"model": target.base}
    config = read_config(target.settings, overrides=overrides, defaults=known)
    if not any(override.startswith(("engine.quantization", "engine.kv_cache")) for override in overrides):
        config = replace(config, engine=config.engine.without_fp8())  # which the run was trained with
    return replace(config, model=replace(config.model, name=target.base or config.model.name))


def other_task(config: Config, name: str, overrides: Sequence[str]) -> Config:
    """Return the settings for another task, with data and options from the overrides.

    If the task is the run's own, its settings stay.
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
        test_sets=given.test_sets,
        weights=given.weights,
        correct_at=given.correct_at,
    )
    if name.endswith(".py") and load_task(other).name == config.task.name:
        return replace(
            config, task=replace(config.task, name=name)
        )  # the file of a task that was defined in Python
    return replace(config, task=other)


def task_job(
    target: Target, overrides: Sequence[str], options: EvalOptions, *, task: str | None, data: str | None
) -> EvalJob:
    """Prepare an evaluation on the task's held-out examples, or on all rows of `data`."""
    config = settings(target, overrides)
    if task is not None:
        config = other_task(config, task, overrides)
    elif config.task.name == NO_TASK:
        raise ConfigError(f"{target.name} was trained on data without a task; choose one with --task")
    elif not is_loadable(config.task.name):
        raise ConfigError(
            f"{target.name} was trained on a task named {config.task.name!r} that was defined in Python; "
            "pass the file that defines it: --task FILE.py"
        )
    return prepare_job(None, config.resolve(), target, data=data, options=options)


def benchmark_job(name: str, target: Target, overrides: Sequence[str], options: EvalOptions) -> EvalJob:
    """Prepare a benchmark. A run keeps the prompt and verifier of its own task if they fit the data."""
    benchmark = benchmark_named(name)
    config = settings(target, overrides)
    data = source_of(benchmark, config.evaluate.data_dir)
    own = target.run is not None and config.task.name == benchmark.task
    if not own and not (target.run is not None and data and fits_task(config, data)):
        config = settings(target, [f"rollout.max_tokens={benchmark.max_tokens}", *overrides])
        config = other_task(config, benchmark.task, overrides)
    if data:  # the run's column mapping belongs to its own data
        config = replace(config, task=replace(config.task, columns={}))
    return prepare_job(name, config.resolve(), target, data=data, options=options)


def fits_task(config: Config, data: str) -> bool:
    """Whether the task of a run can build prompts from these rows and score the completions."""
    plain = without_data(config.task)
    if not is_loadable(plain.name):
        return False
    try:
        task = load_task(plain)
        if plain.name in TASKS and not task.columns:
            return False  # the task accepts only the rows that it generates
        task.ask(load_rows(data, task=task, config=plain, split="test")[0])
    except ConfigError:
        return False
    return True


def prepare_job(
    name: str | None, config: Config, target: Target, *, data: str | None, options: EvalOptions
) -> EvalJob:
    """Load the task and select the examples."""
    learn = config.task
    task = load_task(without_data(learn) if data else learn)
    rows: Sequence[Example] = (
        load_rows(data, task=task, config=learn, split="test")
        if data
        else task.split(learn, config.run.seed).held_out
    )
    if not rows:
        raise ConfigError(f"task {task.name} has no held-out examples; pass some with --data FILE")
    trained, unchecked = trained_on(config, target, task=task, data=data)
    remaining = unseen(rows, task=task, trained=trained) if trained else rows
    return EvalJob(
        name=name or task.name,
        task=task,
        examples=remaining[: options.examples],
        left_out=len(rows) - len(remaining),
        unchecked=unchecked,
        sampling=config.rollout.sampling,
        samples=config.evaluate.samples if options.samples is None else options.samples,
        seed=config.run.seed if options.seed is None else options.seed,
        limits=learn,
        tools=config.tools,
        agent=config.agent,
    )


def trained_on(
    config: Config, target: Target, *, task: Task, data: str | None
) -> tuple[set[str], str | None]:
    """Return the training prompts that the rows may repeat, or the reason why they are unknown."""
    trained: set[str] = set()
    try:
        lineage = lineage_of_target(target)
    except ConfigError as error:
        return trained, str(error)
    unchecked: str | None = None
    for record in lineage:
        try:
            trained |= trained_by(record, config, task=task, data=data)
        except ConfigError as error:
            unchecked = unchecked or str(error)
    return trained, unchecked


def trained_by(record: TrainingRecord, config: Config, *, task: Task, data: str | None) -> set[str]:
    """Return the prompts of one training that the rows may repeat."""
    if record.prompts is not None:
        return set(record.prompts)
    trained = record.settings
    # No overlap is possible on the run's own held-out examples, or on a stream, which is split by itself.
    count = trained.task.held_out if isinstance(task.examples, ExampleStream) else config.task.held_out
    same = replace(config.task, held_out=count) == trained.task and config.run.seed == trained.run.seed
    if not data and same:
        return set()
    return prompts_in_training(trained, cursor=record.cursor, task=task, named=config.task.name)


def load_target(target: Target, config: Config) -> tuple[Policy, Engine]:
    from groupwise.engine.engine import Engine
    from groupwise.model.grammar import compiled_grammar
    from groupwise.model.load import load_policy

    policy = load_policy(config.model, replace(config.lora, r=target.rank), trained=target.trained)
    if (name := config.rollout.logits_processor) is not None:
        policy.use_logits_processor(name, load_function("rollout.logits_processor", name))
    policy.grammar = compiled_grammar(config, policy, policy.end_tokens)
    return policy, Engine(policy, config.engine)


def run_job(job: EvalJob, policy: Policy, engine: Engine) -> Evaluation:
    from groupwise.evaluate.held_out import evaluate
    from groupwise.serve.agent_endpoint import multi_turn

    return evaluate(
        job.task,
        job.examples,
        codec=policy,
        engine=engine,
        sampling=job.sampling,
        samples=job.samples,
        seed=job.seed,
        seconds=job.limits.reward_seconds,
        concurrency=job.limits.reward_concurrency,
        tools=multi_turn(job.task, job.tools, job.agent),
    )


def strategy_results(
    job: EvalJob, policy: Policy, engine: Engine, strategies: Mapping[str, Strategy]
) -> dict[str, Any]:
    """Return accuracy and tokens per question of each test-time strategy."""
    from groupwise.evaluate.strategies import Sampler, spend
    from groupwise.serve.agent_endpoint import multi_turn

    draws = Sampler(
        codec=policy,
        engine=engine,
        sampling=job.sampling,
        seed=job.seed,
        tools=multi_turn(job.task, job.tools, job.agent),
    )
    results = {
        name: spend(
            strategy,
            job.task,
            job.examples,
            draws=draws,
            seconds=job.limits.reward_seconds,
            concurrency=job.limits.reward_concurrency,
        )
        for name, strategy in strategies.items()
    }
    return {
        name: {"accuracy": asdict(result.accuracy), "tokens": result.tokens}
        for name, result in results.items()
    }


def report(
    job: EvalJob, result: Evaluation, strategies: dict[str, Any], *, target: Target, options: EvalOptions
) -> dict[str, Any]:
    """Build the report of an evaluation and save it, if there is a folder for it.

    If saving fails, the report has the reason under "unsaved", so that the results are not lost.
    """
    from groupwise.evaluate.held_out import (
        cannot_save,
        compare,
        kind_summary,
        read_evaluation,
        unused_name,
        write_evaluation,
    )

    before = read_evaluation(target.run, "before") if target.run else None
    about: dict[str, Any] = {
        "target": target.name,
        "model": target.description,
        "task": job.name,
        "verifier": job.task.name,
        "prompts": len(job.examples),
        "left_out": job.left_out,
        **({"unchecked": job.unchecked} if job.unchecked else {}),
        "samples": job.samples,
        "seed": job.seed,
        **{name: asdict(interval) for name, interval in result.intervals().items()},
        **{name: asdict(interval) for name, interval in result.details().items()},
        "correct": correct_rule(job.task),
        "rewards": {name: asdict(reward) for name, reward in result.reward_intervals().items()},
        "failed": result.failed,
        "length": result.length,
        **({"strategies": strategies} if strategies else {}),
    }
    edited = changed_code(of_task(target.code), code_of(job.task))
    if before is not None and edited and job.task.name not in TASKS:
        about["edited"] = edited
    elif before is not None and not edited and (changes := compare(before, result)):
        about["change"] = {name: asdict(change) for name, change in changes.items()}
    about["kinds"] = kind_summary(before if "change" in about else None, result)
    if (folder := folder_for(target, options)) is not None:
        # An unused name: earlier results are not overwritten.
        model = Path(target.description).name
        benchmark = "" if job.name == job.task.name else f"{job.name}-"
        again = job.name if options.output else f"again-{benchmark}{model}"
        try:
            path = write_evaluation(folder, unused_name(folder, again), result, about=about)
            about["saved"] = str(path)
        except OSError as error:
            about["unsaved"] = cannot_save(folder, error)
    return about | {"questions": [asdict(question) for question in result.questions]}
