"""The `groupwise` command. Nothing heavy is imported before the user's words have been checked."""

from __future__ import annotations

import inspect
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.commands.chat import chat
from groupwise.commands.doctor import doctor
from groupwise.commands.evolve import evolve
from groupwise.commands.index import index_app
from groupwise.commands.runs import compare, report, runs, watch
from groupwise.commands.serve import serve, serve_rollouts
from groupwise.commands.sft import settings_file, sft, with_task
from groupwise.commands.weights import convert, merge, quantize
from groupwise.config import FLAGS, Config, dump_config, read_config
from groupwise.config.coerce import between
from groupwise.errors import ConfigError, InvariantError, RemoteRankError

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""Any word the parser rejects. Taken from here because typer's parser has moved between packages."""

app = typer.Typer(
    help="Teach language models to reason with GRPO: each answer is reinforced relative to its group.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(index_app, name="index")

what = partial(typer.Option, show_default=False, rich_help_panel="What to learn")
how = partial(typer.Option, show_default=False, rich_help_panel="How to learn")
where = partial(typer.Option, show_default=False, rich_help_panel="Where it goes")
start = partial(typer.Option, show_default=False, rich_help_panel="Starting point")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 2 the user's mistake, 3 a broken promise, 130 Ctrl-C."""
    # Read when torch starts its threads. A short spin keeps them quick on idle cores; a long one, the
    # default, takes the cores that others need.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a letter that the terminal lacks ends no command
    try:
        code = app(args=arguments, prog_name="groupwise", standalone_mode=False)
    except USAGE_ERROR as error:
        return fail(error.format_message(), code=2)  # type: ignore[attr-defined]
    except ConfigError as error:
        return fail(str(error), code=2, notes=getattr(error, "__notes__", ()))
    except InvariantError as error:
        return fail(str(error), code=3, notes=getattr(error, "__notes__", ()))
    except RemoteRankError as error:
        return error.code  # the leader of the processes says it
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return code if isinstance(code, int) else 0


def fail(sentence: str, *, code: int, notes: Sequence[str] = ()) -> int:
    # Of several processes that found the same mistake in the same words, one speaks.
    if notes or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"groupwise {metadata.version('groupwise')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(
    epilog="Anything else is set as section.key=value, such as algo.loss=gspo; `groupwise config` lists all."
)
def train(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK|SECTION.KEY=VALUE", help="A task, built in or a Python file; any settings."
        ),
    ] = None,
    config: Annotated[Path | None, start(help="Settings from a YAML file.")] = None,
    resume: Annotated[Path | None, start(metavar="RUN", help="Go on with the run in this folder.")] = None,
    model: Annotated[str | None, what(help="tiny (built in), a Hugging Face name, or a folder.")] = None,
    task: Annotated[str | None, what(help="A built-in task: see `groupwise tasks`.")] = None,
    data: Annotated[str | None, what(help="Examples from a file or a Hugging Face dataset.")] = None,
    max_examples: Annotated[int | None, what(help="Use only this many examples; 0: all.")] = None,
    max_steps: Annotated[int | None, how(help="Steps to train.")] = None,
    learning_rate: Annotated[float | None, how(help="Of AdamW.")] = None,
    batch_size: Annotated[int | None, how(help="Prompts in a step.")] = None,
    gradient_accumulation_steps: Annotated[int | None, how(help="Multiplies the batch size.")] = None,
    group_size: Annotated[int | None, how(help="Answers to each prompt.")] = None,
    max_tokens: Annotated[int | None, how(help="Longest answer.")] = None,
    temperature: Annotated[float | None, how(help="Of sampling.")] = None,
    beta: Annotated[float | None, how(help="Weight of the KL penalty.")] = None,
    lora_r: Annotated[int | None, how(help="Rank of the adapters; 0 trains every weight.")] = None,
    loss: Annotated[str | None, how(help="grpo, bnpo, dapo, dr_grpo, gspo or cispo.")] = None,
    advantage: Annotated[str | None, how(help="grpo, dr_grpo, rloo or gdpo.")] = None,
    seed: Annotated[int | None, how(help="Of all randomness.")] = None,
    skip_evaluation: Annotated[bool | None, how("--skip-evaluation", help="No held-out accuracy.")] = None,
    output_dir: Annotated[str | None, where(help="Folder of all runs.")] = None,
    run_name: Annotated[str | None, where(help="Folder of this run, under the output folder.")] = None,
    project_name: Annotated[str | None, where(help="Project in the trackers.")] = None,
    track: Annotated[
        list[str] | None, where(metavar="NAME", help="trackio, wandb, tensorboard; repeatable.")
    ] = None,
    no_trackio: Annotated[bool | None, where("--no-trackio", help="Track in the run folder only.")] = None,
) -> None:
    """Train a model. Without arguments: the built-in model learns Countdown on this machine."""
    flags = {name: context.params[name] for name in FLAGS if context.params[name] not in (None, (), [])}
    settings = training_config(words or [], config=config, resume=resume, flags=flags).resolve()
    from groupwise.model.resolve import local_folder
    from groupwise.tasks import TASKS, load_task, read_task_file, task_of
    from groupwise.tracking.trackers import tracker_names

    name = settings.task.name
    if resume is not None and name not in TASKS and not name.endswith(".py"):
        raise resumed_in_python(name, resume)
    # Before torch, so that a mistake in any of these is answered at once.
    if resume is None and name.endswith(".py"):
        file = read_task_file(Path(name).expanduser())
        settings = training_config(
            words or [], config=config, resume=None, flags=flags, defaults=file.settings
        ).resolve()
        loaded = task_of(file, settings.task)
    else:
        loaded = load_task(settings.task)
    tracker_names(settings.track)
    local_folder(settings.model.name)
    from groupwise.training import train as run_training

    run_training(settings, resume=resume, task=loaded)


def resumed_in_python(task: str, run: Path) -> ConfigError:
    return ConfigError(
        f"the task {task!r} of {run} was defined in Python: go on there, by "
        f"groupwise.train(task, resume={str(run)!r})"
    )


def training_config(
    words: Sequence[str],
    *,
    config: Path | None,
    resume: Path | None,
    flags: dict[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Sort the free words into a task and overrides, and read the settings they add up to."""
    overrides = [word for word in words if "=" in word]
    # A built-in task may stand without --task; what is none of them is refused below.
    files = [word for word in words if "=" not in word and (word.endswith(".py") or word.isidentifier())]
    for word in words:
        if word not in overrides and word not in files:
            raise ConfigError(
                f"cannot tell what {word!r} is: a task file ends in .py, a built-in task is one word, "
                "a setting is written section.key=value"
            )
    flags = with_task(flags, files)
    return read_config(settings_file(config, resume), overrides=overrides, flags=flags, defaults=defaults)


app.command(epilog="Anything else is set as section.key=value, such as optim.schedule=cosine.")(sft)
app.command(epilog="Anything else is set as section.key=value, such as evolve.share=0.2.")(evolve)
app.command(epilog="Anything else is set as section.key=value, such as model.dtype=bfloat16.")(chat)
app.command()(doctor)
app.command()(merge)
app.command()(quantize)
app.command()(convert)
app.command(epilog="Anything else is set as section.key=value, such as model.dtype=bfloat16.")(serve)
app.command(name="serve-rollouts")(serve_rollouts)


@app.command(name="eval", epilog="Anything else is set as section.key=value, such as rollout.max_tokens=512.")
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="A run, checkpoint, adapter or model: folder or name.")
    ],
    words: Annotated[list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings.")] = None,
    task: Annotated[str | None, typer.Option(help="A task; for a run, its own by default.")] = None,
    data: Annotated[str | None, typer.Option(help="Examples from a file or a Hugging Face dataset.")] = None,
    benchmark: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="gsm8k, math500 or countdown; repeatable."),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Read benchmarks from this folder, not from the hub.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Sampled answers to each prompt (avg@k, maj@k, pass@k).")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:N]",
            help="Also measure self-consistency, best-of, budget or tpo against the tokens they spend.",
        ),
    ] = None,
    examples: Annotated[int | None, typer.Option(help="Use only this many examples.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling.")] = None,
    output: Annotated[str | None, typer.Option(help="Save the results in this folder.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each result as a line of JSON and nothing else.")
    ] = False,
) -> None:
    """Measure held-out accuracy, with 95 % intervals; of a run, also what training changed."""
    between("--samples", samples, 1)
    between("--examples", examples, 1)
    from groupwise.commands.eval import evaluate_command, report_lines, unscored

    reports = evaluate_command(
        target,
        task=task,
        data=data,
        benchmarks=benchmark or (),
        samples=samples,
        examples=examples,
        seed=seed,
        output=output,
        strategies=strategy or (),
        overrides=[*([f"evaluate.data_dir={data_dir}"] if data_dir else []), *(words or [])],
    )
    for found in reports:
        for line in [json.dumps(found)] if as_json else report_lines(found):
            print(line)
    for found in reports:
        if "unsaved" in found:
            raise ConfigError(found["unsaved"])
        if (nothing := unscored(found)) is not None:
            raise ConfigError(f"{found['task']}: {nothing}")


@app.command(epilog="Anything else is set as section.key=value, such as task.options.scoring=lenient.")
def verify(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK|SECTION.KEY=VALUE", help="A task, built in or a Python file; any settings."
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="A built-in task; all of them by default.")] = None,
    data: Annotated[str | None, typer.Option(help="Golds from a file or a Hugging Face dataset.")] = None,
    examples: Annotated[int, typer.Option(help="Gold answers to check.")] = 100,
    pairs: Annotated[
        str | None, typer.Option(help="Score the rows {completion, answer} of this file instead.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line for each check.")] = False,
) -> int:
    """Test rewards on known cases, on gold answers or on your own pairs. Exit code 1: something failed."""
    between("--examples", examples, 1)
    flags = {name: value for name, value in (("task", task), ("data", data)) if value is not None}
    settings = training_config(words or [], config=None, resume=None, flags=flags)
    from groupwise.tasks.self_test import self_test

    named = task is not None or any("=" not in word or word.startswith("task.name=") for word in words or [])
    if not named and (words or data or pairs):
        raise ConfigError("say which task, built in or a Python file: groupwise verify TASK …")
    config = settings.task if named else None
    failed = False
    for line in self_test(config, pairs=pairs, examples=examples, as_json=as_json):
        failed = failed or not line.ok
        print(line.text)
    return 1 if failed else 0


@app.command()
def tasks() -> None:
    """List the built-in tasks."""
    from groupwise.tasks import TASKS

    width = max(map(len, TASKS))
    for name, task in TASKS.items():
        description = inspect.getdoc(task) or ""
        print(f"{name:<{width}}  {description.partition(chr(10))[0]}".rstrip())


@app.command()
def config() -> None:
    """Print every setting with its default and its meaning: a YAML file to start from."""
    print(dump_config(Config()), end="")


app.command()(watch)
app.command()(report)
app.command()(compare)
app.add_typer(runs, name="runs")
