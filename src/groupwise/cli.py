"""The `groupwise` command line.

Commands import torch and other heavy modules only after they have validated their arguments.
"""

from __future__ import annotations

import gc
import inspect
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.commands.chat import chat
from groupwise.commands.doctor import doctor
from groupwise.commands.evolve import evolve
from groupwise.commands.index import index_app
from groupwise.commands.options import (
    BatchSize,
    Beta,
    Data,
    GroupSize,
    LearningRate,
    MaxTokens,
    NoTrackio,
    NumEpochs,
    OutputDir,
    Overrides,
    ProjectName,
    RunName,
    Seed,
    Target,
    TaskName,
    TaskOrOverrides,
    Temperature,
    Track,
    check_names,
    loading,
    model_option,
    settings_file,
    train_option,
    with_task,
)
from groupwise.commands.runs import compare, report, runs, watch
from groupwise.commands.serve import serve, serve_rollouts
from groupwise.commands.sft import sft
from groupwise.commands.weights import convert, export, merge, push, quantize
from groupwise.config import FLAGS, Config, dump_config, read_config
from groupwise.config.coerce import between
from groupwise.config.loading import FOREIGN_NAMES, preset_named, presets
from groupwise.errors import ConfigError, InvariantError, RemoteRankError

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""The base class of parser errors. Looked up here because typer's parser has moved between packages."""

app = typer.Typer(
    help="Train language models with GRPO (Group Relative Policy Optimization).",
    add_completion=False,
    pretty_exceptions_enable=False,
)

TRAINING, USE, RUNS = "Train", "Evaluate and use a model", "Look at runs"
WEIGHTS, SETUP = "Convert and publish weights", "Set up"
"""Headings of the list of commands."""
OTHER = "Set any other setting as section.key=value, such as"
app.add_typer(index_app, name="index", rich_help_panel=SETUP)

config_option = partial(typer.Option, show_default=False, rich_help_panel="Configuration")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 2 user error, 3 failed invariant, 130 Ctrl-C."""
    # OpenMP reads this when torch starts its threads. A short spin keeps wake-ups fast on idle cores; the
    # long default occupies cores that other processes need.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal cannot show is no error
    try:
        if (context := help_context(sys.argv[1:] if arguments is None else arguments)) is not None:
            typer.echo(context.get_help())
            sys.stdout.flush()
            return 0
        gc.enable()  # `__main__` disables it while modules are imported
        code = app(args=arguments, prog_name="groupwise", standalone_mode=False)
    except USAGE_ERROR as error:
        return fail(usage_message(error, sys.argv[1:] if arguments is None else arguments), code=2)
    except ConfigError as error:
        return fail(str(error), code=2, notes=getattr(error, "__notes__", ()))
    except InvariantError as error:
        return fail(str(error), code=3, notes=getattr(error, "__notes__", ()))
    except RemoteRankError as error:
        return error.code  # rank 0 prints the message
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of the output is gone, as in `groupwise --help | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (RuntimeError, MemoryError) as error:
        from groupwise.model.device import ran_out_of_memory  # imports torch

        if not ran_out_of_memory(error):
            raise
        return fail("out of memory; lower batch sizes and lengths, or use a smaller model", code=2)
    return code if isinstance(code, int) else 0


def help_context(arguments: Sequence[str]) -> typer.Context | None:
    """Return the context of `groupwise [COMMAND …] --help`, whose help can be shown without parsing.

    The parser imports pydantic for its first option, even for --help.
    """
    *names, last = arguments or ("",)
    command: Any = typer.main.get_command(app) if last == "--help" else None
    context: typer.Context | None = None
    for name in ("groupwise", *names):
        if context is not None:
            command = getattr(command, "commands", {}).get(name)
        if command is None:
            return None
        context = command.context_class(command, info_name=name, parent=context, **command.context_settings)
    return context


def usage_message(error: Any, arguments: Sequence[str]) -> str:
    """Return what is wrong with the command line, and what to do. The parser's own messages do not say it."""
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "groupwise"
    if (option := getattr(error, "option_name", None)) is not None:
        return unknown_option(str(option), getattr(error, "possibilities", None) or (), command)
    parameter = getattr(error, "param", None)
    if parameter is None:
        message = str(error.format_message())
        sentence = message[:1].lower() + message[1:].rstrip(".")
        return sentence if "?" in sentence else f"{sentence}; see {command} --help"
    name = next((one for one in reversed(parameter.opts) if one.startswith("--")), None)
    if type(error).__name__ == "MissingParameter":
        wanted = name or parameter.metavar or parameter.name
        return f"{command} requires {wanted}; see {command} --help"
    message = str(error.format_message())
    kind = next((kind for word, kind in KINDS.items() if f"valid {word}" in message), None)
    if name is None or kind is None:
        return message
    given = next((value for flag, value in pairs(arguments) if flag == name), None)
    return f"{name} must be {kind}" + (f"; got {given!r}" if given is not None else "")


KINDS = {"number": "a number", "float": "a number", "integer": "a whole number", "boolean": "true or false"}
"""What the parser's kinds of values are called."""


def pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value: `--seed 3` and `--seed=3`."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, equals, value = argument.partition("=")
        yield flag, value if equals else following


def unknown_option(option: str, possibilities: Sequence[str], command: str) -> str:
    """Return the message for an option that does not exist; of another trainer's, what it is called here."""
    setting = FOREIGN_NAMES.get(option.removeprefix("--").replace("-", "_"))
    if setting is not None:
        flag = next((f"--{flag.replace('_', '-')}" for flag in FLAGS if FLAGS[flag] == setting), None)
        return f"no such option: {option}; use {flag or f'{setting}=VALUE'}"
    likely = next((one for one in possibilities if option.lstrip("-") in one), None)
    similar = [likely] if likely else get_close_matches(option, possibilities, n=1, cutoff=0.6)
    return f"no such option: {option}; " + (
        f"did you mean {similar[0]}?" if similar else f"see {command} --help"
    )


def fail(sentence: str, *, code: int, notes: Sequence[str] = ()) -> int:
    # If several processes fail with the same message, only the first one prints it.
    if notes or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def show_version(requested: bool) -> None:
    if requested:
        from groupwise.files import package_version

        print(f"groupwise {package_version()}")
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
    epilog="Set any other setting as section.key=value, such as algo.loss=gspo; see `groupwise config`.",
    rich_help_panel=TRAINING,
)
def train(
    context: typer.Context,
    arguments: TaskOrOverrides = None,
    config: Annotated[
        Path | None, config_option(help="YAML file with settings, or a preset such as gsm8k-quick.")
    ] = None,
    resume: Annotated[
        Path | None,
        config_option(
            metavar="RUN",
            help="Run to resume. From one of its checkpoints, a copy continues in a new folder.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        model_option(
            help="tiny (built in), a Hugging Face model ID, or the folder of a model or LoRA adapter."
        ),
    ] = None,
    task: TaskName = None,
    data: Data = None,
    max_examples: Annotated[
        int | None, model_option(help="Maximum number of training examples; 0: all.")
    ] = None,
    max_steps: Annotated[int | None, train_option(help="Number of training steps.")] = None,
    num_epochs: NumEpochs = None,
    learning_rate: LearningRate = None,
    batch_size: BatchSize = None,
    gradient_accumulation_steps: Annotated[
        int | None, train_option(help="Multiply --batch-size by this.")
    ] = None,
    group_size: GroupSize = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    beta: Beta = None,
    lora_r: Annotated[int | None, train_option(help="LoRA rank; 0: full fine-tuning.")] = None,
    loss: Annotated[str | None, train_option(help="Loss: grpo, bnpo, dapo, …, or module:function.")] = None,
    advantage: Annotated[
        str | None, train_option(help="Advantage estimator: grpo, dr_grpo, …, or module:function.")
    ] = None,
    seed: Seed = None,
    skip_evaluation: Annotated[
        bool | None, train_option("--skip-evaluation", help="Skip all held-out evaluations.")
    ] = None,
    output_dir: OutputDir = None,
    run_name: RunName = None,
    project_name: ProjectName = None,
    track: Track = None,
    no_trackio: NoTrackio = None,
) -> None:
    """Train a model with GRPO. Without arguments, train the built-in model on Countdown puzzles."""
    flags = {name: context.params[name] for name in FLAGS if context.params[name] not in (None, (), [])}
    settings = training_config(arguments or [], config=config, resume=resume, flags=flags).resolve()
    from groupwise.tasks import (
        is_loadable,
        load_task,
        read_task_file,
        split_functions,
        task_of,
        use_functions,
    )

    name = settings.task.name
    if resume is not None and not is_loadable(name):
        raise resumed_in_python(name, resume)
    # Load the task before torch, so that mistakes are reported immediately.
    functions: Mapping[str, Any] = {}
    if resume is None and name.endswith(".py"):
        file = read_task_file(Path(name).expanduser())
        defaults, functions = split_functions(file.settings)
        settings = training_config(
            arguments or [], config=config, resume=None, flags=flags, defaults=defaults
        ).resolve()
        loaded = task_of(file, settings.task)
    else:
        loaded = load_task(settings.task)
    own = use_functions(settings, functions)
    check_names(settings)
    with loading(f"PyTorch and {settings.model.name}"):
        from groupwise.training import train as run_training

    run_training(settings, resume=resume, task=loaded, functions=own)


def resumed_in_python(task: str, run: Path) -> ConfigError:
    return ConfigError(
        f"the task {task!r} of {run} was defined in Python: resume it from Python with "
        f"groupwise.train(task, resume={str(run)!r})"
    )


def training_config(
    arguments: Sequence[str],
    *,
    config: Path | None,
    resume: Path | None,
    flags: dict[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Split positional arguments into a task and overrides, and read the settings."""
    overrides = [argument for argument in arguments if "=" in argument]
    # A built-in task may be given without --task; loading it rejects unknown names.
    files = [
        argument
        for argument in arguments
        if "=" not in argument
        and (argument.endswith(".py") or argument.isidentifier() or argument.startswith("gym:"))
    ]
    for argument in arguments:
        if argument not in overrides and argument not in files:
            raise ConfigError(
                f"cannot interpret the argument {argument!r}: a task file ends in .py, a built-in task is "
                "one word, and a setting has the form section.key=value"
            )
    flags = with_task(flags, files)
    return read_config(settings_file(config, resume), overrides=overrides, flags=flags, defaults=defaults)


app.command(epilog=f"{OTHER} optim.schedule=cosine.", rich_help_panel=TRAINING)(sft)
app.command(epilog=f"{OTHER} evolve.share=0.2.", rich_help_panel=TRAINING)(evolve)
app.command(rich_help_panel=TRAINING, name="serve-rollouts")(serve_rollouts)
app.command(epilog=f"{OTHER} model.dtype=bfloat16.", rich_help_panel=USE)(chat)
app.command(epilog=f"{OTHER} model.dtype=bfloat16.", rich_help_panel=USE)(serve)
app.command(rich_help_panel=WEIGHTS)(merge)
app.command(rich_help_panel=WEIGHTS)(quantize)
app.command(rich_help_panel=WEIGHTS)(convert)
app.command(rich_help_panel=WEIGHTS)(export)
app.command(rich_help_panel=WEIGHTS)(push)
app.command(rich_help_panel=SETUP)(doctor)


@app.command(
    name="eval",
    epilog="Set any other setting as section.key=value, such as rollout.max_tokens=512.",
    rich_help_panel=USE,
)
def evaluate(
    target: Target,
    arguments: Overrides = None,
    task: Annotated[
        str | None, typer.Option(help="Task to evaluate; by default, the task of the run.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Examples: a file (JSON, JSONL, CSV, Parquet), a Hugging Face dataset or a saved one."
        ),
    ] = None,
    benchmark: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Benchmark: gsm8k, math500 or countdown; repeatable."),
    ] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder with the benchmark files; by default, they are loaded from the Hugging Face Hub."
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Completions sampled per prompt (avg@k, maj@k, pass@k).")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:N]",
            help="Test-time strategy to evaluate too: self-consistency, best-of, budget or tpo; repeatable.",
        ),
    ] = None,
    examples: Annotated[int | None, typer.Option(help="Maximum number of examples.")] = None,
    seed: Annotated[int | None, typer.Option(help="Sampling seed.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder to save the results in.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON, one line per result.")] = False,
) -> None:
    """Measure held-out accuracy with 95 % confidence intervals, and for a run the effect of training."""
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
        overrides=[*([f"evaluate.data_dir={data_dir}"] if data_dir else []), *(arguments or [])],
    )
    for result in reports:
        for line in [json.dumps(result)] if as_json else report_lines(result):
            print(line)
    for result in reports:
        if "unsaved" in result:
            raise ConfigError(result["unsaved"])
        if (reason := unscored(result)) is not None:
            raise ConfigError(f"{result['task']}: {reason}")


@app.command(epilog=f"{OTHER} task.options.scoring=lenient.", rich_help_panel=SETUP)
def verify(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK|SECTION.KEY=VALUE", help="Built-in task or Python file; settings to override."
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Built-in task; by default, all of them.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Examples with gold answers: a file (JSON, JSONL, CSV, Parquet) or a Hugging Face dataset."
        ),
    ] = None,
    examples: Annotated[int, typer.Option(help="Number of gold answers to check.")] = 100,
    pairs: Annotated[
        str | None,
        typer.Option(help="Score the rows {completion, answer} of this file instead of the known cases."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per check.")] = False,
) -> int:
    """Test reward functions on known cases, gold answers or your own pairs. Exits with 1 if a check fails."""
    between("--examples", examples, 1)
    flags = {name: value for name, value in (("task", task), ("data", data)) if value is not None}
    settings = training_config(arguments or [], config=None, resume=None, flags=flags)
    from groupwise.tasks.self_test import self_test

    named = task is not None or any(
        "=" not in argument or argument.startswith("task.name=") for argument in arguments or []
    )
    if not named and (arguments or data or pairs):
        raise ConfigError("name a built-in task or a Python file: groupwise verify TASK …")
    config = settings.task if named else None
    failed = False
    for line in self_test(config, pairs=pairs, examples=examples, as_json=as_json):
        failed = failed or not line.ok
        print(line.text)
    return 1 if failed else 0


@app.command(rich_help_panel=SETUP)
def tasks() -> None:
    """List the built-in tasks."""
    from groupwise.tasks import TASKS

    width = max(map(len, TASKS))
    for name, task in TASKS.items():
        description = inspect.getdoc(task) or ""
        print(f"{name:<{width}}  {description.partition(chr(10))[0]}".rstrip())


@app.command(rich_help_panel=SETUP)
def config(
    preset: Annotated[
        str | None,
        typer.Option(show_default=False, help="Print the settings of a preset, such as gsm8k-quick."),
    ] = None,
    as_list: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
) -> None:
    """Print every setting with its default and documentation, as a YAML file to start from."""
    if as_list:
        print("\n".join(presets()))
    else:
        text = preset_named(preset).read_text(encoding="utf-8") if preset else dump_config(Config())
        print(text, end="")


app.command(rich_help_panel=RUNS)(watch)
app.command(rich_help_panel=RUNS)(report)
app.command(rich_help_panel=RUNS)(compare)
app.add_typer(runs, name="runs", rich_help_panel=RUNS)
