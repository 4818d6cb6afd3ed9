"""Typical mistakes: each gets one sentence that says what to do, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import groupwise as gw
from groupwise import cli
from groupwise.errors import ConfigError

TASK = """import groupwise as gw
task = gw.Task(name="t", examples=[{"n": n} for n in range(8)], prompt=lambda e: str(e["n"]),
               rewards={"r": lambda rollout, example: 1.0})
"""
FILES = {
    "good.py": TASK,
    "no_task.py": "x = 1\n",
    "syntax.py": "def f(:\n",
    "missing_import.py": "import no_such_module\n",
    "cut.jsonl": '{"question": "1 + 1?"\n',
    "columns.jsonl": '{"q": "1 + 1?", "a": "2"}\n' * 8,
    "empty.jsonl": "",
    "typo.yaml": "optim: {learning_rte: 1}\n",
    "cut.yaml": "optim: [1\n",
    "model/config.json": "{}",
    "folder/note.txt": "",
}
TASKS = "code, countdown, gsm8k, math, medquad, search_qa, tldr (or use gym:NAME or the path of a .py file)"
NOT_THERE = (
    "is neither a folder nor in the Hugging Face cache, and cannot be downloaded: downloads are off "
    "(HF_HUB_OFFLINE is set); check the name, or give a folder"
)
MISTAKES = {
    # the task and its file
    "train coutdown": "unknown task 'coutdown'; did you mean 'countdown'? "
    "(or use gym:NAME or the path of a .py file)",
    "train train": f"unknown task 'train'; it must be one of {TASKS}",
    "train nowhere.py": "no such task file: nowhere.py",
    "train no_task.py": "no_task.py does not define `task`; add: task = groupwise.Task(…)",
    "train syntax.py": "{here}/syntax.py, line 1: SyntaxError: invalid syntax",
    "train missing_import.py": "missing_import.py, line 1: ModuleNotFoundError: "
    "No module named 'no_such_module'",
    "train countdown gsm8k": "a run has one task; remove all but countdown",
    # values of settings
    "train optim.learning_rate=fast": "optim.learning_rate must be a number (float) or null; got 'fast'",
    "train --learning-rate fast": "--learning-rate must be a number; got 'fast'",
    "train --max-steps=ten": "--max-steps must be a whole number; got 'ten'",
    "train run.max_steps=-3": "run.max_steps must be at least 1; got -3",
    "train rollout.group_size=1": "rollout.group_size must be at least 2; got 1",
    "train rollout.group_size=8.5": "rollout.group_size must be a whole number (int); got 8.5",
    "train rollout.temperature=-1": "rollout.temperature must be positive, because greedy completions of "
    "one prompt are all equal; got -1.0",
    "train rollout.max_tokens=100000": "the model's context of 1024 and rollout.max_tokens=100000 leave no "
    "room for a prompt: lower rollout.max_tokens, shorten the prompts or use a model with a longer context",
    "train model.device=gpu": "model.device must be cpu, cuda, cuda:N or mps; got 'gpu'",
    "train model.dtype=fp8": "model.dtype must be one of float32, bfloat16; got 'fp8'",
    "train optim.kind=adam": "optim.kind must be one of adamw, adamw8bit; got 'adam'",
    "train run.name=a/b": "run.name must be a plain folder name; got 'a/b'",
    "train --track wandbb": "track.trackers must be one of trackio, wandb, tensorboard, mlflow; got 'wandbb'",
    # names of settings and options, also those of other trainers
    "train optim.lr=1e-4": "unknown setting optim.lr; did you mean optim.learning_rate?",
    "train optim.learning_rte=1e-4": "unknown setting optim.learning_rte; did you mean optim.learning_rate?",
    "train num_generations=8": "unknown setting num_generations; did you mean rollout.group_size?",
    "train --lr 1e-4": "no such option: --lr; use --learning-rate",
    "train --epochs 3": "no such option: --epochs; use --num-epochs",
    "train --steps 10": "no such option: --steps; did you mean --max-steps?",
    "trian": "no such command 'trian'. Did you mean 'train'?",
    # files
    "train gsm8k --data nowhere.jsonl": "no such file: nowhere.jsonl in {here}",
    "train gsm8k --data nowhere.txt": "no such file: nowhere.txt in {here}",
    "train gsm8k --data cut.jsonl": "cut.jsonl, line 1 is not valid JSON: column 22; each line must be one "
    "JSON object",
    "train gsm8k --data columns.jsonl": "columns.jsonl, line 1: no column 'question' or 'problem'; "
    "it has q, a",
    "train gsm8k --data empty.jsonl": "empty.jsonl: there are no examples",
    "train --config nowhere.yaml": "cannot read settings from nowhere.yaml: No such file or directory",
    "train --config typo.yaml": "unknown setting optim.learning_rte; did you mean optim.learning_rate?",
    "train --config cut.yaml": "cut.yaml is not valid YAML: line 2: expected ',' or ']', but got "
    "'<stream end>'",
    "sft --data columns.jsonl": "columns.jsonl, row 1: a demonstration requires the columns prompt and "
    "completion, or messages; got ['a', 'q']",
    # models and runs
    "train --model no-one/nothing": f"model.name: no-one/nothing {NOT_THERE}",
    "train --model folder/nothing": "model.name: there is no folder folder/nothing in {here}/folder",
    "train --model ./model": "the model folder ./model lacks weights (*.safetensors) and a tokenizer "
    "(tokenizer.json)",
    "train --resume folder/nothing": "there is no run folder folder/nothing; `groupwise runs` lists the runs",
    "train --resume folder": "folder is not a run folder: it has no config.yaml",
    "eval folder/nothing": "there is no folder folder/nothing; folder contains no folders",
    "eval folder": "folder contains neither a run (config.yaml) nor a model (config.json, "
    "adapter_config.json)",
    "eval": "groupwise eval requires RUN|MODEL; see groupwise eval --help",
    "eval tiny --benchmark gsm": "unknown benchmark 'gsm'; did you mean 'gsm8k'?",
    "eval tiny --strategy best-off:8": "unknown strategy 'best-off'; did you mean 'best-of'?",
    "eval tiny --samples 0": "--samples must be at least 1; got 0",
    "compare a b": "there is no run folder a",
    "watch nowhere": "there is no folder nowhere: give a run, or a folder of runs",
    "merge": "give either a run or --lora-model FOLDER",
    "merge folder": "folder holds no adapter: adapter_config.json is missing",
    # other commands
    "serve tiny --port {port}": "cannot listen on 127.0.0.1:{port}: Address already in use; choose another "
    "port with --port",
    "watch --port {port}": "cannot listen on 127.0.0.1:{port}: Address already in use; choose another port "
    "with --port",
    "serve tiny --port 99999": "--port must be between 0 and 65535; got 99999",
    "train engine.kind=vllm engine.servers=[http://127.0.0.1:1]": "no vLLM server responds at "
    "http://127.0.0.1:1 (/version: Connection refused); start one with groupwise serve-rollouts",
    "evolve countdown lora.r=0": "members of a population are adapters: set lora.r, for example lora.r=16",
    "quantize --output-path q --kind int3": "--kind must be one of nf4, int8; got 'int3'",
    "index build": "give either --documents FILE.jsonl or --data with a question-answer dataset",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files of the mistakes."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def test_there_are_at_least_40_mistakes():
    assert len(MISTAKES) + len(IN_PYTHON) >= 40 + 15


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_gets_one_sentence_and_leaves_nothing_behind(words, here, taken_port, capsys):
    before = files_in(here)
    code = cli.main(words.format(port=taken_port).split())
    told = capsys.readouterr().err
    sentence = MISTAKES[words].replace("{here}", str(here)).replace("{port}", str(taken_port))
    assert (code, told) == (2, f"error: {sentence}\n")
    assert files_in(here) == before


def task(**changed: Any) -> gw.Task:
    settings: dict[str, Any] = {
        "name": "t",
        "examples": [{"n": n} for n in range(8)],
        "prompt": lambda example: str(example["n"]),
        "rewards": {"r": lambda rollout, example: 1.0},
    }
    return gw.Task(**settings | changed)


IN_PYTHON: dict[str, tuple[Callable[[], object], str]] = {
    "a misspelt task": (
        lambda: gw.train("coutdown"),
        "unknown task 'coutdown'; did you mean 'countdown'? (or use gym:NAME or the path of a .py file)",
    ),
    "not a task": (lambda: gw.train([1, 2]), "a task is a gw.Task, a name or a file; got list"),  # type: ignore[arg-type]
    "a misspelt setting": (
        lambda: gw.train("countdown", max_stepz=2),
        "unknown setting max_stepz; did you mean max_steps?",
    ),
    "a setting of TRL": (
        lambda: gw.train("countdown", num_generations=8),
        "unknown setting num_generations; did you mean group_size?",
    ),
    "a setting in a section": (
        lambda: gw.train("countdown", optim={"learning_rte": 1}),
        "unknown setting optim.learning_rte; did you mean optim.learning_rate?",
    ),
    "a text for a number": (
        lambda: gw.train("countdown", learning_rate="fast"),
        "optim.learning_rate must be a number (float) or null; got 'fast'",
    ),
    "a number for a model": (lambda: gw.train("countdown", model=3), "model.name must be a string; got 3"),
    "a file that is not there": (
        lambda: gw.train("gsm8k", data="nowhere.jsonl"),
        "no such file: nowhere.jsonl in {here}",
    ),
    "a run that is not there": (
        lambda: gw.train(task(), resume="nowhere"),
        "there is no run folder nowhere",
    ),
    "no reward": (
        lambda: task(rewards={}),
        "task t: rewards must be a non-empty dict of names and functions",
    ),
    "a reward that is no function": (
        lambda: task(rewards={"r": 1}),
        "task t: reward 'r' must be a function; got 1",
    ),
    "a weight of no reward": (
        lambda: task(weights={"x": 1.0}),
        "task t: weight for unknown reward 'x'; it must be one of r",
    ),
    "no examples": (lambda: gw.train(task(examples=[])), "task t: examples: there are no examples"),
    "examples that are no rows": (
        lambda: task(examples="x"),
        "task t: examples: expected a list of dicts, got str",
    ),
    "a prompt that is no function": (
        lambda: task(prompt=None),
        "task t: set prompt to a function that takes an example, or give the examples a column `prompt`",
    ),
    "a prompt of a column that is not there": (
        lambda: gw.train(task(prompt=lambda example: example["m"]), max_steps=1),
        "task t: prompt failed on an example: the example has no column 'm'; it has ['n'] (KeyError)",
    ),
    "a prompt that is a number": (
        lambda: gw.train(task(prompt=lambda example: 3), max_steps=1),
        "task t: prompt must return a string or a list of messages with role and content; got '3'",
    ),
    "a tool that is no function": (lambda: task(tools=[3]), "a tool must be a named function; got 3"),
    "a misspelt setting of an agent": (
        lambda: gw.Agent(group_sizes=4),
        "unknown setting group_sizes; did you mean group_size?",
    ),
    "an agent that is not there": (
        lambda: gw.Agent.load("nowhere"),
        "nowhere is not a saved agent: it has no agent.json",
    ),
}


@pytest.mark.parametrize("mistake", IN_PYTHON)
def test_a_mistake_in_python_gets_one_sentence(mistake, here):
    before = files_in(here)
    call, sentence = IN_PYTHON[mistake]
    with pytest.raises(ConfigError) as told:
        call()
    assert str(told.value) == sentence.replace("{here}", str(here))
    assert files_in(here) == before
