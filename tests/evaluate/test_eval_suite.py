"""The evaluation suite: votes, the breakdown by question, benchmarks, and rows that were trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import groupwise as gw
from groupwise import cli
from groupwise.commands.eval import evaluate_command, kind_lines, report_lines
from groupwise.config import read_config
from groupwise.errors import ConfigError
from groupwise.evaluate.contamination import prompts_in_training, unseen
from groupwise.evaluate.held_out import Evaluation, kind_summary, question_result
from groupwise.evaluate.intervals import ballots, majority
from groupwise.evaluate.target import BENCHMARKS, benchmark_named, source_of
from groupwise.records import Example, Group, Rollout
from groupwise.rewards import score_group
from groupwise.tasks import TASKS, load_task
from groupwise.tasks.builtin.boxed_math import alike, math
from groupwise.tasks.builtin.gsm8k import gsm8k, same_number
from groupwise.tasks.sft_data import plan_warm_start
from groupwise.tracking.rollout_files import write_rollouts
from groupwise.training import train
from groupwise.training.sft_run import run_sft


def test_the_most_stated_answer_wins_and_no_answer_is_no_vote():
    answers = ["72", None, "70", "72.0", "$70", "70 clips"]
    assert ballots(answers, same_number) == [[2, 4, 5], [0, 3]]
    assert majority(answers, same_number) == 2
    assert majority(["b", "a", "a", "b"], str.__eq__) == 0  # of equally many, the one stated first
    assert majority([None, None], str.__eq__) is None


def test_answers_are_alike_by_their_meaning():
    assert alike(r"\frac{1}{2}", "0.5")
    assert not alike("1", "2")
    assert alike(r"\sum_k k", r"\sum_k k")  # notation that only a worker reads is compared as text
    assert not same_number("none", "72")
    assert same_number("none", "none")


def answered(task, example, *texts):
    rollouts = tuple(
        Rollout(prompt=task.ask(example), text=text, tokens=(1, 2), trained=(False, True),
                logprobs=(0.0, 0.0), entropies=(0.0, 0.0), prompt_length=1, finish="end")
        for text in texts
    )  # fmt: skip
    group = Group(example=example, rollouts=rollouts)
    return score_group(group, rewards=task.rewards, weights=task.weights, seconds=5)


def test_a_question_is_broken_down():
    task = math()
    example = Example({"question": "What is 1 + 1?", "answer": "2"})
    found = question_result(
        task,
        answered(task, example, r"\boxed{3}"),
        answered(task, example, r"\boxed{2}", r"\boxed{2.0}", r"\boxed{3}", "two"),
    )
    assert found.asked.startswith("What is 1 + 1?\nPlease reason")
    assert (found.truth, found.greedy, found.greedy_right) == ("2", "3", False)
    assert (found.right, found.formatted, found.majority_right) == (2, 3, True)
    assert dict(found.votes) == {"2": 2, "3": 1}
    assert found.kind is None


def test_kinds_of_questions_are_set_beside_each_other_the_easiest_first():
    kinds = ("hard", "easy", "hard", None)
    after = Evaluation(
        examples=("a", "b", "c", "d"), greedy_right=(False, True, False, True), sampled_right=(0, 4, 1, 4),
        samples=4, failed=0, length=3.0, kinds=kinds,
    )  # fmt: skip
    before = replace(after, sampled_right=(0, 4, 0, 0))
    summary = kind_summary(before, after)
    assert {kind: (one["avg@4"]["mean"], one["prompts"]) for kind, one in summary.items()} == {
        "easy": (1.0, 1),
        "hard": (0.125, 2),
    }
    assert "change" not in summary["easy"]  # one example has no interval
    assert summary["hard"]["change"]["mean"] == 0.125
    lines = list(kind_lines({"samples": 4, "kinds": summary}))
    assert lines[0] == "  avg@4 by kind of question"
    assert lines[1].startswith("    easy  100.0")
    assert lines[1].endswith("of 1")
    assert "+12.5 points" in lines[2]
    assert list(kind_lines({"samples": 4, "kinds": {"hard": summary["hard"]}})) == []


def test_every_benchmark_has_a_task_that_says_how_to_vote_and_what_the_format_is():
    for benchmark in BENCHMARKS.values():
        task = TASKS[benchmark.task]()
        assert task.predicted is not None
        assert task.format in task.rewards


def test_a_benchmark_is_a_file_in_the_folder_or_a_name_on_the_hub(tmp_path):
    assert source_of(benchmark_named("gsm8k"), None) == "openai/gsm8k:main@test"
    (tmp_path / "gsm8k_test.jsonl").write_text("{}")
    assert source_of(benchmark_named("gsm8k"), str(tmp_path)) == str(tmp_path / "gsm8k_test.jsonl")
    assert source_of(benchmark_named("countdown"), str(tmp_path)) is None  # it holds puzzles out by itself
    with pytest.raises(ConfigError, match=r"contains no math500\.jsonl"):
        source_of(benchmark_named("math500"), str(tmp_path))
    with pytest.raises(ConfigError, match="unknown benchmark 'gsm8'; did you mean 'gsm8k'"):
        benchmark_named("gsm8")
    with pytest.raises(ConfigError, match="a benchmark has its own task"):
        evaluate_command("tiny", benchmarks=["gsm8k"], task="gsm8k")


SHORT = ("rollout.max_tokens=8", "model.device=cpu", "evaluate.samples=2")


def test_benchmarks_are_measured_one_after_the_other_and_saved(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    puzzles = [{"nums": [1, 2, 3], "target": 6}, {"nums": [4, 5, 6], "target": 15}]
    (data / "countdown_test.jsonl").write_text("\n".join(map(json.dumps, puzzles)))
    (data / "gsm8k_test.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}))
    reports = evaluate_command(
        "tiny",
        benchmarks=["countdown", "gsm8k"],
        output=str(tmp_path / "results"),
        overrides=[*SHORT, f"evaluate.data_dir={data}"],
    )
    assert [(report["task"], report["prompts"]) for report in reports] == [("countdown", 2), ("gsm8k", 1)]
    assert reports[0]["maj@2"]["mean"] == 0.0
    assert reports[0]["questions"][1]["truth"] == "[4, 5, 6], 15"
    saved = json.loads(Path(reports[1]["saved"]).read_text())
    assert saved["questions"] == reports[1]["questions"]
    assert Path(reports[1]["saved"]).with_suffix(".txt").is_file()
    lines = list(report_lines(reports[0]))
    assert "  2 questions: 0 always correct, 0 sometimes, 2 never" in lines
    assert any(line.startswith("  format ") for line in lines)


def test_options_of_another_task_are_taken_from_the_words_alone(tmp_path):
    (report,) = evaluate_command(
        "tiny",
        task="gsm8k",
        samples=1,
        examples=2,
        overrides=[*SHORT, "task.options.steps=1", "task.options.largest=5"],
    )
    assert all(question["asked"].count(".") == 2 for question in report["questions"])


def test_rows_of_a_stream_that_were_drawn_are_left_out():
    trained = read_config(overrides=["task.options.numbers=3", "task.options.largest=9", "run.seed=3"])
    task = load_task(trained.task)
    drawn, _ = task.split(trained.task, 3).take(0, 5)
    fresh = Example({"numbers": [99, 1, 1], "target": 97})

    def left(rows: Sequence[Example], *, cursor: int) -> list[Example]:
        asked = prompts_in_training(trained, cursor=cursor, task=task, named="countdown")
        return unseen(rows, task=task, trained=asked)

    assert left([*drawn, fresh], cursor=5) == [fresh]
    assert left(drawn, cursor=4) == [drawn[4]]
    with pytest.raises(ConfigError, match="the model was trained on every one of these examples"):
        left(drawn, cursor=5)
    assert prompts_in_training(trained, cursor=5, task=gsm8k(), named="gsm8k") == set()


GAMES = """import groupwise as gw

class Hidden:
    def reset(self, example):
        return "Guess my number."

    def reply(self, text):
        return None

task = gw.Task(
    name="hidden",
    examples=[{"n": n} for n in range(20)],
    environment=Hidden,
    worked=lambda example, rng: [{"role": "assistant", "content": f"It is {example['n']}."}],
)
"""


@pytest.mark.parametrize("source", ["a run", "a file", "worked answers"])
def test_a_model_that_imitated_games_with_one_opening_is_measured_on_the_others(source, tmp_path):
    game, run, rows = tmp_path / "game.py", tmp_path / "run", tmp_path / "rows.jsonl"
    game.write_text(GAMES)
    words = [f"task.name={game}", "run.kind=sft", "model.name=tiny", "task.held_out=4"]
    task = load_task(read_config(overrides=words).task)
    games = [Example({"n": n}) for n in range(20)]
    if source == "a run":
        run.mkdir()
        (run / "config.yaml").write_text(f"task: {{name: {game}}}")
        groups = [answered(task, one, f"It is {one['n']}.") for one in games]
        write_rollouts(run / "rollouts" / "step-000001.parquet", 1, groups)
        words += [f"sft.from_run={run}", "sft.min_reward=0"]
    if source == "a file":
        rows.write_text('{"prompt": "Guess my number.", "completion": "It is 3."}')
        words += [f"sft.data={rows}", "sft.passes=1"]
    trained = read_config(overrides=words)
    seen = prompts_in_training(trained, cursor=16, task=task, named=trained.task.name)
    split = task.split(trained.task, 0)
    assert unseen(split.held_out, task=task, trained=seen) == list(split.held_out)
    if source != "a file":
        assert unseen(games, task=task, trained=seen) == [one for one in games if one in split.held_out]


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_a_game_with_its_own_opening_is_known_by_it_whatever_columns_come_with_it(kind, tmp_path):
    (tmp_path / "game.py").write_text(
        GAMES.replace('"Guess my number."', "f\"Game {example['n']}: guess my number.\"")
    )
    words = [f"task.name={tmp_path / 'game.py'}", f"run.kind={kind}", "model.name=tiny", "task.held_out=4"]
    trained = read_config(overrides=words)
    task = load_task(trained.task)
    seen = prompts_in_training(trained, cursor=16, task=task, named=trained.task.name)
    numbered = [Example({"n": n, "id": n}) for n in range(20)]
    held = {one["n"] for one in task.split(trained.task, 0).held_out}
    assert {one["n"] for one in unseen(numbered, task=task, trained=seen)} == held


SUMS = """import groupwise as gw
task = gw.Task(
    name="sums",
    examples=[{"n": n} for n in range(20)],
    prompt=lambda e: f"{e['n']} + 1?",
    rewards={"right": lambda rollout, example: float(str(example["n"] + 1) in rollout.text)},
)
"""
LITTLE = ["run.max_steps=1", "rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=4",
          "evaluate.skip=true", "track.trackers=[]", "run.name=run"]  # fmt: skip


@pytest.fixture
def sums(tmp_path: Path) -> tuple[Path, Path]:
    """A task in a file, and a file with the rows that the task has."""
    task, data = tmp_path / "sums.py", tmp_path / "rows.jsonl"
    task.write_text(SUMS)
    data.write_text("\n".join(json.dumps({"n": n}) for n in range(20)))
    return task, data


@pytest.mark.parametrize("how", ["by its file", "in Python", "in Python, with data", "by imitation"])
def test_a_run_on_a_task_of_ones_own_is_not_measured_on_rows_it_trained_on(
    how: str, sums: tuple[Path, Path], tmp_path: Path
) -> None:
    file, data = sums
    words = [*LITTLE, f"run.output_dir={tmp_path}"]
    if how == "by imitation":
        rows = tmp_path / "shown.jsonl"
        shown = [{"prompt": f"{n} + 1?", "completion": str(n + 1)} for n in range(16)]
        rows.write_text("\n".join(map(json.dumps, shown)))
        words += ["run.kind=sft", "task.name=none", f"sft.data={rows}", "task.held_out=0", "sft.batch=2"]
        run = run_sft(plan_warm_start(read_config(overrides=words)))
    else:
        config = read_config(overrides=[*words, f"task.name={file if how == 'by its file' else 'sums'}"])
        if how == "in Python, with data":
            config = replace(config, task=replace(config.task, data=str(data)))
            file.write_text(SUMS.replace("range(20)", "range(100, 200)"))
        run = train(config, task=load_task(replace(config.task, name=str(file))))
    given = None if how == "by its file" else str(file)
    (report,) = evaluate_command(str(run), task=given, data=str(data), samples=1)
    assert (report["prompts"], report["left_out"]) == (4, 16)
    assert "unchecked" not in report
    if how != "by imitation":
        (again,) = evaluate_command(str(run), task=given, samples=1)  # what it holds out itself
        assert {q["asked"] for q in again["questions"]} == {q["asked"] for q in report["questions"]}


def test_a_run_whose_task_is_gone_is_measured_and_says_what_it_cannot_tell(
    sums: tuple[Path, Path], tmp_path: Path
) -> None:
    file, data = sums
    words = [*LITTLE, f"run.output_dir={tmp_path}", f"task.name={file}"]
    run = train(read_config(overrides=words))
    moved = file.rename(tmp_path / "moved.py")
    (report,) = evaluate_command(str(run), task=str(moved), data=str(data), samples=1)
    assert (report["prompts"], report["left_out"]) == (20, 0)
    line = f"  could not check for training examples among these: no such task file: {file}"
    assert line in report_lines(report)


def test_a_run_is_not_measured_on_rows_it_trained_on(tmp_path):
    rows = [{"asked": f"{n} + 1?", "answer": f"{n + 1}"} for n in range(20)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    words = ["task.name=gsm8k", f"task.data={data}", "task.columns={question: asked}", "run.max_steps=1",
             "rollout.prompts=2", "rollout.group_size=2", "evaluate.skip=true", "track.trackers=[]",
             f"run.output_dir={tmp_path}", "run.name=run", *SHORT]  # fmt: skip
    run = train(read_config(overrides=words))
    (report,) = evaluate_command(str(run), data=str(data), samples=2)
    assert (report["prompts"], report["left_out"]) == (4, 16)  # a fifth was held out
    assert "  16 examples were skipped: the model was trained on them" in report_lines(report)
    # A benchmark has columns of its own, and may hold a row that was trained on.
    trained = {row["asked"] for row in rows} - {question["asked"] for question in report["questions"]}
    asked = [{"question": one, "answer": "1"} for one in ("new?", min(trained))]
    (tmp_path / "gsm8k_test.jsonl").write_text("\n".join(map(json.dumps, asked)))
    overrides = [f"evaluate.data_dir={tmp_path}"]
    (report,) = evaluate_command(str(run), benchmarks=["gsm8k"], samples=2, overrides=overrides)
    assert [question["asked"] for question in report["questions"]] == ["new?"]


def rows_file(path: Path, numbers: Sequence[int], text: str = "{n} + 1?") -> Path:
    rows = [{"question": text.format(n=n), "answer": f"{n + 1}"} for n in numbers]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def little_run(folder: Path, *words: str) -> Path:
    settings = [*LITTLE, f"run.output_dir={folder}", *words]
    return train(read_config(overrides=settings))


def test_more_held_out_rows_than_the_run_kept_back_leave_its_training_rows_out(tmp_path):
    data = rows_file(tmp_path / "rows.jsonl", range(200))
    run = little_run(tmp_path, "task.name=gsm8k", f"task.data={data}", "task.held_out=8")
    (same,) = evaluate_command(str(run), samples=1)
    assert (same["prompts"], same["left_out"]) == (8, 0)
    (more,) = evaluate_command(str(run), samples=1, overrides=["task.held_out=40"])
    assert (more["prompts"], more["left_out"]) == (8, 32)
    assert [question["asked"] for question in more["questions"]] == [q["asked"] for q in same["questions"]]
    assert "  32 examples were skipped: the model was trained on them" in report_lines(more)


def test_data_given_as_a_setting_leaves_training_rows_out(tmp_path):
    data = rows_file(tmp_path / "rows.jsonl", range(60))
    run = little_run(tmp_path, "task.name=gsm8k", f"task.data={data}", "task.held_out=8")
    superset = rows_file(tmp_path / "superset.jsonl", range(200))
    trained = read_config(run / "config.yaml").task
    train_rows = {row["question"] for row in load_task(trained).split(trained, 0).train}
    larger = replace(trained, data=str(superset), held_out=40)
    held_out = [row["question"] for row in load_task(larger).split(larger, 0).held_out]
    seen = [question for question in held_out if question in train_rows]
    assert len(seen) > 5
    words = [f"task.data={superset}", "task.held_out=40"]
    (report,) = evaluate_command(str(run), samples=1, overrides=words)
    assert report["left_out"] == len(seen)
    assert [q["asked"] for q in report["questions"]] == [q for q in held_out if q not in train_rows]


def test_a_training_row_in_other_case_and_spacing_is_left_out(tmp_path):
    data = rows_file(tmp_path / "rows.jsonl", range(50), "How much is {n} plus 1?")
    run = little_run(tmp_path, "task.name=gsm8k", f"task.data={data}", "task.held_out=0")
    shouted = rows_file(tmp_path / "shouted.jsonl", range(40, 60), "HOW MUCH  is {n}\nplus 1? ")
    (report,) = evaluate_command(str(run), samples=1, data=str(shouted))
    assert (report["prompts"], report["left_out"]) == (10, 10)
    (other,) = evaluate_command(str(run), samples=1, task="math", data=str(shouted))  # the same questions
    assert (other["prompts"], other["left_out"]) == (10, 10)


def test_a_puzzle_in_another_order_is_left_out(tmp_path):
    def puzzles(name: str, order: int) -> Path:
        rows = [{"nums": [n, 2, 1][::order], "target": n + 3} for n in range(10, 30)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return tmp_path / name

    run = little_run(tmp_path, "task.name=countdown", f"task.data={puzzles('a.jsonl', 1)}", "task.held_out=4")
    (report,) = evaluate_command(str(run), samples=1, data=str(puzzles("b.jsonl", -1)))
    assert (report["prompts"], report["left_out"]) == (4, 16)


def imitating_run(folder: Path, rows: range, *words: str) -> Path:
    shown = [{"prompt": f"{n} + 1?", "completion": str(n + 1)} for n in rows]
    (folder / "shown.jsonl").write_text("\n".join(map(json.dumps, shown)))
    return run_sft(
        plan_warm_start(
            read_config(
                overrides=[
                    *LITTLE[:-1],
                    *(
                        "run.name=imitated",
                        "run.kind=sft",
                        "task.name=none",
                        "task.held_out=0",
                        "sft.batch=2",
                    ),
                    *(f"run.output_dir={folder}", f"sft.data={folder / 'shown.jsonl'}", *words),
                ]
            )
        )
    )


@pytest.mark.parametrize("how", ["full weights", "merged adapters"])
def test_rows_that_a_parent_run_trained_on_are_left_out(how: str, sums: tuple[Path, Path], tmp_path: Path):
    file, data = sums
    file.write_text(SUMS.replace("range(20)", "range(100, 120)"))
    adapters = "lora.r=0" if how == "full weights" else "lora.r=2"
    parent = imitating_run(tmp_path, range(8), adapters)
    start = parent / "checkpoints" / "step-000001"
    if how != "full weights":
        assert cli.main(["merge", str(parent), "--output-path", str(tmp_path / "merged")]) == 0
        start = tmp_path / "merged"
        shutil.rmtree(parent)  # the merged folder says by itself what it was trained on
    middle = little_run(tmp_path, f"task.name={file}", f"model.name={start}", "lora.r=0")
    child = little_run(
        *(tmp_path, f"task.name={file}", "run.name=child", "lora.r=2"),
        f"model.name={middle / 'checkpoints' / 'step-000001'}",
    )
    (report,) = evaluate_command(str(child), task=str(file), data=str(data), samples=1)
    assert (report["prompts"], report["left_out"]) == (12, 8)
    assert "unchecked" not in report
    (report,) = evaluate_command(str(start), task=str(file), data=str(data), samples=1)  # the parent itself
    assert (report["prompts"], report["left_out"]) == (12, 8)


def test_a_parent_that_is_gone_is_named(sums: tuple[Path, Path], tmp_path: Path) -> None:
    file, data = sums
    parent = imitating_run(tmp_path, range(8), "lora.r=0")
    start = parent / "checkpoints" / "step-000001"
    middle = little_run(tmp_path, f"task.name={file}", f"model.name={start}", "lora.r=0")
    shutil.rmtree(parent)
    last = middle / "checkpoints" / "step-000001"
    child = little_run(tmp_path, f"task.name={file}", f"model.name={last}", "run.name=child")
    (report,) = evaluate_command(str(child), data=str(data), samples=1)
    assert report["unchecked"] == f"{start}, which training started from, is not there any more"


def test_prompts_that_a_saved_agent_learned_from_are_left_out(
    sums: tuple[Path, Path], tmp_path: Path
) -> None:
    file, data = sums
    agent = gw.Agent(model="tiny", group_size=2, max_tokens=4, lora_r=2)
    prompts = [f"{n} + 1?" for n in (0, 1, 2)]
    agent.learn((agent.get_action(prompts), [[0.0, 1.0]] * 3))
    agent.get_action(["3 + 1?"], training=False)  # answered, not learned from
    folder = gw.Agent.load(agent.clone().save(tmp_path / "first")).save(tmp_path / "agent")
    (report,) = evaluate_command(str(folder), task=str(file), data=str(data), samples=1)
    assert (report["prompts"], report["left_out"]) == (17, 3)
    (folder / "agent.json").write_text('{"actions": 1, "steps": 1, "fitness": []}')
    (report,) = evaluate_command(str(folder), task=str(file), data=str(data), samples=1)
    assert report["unchecked"] == f"the agent in {folder} was saved without the prompts that it learned from"


def transcript(report: Mapping[str, Any]) -> str:
    return Path(report["saved"]).with_suffix(".txt").read_text()


def math_run(folder: Path) -> Path:
    return little_run(folder, "task.name=math", "task.options.scoring=lenient", "task.held_out=2")


def test_a_benchmark_is_asked_and_judged_by_the_runs_own_task(tmp_path):
    run = math_run(tmp_path)
    solution = "She sold 24 + 48 = <<24+48=72>>72 clips.\n#### 72"
    rows = {
        "gsm8k_test.jsonl": {"question": "How many clips?", "answer": solution},
        "math500.jsonl": {"problem": "What is $1 + 1$?", "answer": "2", "solution": r"It is \boxed{2}."},
        "countdown_test.jsonl": {"nums": [1, 2, 3], "target": 6},
    }
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row))
    reports = evaluate_command(
        str(run),
        benchmarks=["gsm8k", "math500", "countdown"],
        samples=1,
        overrides=[f"evaluate.data_dir={tmp_path}"],
    )
    assert [report["task"] for report in reports] == ["gsm8k", "math500", "countdown"]
    assert [report["verifier"] for report in reports] == ["math", "math", "countdown"]
    assert [report["questions"][0]["truth"] for report in reports[:2]] == ["72", "2"]
    asked = reports[0]["questions"][0]["asked"]
    assert asked == "How many clips?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert "answer -0.5, correct 0, boxed 0" in transcript(reports[0])  # no box, by the run's own scores
    assert next(report_lines(reports[0])).startswith("gsm8k with the math verifier · ")
    assert next(report_lines(reports[1])).startswith("math500 with the math verifier · ")
    assert next(report_lines(reports[2])).startswith("countdown · ")


def test_a_benchmark_that_the_runs_verifier_cannot_judge_brings_its_own(tmp_path):
    run = little_run(tmp_path, "task.name=gsm8k", "task.held_out=2")
    row = {"problem": "Factor $x^2 - 1$.", "answer": "(x-1)(x+1)"}  # no number
    (tmp_path / "math500.jsonl").write_text(json.dumps(row))
    words = [f"evaluate.data_dir={tmp_path}", "rollout.max_tokens=8"]
    (report,) = evaluate_command(str(run), benchmarks=["math500"], samples=1, overrides=words)
    assert report["verifier"] == "math"
    (report,) = evaluate_command("tiny", benchmarks=["math500"], samples=1, overrides=words)
    assert report["verifier"] == "math"


def test_the_runs_own_task_named_again_keeps_its_options_and_data(tmp_path):
    run = math_run(tmp_path)
    (own,) = evaluate_command(str(run), samples=1)
    (named,) = evaluate_command(str(run), task="math", samples=1)
    assert transcript(named) == transcript(own)
    assert transcript(named).count("answer -0.5, correct 0, boxed 0") == 2  # lenient: no box in four tokens
    assert [q["asked"] for q in named["questions"]] == [q["asked"] for q in own["questions"]]


def test_another_task_takes_the_data_in_the_words(tmp_path):
    data = rows_file(tmp_path / "rows.jsonl", range(20))
    words = [*SHORT, f"task.data={data}"]
    (report,) = evaluate_command("tiny", task="gsm8k", samples=1, overrides=words)
    assert report["prompts"] == 4  # a fifth of them
    assert all(question["asked"].endswith(" + 1?") for question in report["questions"])


def test_strategies_are_measured_beside_the_rest():
    with pytest.raises(ConfigError, match="unknown strategy"):
        evaluate_command("tiny", strategies=["wurst-of:8"], overrides=SHORT)
    (report,) = evaluate_command(
        "tiny", strategies=["single", "best-of:2"], samples=2, examples=3, overrides=SHORT
    )
    assert report["strategies"]["single"]["accuracy"] == report["greedy"]
    assert report["strategies"]["best-of:2"]["tokens"] == 16.0
    lines = list(report_lines(report))
    assert "  best-of:2           0.0 % [0.0, 63.2]                    16.0" in lines
