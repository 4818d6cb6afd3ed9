"""Every feature works with every kind of task, or is refused with one sentence.

docs/combinations.md has the table. Its sentences are those that the commands print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import groupwise as gw
from groupwise import cli
from groupwise.commands.eval import evaluate_command
from groupwise.config import read_config
from groupwise.errors import ConfigError
from groupwise.tasks import load_task
from groupwise.tracking.rollout_files import read_rollouts

pytest.importorskip("starlette")

from stand_in_vllm import StandIn
from starlette.testclient import TestClient

from groupwise.report.run_reader import RunIndex
from groupwise.report.watch_server import application

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
ROWS = "examples = [{'n': n} for n in range(12)]\n"
FILES = {
    "plain": ROWS
    + """
import zlib
import groupwise as gw

def luck(rollout, example):
    return float(zlib.crc32(rollout.text.encode()) % 2)

task = gw.Task(name="plain", examples=examples, prompt=lambda e: f"{e['n']} + 1", rewards={"luck": luck},
               difficulty=lambda e: str(e["n"] % 2), worked=lambda e, rng: str(e["n"] + 1))
""",
    "tools": ROWS
    + """
import zlib
import groupwise as gw

def add(number: int) -> int:
    \"\"\"Add one to a number.\"\"\"
    return number + 1

def luck(rollout, example):
    return float(zlib.crc32(rollout.text.encode()) % 2)

def worked(example, rng):
    call = {"function": {"name": "add", "arguments": {"number": example["n"]}}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(example["n"] + 1)},
            {"role": "assistant", "content": str(example["n"] + 1)}]

task = gw.Task(name="tools", examples=examples, prompt=lambda e: f"{e['n']} + 1", rewards={"luck": luck},
               tools=[add], difficulty=lambda e: str(e["n"] % 2), worked=worked)
""",
    "environment": ROWS
    + """
import zlib
import groupwise as gw

class Game:
    def reset(self, example):
        self.turns = 0
        return f"Say {example['n']}"

    def reply(self, text):
        self.turns += 1
        won = zlib.crc32(text.encode()) % 2
        return gw.Reply("Again.", reward=float(won), done=self.turns == 2)

def worked(example, rng):
    return [{"role": "assistant", "content": "1"}, {"role": "user", "content": "Again."},
            {"role": "assistant", "content": str(example["n"])}]

task = gw.Task(name="environment", examples=examples, environment=Game, difficulty=lambda e: str(e["n"] % 2),
               worked=worked)
""",
    "program": ROWS
    + """
import json, urllib.request, zlib
import groupwise as gw

def chat(base_url, api_key, messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(base_url + "/chat/completions", data=body, headers=headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def talk(example, base_url, api_key):
    messages = [{"role": "user", "content": f"{example['n']} + 1"}]
    messages += [chat(base_url, api_key, messages), {"role": "user", "content": "Again."}]
    return chat(base_url, api_key, messages)["content"]

def luck(rollout, example):
    return float(zlib.crc32(rollout.text.encode()) % 2)

task = gw.Task(name="program", examples=examples, agent=talk, rewards={"luck": luck},
               difficulty=lambda e: str(e["n"] % 2))
""",
}
SMALL = (
    *("model.name=tiny", "model.device=cpu", "lora.r=4", "run.max_steps=1", "run.save_every=1"),
    *("rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=4", "rollout.temperature=1.5"),
    *("evaluate.skip=true", "task.held_out=2", "track.report=false", "track.trackers=[]"),
    *("tools.max_turns=2", "tools.max_tokens=64"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("combinations")
    for kind, text in FILES.items():
        (folder / f"{kind}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with StandIn() as fake:
        yield fake


class Cell:
    """One kind of task, and the runs of it that several features use."""

    def __init__(self, place: Path, kind: str, address: str) -> None:
        self.place, self.kind, self.address = place, kind, address
        self.file = place / f"{kind}.py"

    def run(self, command: str, name: str, *more: str) -> Path:
        """Run a command whose settings are `more`; raise ConfigError with what it prints where it refuses."""
        task = ["--task", str(self.file)] if command == "sft" else [str(self.file)]
        where = [f"run.output_dir={self.place}", f"run.name={self.kind}-{name}"]
        if cli.main([command, *task, *where, *SMALL, *more]) == 2:
            raise ConfigError("refused")
        assert (self.place / f"{self.kind}-{name}" / "training_stats.json").is_file()
        return self.place / f"{self.kind}-{name}"

    def trained(self) -> Path:
        path = self.place / f"{self.kind}-train"
        return path if path.exists() else self.run("train", "train")


def train(cell: Cell) -> None:
    rows = read_rollouts(cell.trained() / "rollouts" / "step-000001.parquet")
    assert len(rows) >= 4
    assert not any(row["error"] for row in rows)
    if cell.kind == "environment":
        assert all(len(row["turns"]) == 2 for row in rows if row["finish"] == "stop")


def resume(cell: Cell) -> None:
    path = cell.trained()
    assert cli.main(["train", "--resume", str(path), "run.max_steps=2"]) == 0
    assert (path / "checkpoints" / "step-000002").is_dir()


def sft(cell: Cell) -> None:
    cell.run("sft", "sft", "sft.batch=2")


def evaluation(cell: Cell) -> None:
    (report,) = evaluate_command(str(cell.trained()), samples=1, examples=2)
    assert (report["prompts"], report["failed"]) == (2, 0)


def strategies(cell: Cell) -> None:
    names = ["single", "self-consistency:2", "best-of:2"]
    (report,) = evaluate_command(str(cell.trained()), samples=1, examples=2, strategies=names)
    assert report["strategies"]["single"]["accuracy"] == report["greedy"]


def curriculum(cell: Cell) -> None:
    cell.run("train", "curriculum", "rollout.curriculum=2")


def populations(cell: Cell) -> None:
    few = ("evolve.population=2", "evolve.every=1", "evaluate.skip=false", "evaluate.during=1")
    run = cell.run("evolve", "populations", *few, "evaluate.samples=1")
    rows = read_rollouts(run / "rollouts" / "step-000001.parquet")
    assert {row["example"]["population_member"] for row in rows} == {0, 1}
    assert not any(row["error"] for row in rows)


def agent(cell: Cell) -> None:
    task = load_task(read_config(overrides=[f"task.name={cell.file}"]).task)
    env = gw.PromptEnv(task, batch_size=2)
    learner = gw.Agent(
        model={"name": "tiny", "device": "cpu"},
        group_size=2,
        max_tokens=4,
        lora_r=4,
        temperature=1.5,
        tools={"max_turns": 2, "max_tokens": 64},
    )
    prompts, _ = env.reset()
    answers = learner.get_action(prompts)
    _, rewards, *_ = env.step(answers)
    assert all(bool(r.turns) == (cell.kind != "plain") for group in answers for r in group)
    learner.learn((answers, rewards))


def vllm(cell: Cell) -> None:
    cell.run("train", "vllm", "engine.kind=vllm", f"engine.servers=[{cell.address}]", "run.max_steps=2")


def overlap(cell: Cell) -> None:
    servers = ("engine.kind=vllm", f"engine.servers=[{cell.address}]", "run.max_steps=2")
    cell.run("train", "overlap", *servers, "rollout.overlap=true")


def watch(cell: Cell) -> None:
    client = TestClient(application(RunIndex.of([cell.trained()])), base_url="http://127.0.0.1")
    (listed,) = client.get("/api/runs").json()
    group = client.get(f"/api/runs/{listed['id']}/steps/1/groups/0").json()
    assert len(group["members"]) == 2
    assert client.get(f"/api/runs/{listed['id']}/steps/1/groups/0/members/1").status_code == 200


def report(cell: Cell) -> None:
    assert cli.main(["report", str(cell.trained())]) == 0
    assert (cell.trained() / "report.html").is_file()


FEATURES: dict[str, Callable[[Cell], None]] = {
    "train": train,
    "sft": sft,
    "eval": evaluation,
    "strategies": strategies,
    "curriculum": curriculum,
    "populations": populations,
    "agent": agent,
    "vLLM": vllm,
    "overlap": overlap,
    "watch": watch,
    "report": report,
    "resume": resume,
}


def expected() -> dict[tuple[str, str], str]:
    """Return the table of the page: (feature, kind) -> "yes", or the sentence of the note that it names."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    notes = {line.partition(": ")[0]: line.partition(": ")[2] for line in lines if line.startswith("- note ")}
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    head, _, *rest = rows
    return {
        (row[0], kind): notes[f"- {cell}"] if cell.startswith("note") else cell
        for row in rest
        for kind, cell in zip(head[1:], row[1:], strict=True)
    }


def test_the_page_has_every_combination():
    assert set(expected()) == {(feature, kind) for feature in FEATURES for kind in FILES}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_combination_works_or_is_refused_with_the_sentence_of_the_page(
    place, server, kind, feature, capsys
):
    outcome = "yes"
    try:
        FEATURES[feature](Cell(place, kind, server.address))
    except ConfigError as error:
        told = capsys.readouterr().err
        outcome = told.removeprefix("error: ").strip() if str(error) == "refused" else str(error)
    assert outcome == expected()[feature, kind]
