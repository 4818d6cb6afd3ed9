"""The command line: what it answers, with which exit code, and that it answers before torch is imported."""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise import cli
from groupwise.commands.eval import report_lines, unscored
from groupwise.commands.options import loading
from groupwise.config import FLAGS, Config, dump_config, read_config
from groupwise.errors import CheckpointError, ConfigError, InvariantError
from groupwise.tasks import TASKS
from groupwise.tracking import trackers

LIGHT_SERVER = """
import json, os, sys
from groupwise import cli

for line in sys.stdin:
    words = json.loads(line)
    if not (child := os.fork()):
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.exit(cli.main(words))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([code, open("out").read(), open("err").read()]), flush=True)
"""
"""Answers each command in a fork of one process, which has imported what the command line imports."""


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory) -> dict[str, str]:
    """The environment of a process where importing torch or transformers raises."""
    poison = tmp_path_factory.mktemp("poison")
    for name in ("torch", "transformers"):
        (poison / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')\n")
    paths = os.pathsep.join(filter(None, (str(poison), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": paths, "COLUMNS": "110", "NO_COLOR": "1"}


@pytest.fixture
def light(tmp_path, without_torch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in a process of its own, without torch."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "groupwise", *words]
        return subprocess.run(
            command, env=without_torch | variables, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    return run


@pytest.fixture(scope="module")
def answered(tmp_path_factory, without_torch) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run the command in a fork of one process without torch; return its exit code and what it printed."""
    server = subprocess.Popen(
        [sys.executable, "-c", LIGHT_SERVER],
        env=without_torch,
        cwd=tmp_path_factory.mktemp("empty"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    words_to, answers_from = server.stdin, server.stdout

    def run(*words: str) -> tuple[int, str, str]:
        print(json.dumps(words), file=words_to, flush=True)
        code, out, err = json.loads(answers_from.readline())
        return code, out, err

    with server:
        yield run
        words_to.close()


@pytest.fixture
def trained(monkeypatch) -> list[tuple[Config, dict[str, Any]]]:
    """Put a recorder in the place of training; it holds what each call was given. All trackers exist."""
    monkeypatch.setattr(trackers, "find_spec", lambda name: True)
    calls: list[tuple[Config, dict[str, Any]]] = []
    recorder = SimpleNamespace(train=lambda config, **rest: calls.append((config, rest)))
    monkeypatch.setitem(sys.modules, "groupwise.training", recorder)
    return calls


def raising(error: BaseException) -> SimpleNamespace:
    def train(config: Config, **_: object) -> Path:
        raise error

    return SimpleNamespace(train=train)


@pytest.mark.parametrize("words", [("--help",), ("train", "--help"), ("index", "build", "--help")])
def test_help_imports_only_what_it_shows(tmp_path, words):
    code = """
import sys
from groupwise.cli import main
sys.argv[1:], code = [], main(sys.argv[1:])
heavy = {"torch", "transformers", "numpy", "pydantic", "hashlib", "importlib.metadata", "statistics"}
print(code, *sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""
    # Without the tools of this environment, such as coverage, which import more.
    run = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert run.stderr == "0\n"
    assert f"Usage: groupwise {' '.join(words[:-1])}".rstrip() in run.stdout


@pytest.mark.parametrize("words", [(), ("train",), ("index",), ("index", "build"), ("runs",)])
def test_help_is_what_the_parser_shows(answered, words):
    from typer.testing import CliRunner

    code, out, err = answered(*words, "--help")
    parsed = CliRunner().invoke(
        cli.app, [*words, "--help"], prog_name="groupwise", env={"COLUMNS": "110", "NO_COLOR": "1"}
    )
    assert (code, err) == (0, "")
    assert out == parsed.stdout


def test_an_unknown_command_has_no_help(answered):
    code, _, err = answered("trian", "--help")
    assert code == 2
    assert "trian" in err


def test_a_command_that_runs_out_of_memory_says_so_in_one_line(monkeypatch, capsys):
    def fail(**_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(cli, "help_context", lambda _: None)
    assert cli.main(["eval"]) == 2
    assert capsys.readouterr().err.startswith("error: out of memory; lower")


def test_imports_are_not_collected(capsys):
    assert gc.isenabled()
    with loading("a library"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert capsys.readouterr() == ("", "")


def test_a_process_of_its_own_never_collects_what_it_imports():
    gc.disable()  # as `groupwise.__main__` does
    try:
        with loading("a library"):
            pass
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()


def test_the_poison_works(light, answered):
    assert "torch was imported" in light("train", "--max-steps", "1").stderr
    assert "torch was imported" in answered("train", "--max-steps", "1")[2]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help"], "config"),
        ([], "Usage: groupwise"),
        (["--version"], "groupwise 0."),
        (["train", "--help"], "--gradient-accumulation-steps"),
        (["eval", "--help"], "RUN|MODEL"),
        (["config"], "group_size: 16"),
        (["tasks"], "countdown"),
    ],
)
def test_a_question_is_answered_before_torch_is_imported(answered, words, shown):
    code, out, err = answered(*words)
    assert (code, err) == (0, "")
    assert shown in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["train", "optim.learning_rat=1"],
            "unknown setting optim.learning_rat; did you mean optim.learning_rate?",
        ),
        (["train", "--beta=-1"], "algo.beta must be at least 0; got -1.0"),
        (["train", "optim.beta1=1.5"], "optim.beta1 must be at least 0 and less than 1; got 1.5"),
        (["train", "--config", "no.yaml"], "cannot read settings from no.yaml: No such file or directory"),
        (["train", "--resume", "no"], "there is no run folder no; `groupwise runs` lists the runs"),
        (
            ["train", "--task", "countdwn"],
            "unknown task 'countdwn'; did you mean 'countdown'? (or use gym:NAME or the path of a .py file)",
        ),
        (["train", "mine.py"], "no such task file: mine.py"),
        (
            ["train", "--model", "./mine"],
            "model.name: ./mine is not a folder; use tiny, tiny-search, smollm2, a folder "
            "or a Hugging Face name",
        ),
        (
            ["train", "--model", "."],
            "the model folder . lacks config.json and weights (*.safetensors) and a tokenizer "
            "(tokenizer.json)",
        ),
        (["train", "mine.py", "--task", "countdown"], "a run has one task; remove all but mine.py"),
        (["eval", "tiny", "--samples", "0"], "--samples must be at least 1; got 0"),
        (
            ["eval", "."],
            ". contains neither a run (config.yaml) nor a model (config.json, adapter_config.json)",
        ),
        (
            ["eval", "no/such/run"],
            "no/such/run is neither a folder with a run or a model nor the name of a model",
        ),
        (["eval", "tiny", "--data", "/no/no.jsonl"], "no such file: /no/no.jsonl"),
    ],
)
def test_a_mistake_gets_one_sentence_before_torch_is_imported(answered, words, sentence):
    assert answered(*words) == (2, "", f"error: {sentence}\n")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train", "--no-such-flag"], "--no-such-flag"),
        (["train", "--max-steps", "ten"], "--max-steps"),
        (["trian"], "trian"),
        (["eval"], "RUN|MODEL"),
        (["train", "count-down"], "and a setting has the form section.key=value"),
        (["train", "--config", "a", "--resume", "b"], "remove --config"),
    ],
)
def test_a_word_that_cannot_be_parsed_gets_one_sentence(capsys, words, part):
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert part in error
    assert error.count("\n") == 1


def test_the_configuration_it_prints_reads_back_as_the_defaults(capsys, tmp_path):
    assert cli.main(["config"]) == 0
    path = tmp_path / "all.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_config(path) == Config()


def test_training_without_arguments_uses_the_defaults(trained):
    assert cli.main(["train"]) == 0
    (config, rest), *others = trained
    assert (config, rest["resume"], rest["task"].name, others) == (Config().resolve(), None, "countdown", [])


def test_the_command_offers_exactly_the_flags_of_the_table():
    own = {"context", "arguments", "config", "resume"}
    assert inspect.signature(cli.train).parameters.keys() - own == FLAGS.keys()


def test_every_flag_reaches_its_setting(trained, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"numbers": [1, 2, 3], "target": 6}) + "\n")
    given = {
        "--model": ("gpt", "model.name=gpt"),
        "--lora-r": ("4", "lora.r=4"),
        "--task": ("countdown", "task.name=countdown"),
        "--data": (str(rows), f"task.data={rows}"),
        "--max-examples": ("0", "task.max_examples=null"),
        "--batch-size": ("3", "rollout.prompts=6"),
        "--gradient-accumulation-steps": ("2", "rollout.prompts=6"),
        "--group-size": ("5", "rollout.group_size=5"),
        "--max-tokens": ("7", "rollout.max_tokens=7"),
        "--temperature": ("0.5", "rollout.temperature=0.5"),
        "--advantage": ("rloo", "algo.advantage=rloo"),
        "--loss": ("gspo", "algo.loss=gspo"),
        "--beta": ("0.1", "algo.beta=0.1"),
        "--learning-rate": ("1e-5", "optim.learning_rate=1e-5"),
        "--skip-evaluation": (None, "evaluate.skip=true"),
        "--max-steps": ("9", "run.max_steps=9"),
        "--seed": ("0", "run.seed=0"),
        "--output-dir": ("out", "run.output_dir=out"),
        "--run-name": ("12", "run.name=12"),
        "--project-name": ("p", "track.project=p"),
        "--no-trackio": (None, "track.trackers=wandb"),
        "--track": ("wandb", "track.trackers=wandb"),
    }
    named = {flag.removeprefix("--").replace("-", "_") for flag in given}
    assert named == FLAGS.keys() - {"num_epochs"}  # it excludes --max-steps
    words = [word for flag, (value, _) in given.items() for word in (flag, value) if word is not None]
    assert cli.main(["train", *words]) == 0
    assert trained[0][0] == read_config(overrides=[override for _, override in given.values()]).resolve()


def test_trackers_can_be_given_one_by_one_and_turned_off(trained):
    cli.main(["train", "--track", "wandb", "--track", "tensorboard"])
    cli.main(["train", "--no-trackio"])
    assert [config.track.trackers for config, _ in trained] == [("wandb", "tensorboard"), ()]


def test_a_task_file_an_override_and_a_file_of_settings_come_together(trained, tmp_path):
    task = tmp_path / "capitals.py"
    task.write_text(
        "from groupwise.tasks import Task\n"
        "rows = [{'country': 'Peru'}, {'country': 'Chad'}]\n"
        "rewards = {'none': lambda rollout, example: 0.0}\n"
        "task = Task(name='capitals', examples=rows, prompt=lambda row: row['country'], rewards=rewards)\n"
    )
    settings = tmp_path / "settings.yaml"
    settings.write_text("run: {seed: 1, max_steps: 1}")
    assert cli.main(["train", str(task), "run.seed=2", "--config", str(settings)]) == 0
    config, rest = trained[0]
    assert (config.task.name, config.run.seed, config.run.max_steps) == (str(task), 2, 1)
    assert rest["task"].name == "capitals"


def test_the_settings_in_a_task_file_are_the_defaults_of_the_command(trained, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import groupwise as gw\n"
        "mine = gw.Task(name='mine', examples=[{'n': n} for n in range(9)],\n"
        "    prompt=lambda row: str(row['n']), rewards={'none': lambda rollout, example: 0.0})\n"
        "gw.train(mine, model='tiny-search', max_steps=2, optim={'epochs': 3}, **{'task.held_out': 1})\n"
    )
    yaml = tmp_path / "settings.yaml"
    yaml.write_text("optim: {epochs: 5}")
    assert cli.main(["train", str(file)]) == 0
    assert cli.main(["train", str(file), "--max-steps", "7", "task.held_out=4", "--config", str(yaml)]) == 0
    found = [(c.model.name, c.run.max_steps, c.optim.epochs, c.task.held_out) for c, _ in trained]
    assert found == [("tiny-search", 2, 3, 1), ("tiny-search", 7, 5, 4)]
    assert [(c.task.name, rest["task"].name) for c, rest in trained] == [(str(file), "mine")] * 2


def test_a_mistake_in_the_settings_of_a_task_file_gets_one_sentence(trained, tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(
        "import groupwise as gw\n"
        "gw.train(gw.Task(name='mine', examples=[{'n': 1}], prompt=str,\n"
        "    rewards={'none': lambda rollout, example: 0.0}), max_stepz=2)\n"
    )
    assert cli.main(["train", str(file)]) == 2
    assert "unknown setting max_stepz; did you mean max_steps?" in capsys.readouterr().err
    assert trained == []


def test_a_resumed_run_keeps_its_own_settings_except_those_given_anew(trained, tmp_path):
    (tmp_path / "config.yaml").write_text(
        dump_config(read_config(overrides=["run.seed=5", "run.max_steps=4"]))
    )
    assert cli.main(["train", "--resume", str(tmp_path), "--max-steps", "8"]) == 0
    config, rest = trained[0]
    assert (config.run.seed, config.run.max_steps, rest["resume"]) == (5, 8, tmp_path)


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (ConfigError("no such\n thing"), 2, "error: no such thing\n"),
        (CheckpointError("damaged"), 2, "error: damaged\n"),
        (InvariantError("the gap is 3"), 3, "error: the gap is 3\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(monkeypatch, capsys, error, code, printed):
    monkeypatch.setitem(sys.modules, "groupwise.training", raising(error))
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == printed


def test_a_bug_is_not_dressed_up_as_the_users_mistake(monkeypatch):
    monkeypatch.setitem(sys.modules, "groupwise.training", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


REPORT = {
    "task": "countdown",
    "model": "tiny",
    "prompts": 4,
    "samples": 2,
    "seed": 0,
    "greedy": {"mean": 0.5, "low": 0.15, "high": 0.85},
    "avg@2": {"mean": 0.25, "low": 0.05, "high": 0.7},
    "pass@2": {"mean": 0.5, "low": 0.15, "high": 0.85},
    "length": 12.25,
    "failed": 1,
}


@pytest.fixture
def measured(monkeypatch) -> list[dict[str, Any]]:
    """Put a recorder in the place of evaluation; it holds what each call was given."""
    calls: list[dict[str, Any]] = []

    def evaluate_command(target: str, **options: Any) -> list[dict[str, Any]]:
        calls.append({"target": target, **options})
        return [REPORT]

    stand_in = SimpleNamespace(
        evaluate_command=evaluate_command, report_lines=report_lines, unscored=unscored
    )
    monkeypatch.setitem(sys.modules, "groupwise.commands.eval", stand_in)
    return calls


def test_evaluating_passes_every_option_on_and_prints_json(measured, capsys):
    options = (
        "--task countdown --data d --samples 2 --examples 3 --seed 4 rollout.max_tokens=9 --json "
        "--benchmark gsm8k --benchmark math500 --data-dir files --output results --strategy best-of:4"
    )
    assert cli.main(["eval", "tiny", *options.split()]) == 0
    assert json.loads(capsys.readouterr().out) == REPORT
    assert measured == [
        {
            "target": "tiny",
            "task": "countdown",
            "data": "d",
            "benchmarks": ["gsm8k", "math500"],
            "samples": 2,
            "examples": 3,
            "seed": 4,
            "output": "results",
            "strategies": ["best-of:4"],
            "overrides": ["evaluate.data_dir=files", "rollout.max_tokens=9"],
        }
    ]


def test_an_output_that_lacks_a_letter_shows_another_in_its_place(light):
    whole, poor = light("tasks"), light("tasks", PYTHONIOENCODING="ascii")
    assert not whole.stdout.isascii()
    assert (poor.returncode, poor.stderr) == (0, "")
    assert poor.stdout == whole.stdout.encode("ascii", errors="replace").decode()
    assert light("train", "é.py", PYTHONIOENCODING="ascii:strict").stderr.startswith("error: ")


def test_an_evaluation_is_printed_for_people(measured, capsys):
    assert cli.main(["eval", "tiny"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "countdown · tiny · 4 prompts, seed 0",
        "",
        "  greedy   50.0 % [15.0, 85.0]",
        "  avg@2    25.0 % [5.0, 70.0]",
        "  pass@2   50.0 % [15.0, 85.0]",
        "",
        "  12.2 tokens per completion, 1 completions could not be scored",
    ]


def test_an_evaluation_that_could_score_nothing_says_why_and_shows_no_figures() -> None:
    questions = [{"kind": None, "right": 0, "error": "ValueError: no gold answer"}] * REPORT["prompts"]
    failed = REPORT["prompts"] * (1 + REPORT["samples"])
    text = "\n".join(report_lines(REPORT | {"failed": failed, "questions": questions}))
    assert f"no results: {failed} completions could not be scored" in text
    assert "ValueError: no gold answer" in text
    assert "0.0 %" not in text
    assert unscored(REPORT) is None


def test_what_training_changed_stands_beside_the_accuracy():
    change = {"mean": 0.2, "low": 0.1, "high": 0.3, "improved": 3, "worsened": 1, "p_value": 0.6}
    lines = list(report_lines(REPORT | {"change": {"greedy": change}, "saved": "runs/a/eval/x.json"}))
    assert lines[1:3] == [
        "                                   since before training",
        "  greedy   50.0 % [15.0, 85.0]     +20.0 points [+10.0, +30.0]",
    ]
    assert lines[-1] == "  results saved in runs/a/eval/x.json, completions next to it"


def test_a_run_of_a_task_from_python_is_resumed_there(trained, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("task: {name: capitals}")
    assert cli.main(["train", "--resume", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: the task 'capitals' of {tmp_path} was defined in Python: resume it from Python "
        f"with groupwise.train(task, resume='{tmp_path}')\n"
    )


def test_every_built_in_task_is_listed_with_one_line(capsys):
    assert cli.main(["tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(TASKS)
    assert all(len(line.split()) > 2 for line in lines)
