from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import pytest

from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Example, Rollout
from groupwise.tasks import TASKS, Task, load_examples, load_task
from groupwise.tasks.registry import leave_task_file, loading_task_file

ROWS = [{"q": i, "answer": str(i)} for i in range(50)]


def correct(rollout, example):
    return 1.0


def make(**changes):
    fields = {
        "name": "t",
        "examples": ROWS,
        "prompt": lambda e: f"{e['q']}?",
        "rewards": {"correct": correct},
    }
    return Task(**{**fields, **changes})


def fingerprints(examples):
    return {example.fingerprint for example in examples}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": {}}, "task t: rewards must be a non-empty dict of names and functions"),
        ({"rewards": {"correct": 1}}, "reward 'correct' must be a function"),
        ({"weights": {"corect": 1}}, "weight for unknown reward 'corect'; did you mean 'correct'?"),
        ({"weights": {"correct": "1"}}, "the weight of 'correct' must be a finite number"),
        ({"weights": {"correct": float("nan")}}, "the weight of 'correct' must be a finite number"),
        ({"accuracy": "zzz"}, "accuracy names unknown reward 'zzz'; it must be one of correct"),
        ({"tools": [print]}, "tool print: every parameter must be passable by name"),
        ({"prompt": "hi"}, "prompt must be a function"),
        ({"name": ""}, "a task requires a name"),
        ({"examples": []}, "task t: examples: there are no examples"),
        ({"examples": [{"a": 1}, 3]}, "task t: examples, row 2: expected a dict of columns, got int"),
        ({"examples": {"train": []}}, "expected a list of dicts, got dict"),
        ({"held_out": ["x"]}, "task t: held_out, row 1: expected a dict"),
    ],
)
def test_a_task_that_cannot_work_is_refused_with_one_sentence(changes, message):
    with pytest.raises(ConfigError) as error:
        make(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_prompt_is_checked_and_its_failure_names_the_column():
    assert make().ask(Example({"q": 1})) == "1?"
    messages = [{"role": "user", "content": "hi"}]
    assert make(prompt=lambda e: messages).ask(Example({})) == messages
    with pytest.raises(ConfigError, match=r"no column 'q'; it has \['x'\] \(KeyError\)"):
        make().ask(Example({"x": 1}))
    for bad in ("", [], None, [{"content": "no role"}], ["text"]):
        with pytest.raises(ConfigError, match="must return a string or a list of messages"):
            make(prompt=lambda e, bad=bad: bad).ask(Example({}))


def test_accuracy_is_read_from_its_reward_or_the_first():
    def scored(**rewards):
        return Rollout(
            prompt="q", text="", tokens=(1,), trained=(False,), logprobs=(0.0,), entropies=(0.0,),
            prompt_length=1, finish="end", rewards=rewards,
        )  # fmt: skip

    two = {"format": correct, "equation": correct}
    assert make(rewards=two).is_right(scored(format=1.0, equation=0.0))
    named = make(rewards=two, accuracy="equation")
    assert [named.is_right(scored(format=1.0, equation=e)) for e in (0.0, 0.99, 1.0)] == [False, False, True]
    assert not named.is_right(scored(format=1.0))


def test_finite_data_is_split_into_disjoint_parts_that_cover_it():
    split = make().split(TaskConfig(held_out=5), seed=0)
    assert (len(split.train), len(split.held_out), split.size, split.dropped) == (45, 5, 45, 0)
    assert not fingerprints(split.train) & fingerprints(split.held_out)
    assert fingerprints(split.train) | fingerprints(split.held_out) == fingerprints(make().examples)


def test_at_most_a_fifth_of_the_data_is_held_out():
    assert len(make().split(TaskConfig(held_out=512), seed=0).held_out) == 10
    assert make(examples=ROWS[:3]).split(TaskConfig(held_out=512), seed=0).held_out == ()


def test_a_repeated_row_counts_once_and_is_on_one_side():
    split = make(examples=ROWS + ROWS[:20]).split(TaskConfig(), seed=0)
    assert (len(split.train), len(split.held_out), split.dropped) == (40, 10, 20)
    assert not fingerprints(split.train) & fingerprints(split.held_out)


def test_the_held_out_rows_do_not_depend_on_seed_or_order_and_hardly_on_other_rows():
    held = fingerprints(make().split(TaskConfig(held_out=8), seed=0).held_out)
    assert held == fingerprints(make(examples=ROWS[::-1]).split(TaskConfig(held_out=8), seed=7).held_out)
    more = make(examples=[*ROWS, {"q": 999, "answer": "x"}]).split(TaskConfig(held_out=8), seed=0)
    assert len(held & fingerprints(more.held_out)) >= 7


def test_rows_that_differ_in_case_and_space_alone_are_never_on_both_sides():
    rows = [{"q": f"Add {n} to One", "v": v} for n in range(25) for v in (0, 1)]
    asked = (lambda e: e["q"], lambda e: f"  {e['q'].upper()}\n")
    task = make(examples=rows, prompt=lambda e: asked[e["v"]](e))
    split = task.split(TaskConfig(held_out=10), 0)
    held_out = {row["q"] for row in split.held_out}
    assert len(split.held_out) == 10
    assert held_out.isdisjoint(row["q"] for row in split.train)
    assert len(split.train) == 50 - 2 * len(held_out)
    chat = make(examples=rows, prompt=lambda e: [{"role": "user", "content": asked[e["v"]](e)}])
    assert chat.split(TaskConfig(held_out=10), 0) == split


def test_a_key_of_the_tasks_own_says_which_rows_ask_the_same():
    rows = [{"numbers": order, "target": n + 3} for n in range(10, 60) for order in ([n, 2, 1], [1, n, 2])]
    split = make(examples=rows, prompt=lambda e: str(dict(e)), key=lambda e: str(e["target"])).split(
        TaskConfig(held_out=20), 0
    )
    held_out = {row["target"] for row in split.held_out}
    assert held_out.isdisjoint(row["target"] for row in split.train)
    with pytest.raises(
        ConfigError, match="task t: key failed on an example: the example has no column 'none'"
    ):
        make(key=lambda e: e["none"]).split(TaskConfig(), 0)


def test_the_fingerprint_of_rows_that_all_differ_is_that_of_older_checkpoints():
    assert make().split(TaskConfig(held_out=10), 0).fingerprint == "437230fab41f772c"


def test_held_out_rows_of_the_tasks_own_are_kept_and_dropped_from_training():
    split = make(held_out=ROWS[:4]).split(TaskConfig(held_out=3), seed=0)
    assert [example["q"] for example in split.held_out] == [0, 1, 2]
    assert [example["q"] for example in split.train] == list(
        range(4, 50)
    )  # the fourth is not trained on either
    assert split.dropped == 4
    with pytest.raises(ConfigError, match="no training examples left"):
        make(held_out=ROWS).split(TaskConfig(), seed=0)


def test_max_examples_limits_training_alone():
    split = make().split(TaskConfig(max_examples=7, held_out=5), seed=0)
    assert (len(split.train), len(split.held_out)) == (7, 5)


def test_each_epoch_visits_every_example_once_in_an_order_of_its_own():
    split = make().split(TaskConfig(held_out=5), seed=3)
    examples, cursor = split.take(0, 90)
    assert cursor == 90
    first, second = examples[:45], examples[45:]
    assert fingerprints(first) == fingerprints(second) == fingerprints(split.train)
    assert first != second
    assert split.take(0, 45)[0] != make().split(TaskConfig(held_out=5), seed=4).take(0, 45)[0]


def test_the_cursor_alone_resumes_exactly():
    whole, _ = make().split(TaskConfig(), seed=3).take(0, 100)
    cursor, parts = 0, []
    for count in (1, 50, 9, 40):
        fresh = make().split(TaskConfig(), seed=3)  # as after a restart
        examples, cursor = fresh.take(cursor, count)
        parts += examples
    assert parts == whole


class Counting:
    def train(self, index, *, seed):
        return Example({"q": index, "seed": seed})

    def held_out(self, count):
        return [Example({"q": -1 - index}) for index in range(count)]


def test_a_stream_is_read_by_index_and_max_examples_makes_it_finite():
    endless = make(examples=Counting()).split(TaskConfig(held_out=2), seed=5)
    assert [example["q"] for example in endless.held_out] == [-1, -2]
    assert endless.take(10, 2) == ([Example({"q": 10, "seed": 5}), Example({"q": 11, "seed": 5})], 12)
    finite = make(examples=Counting()).split(TaskConfig(max_examples=4), seed=5)
    assert sorted(example["q"] for example in finite.take(4, 4)[0]) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="a stream has its own"):
        make(examples=Counting(), held_out=ROWS).split(TaskConfig(), seed=5)


def test_every_file_format_reads_the_same(tmp_path):
    import pyarrow
    import pyarrow.parquet

    lines = "\n\n".join(json.dumps(row) for row in ROWS) + "\n"
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    expected = [Example(row) for row in ROWS]
    for name in ("a.json", "a.jsonl", "a.jsonl.gz", "a.parquet"):
        assert load_examples(tmp_path / name) == load_examples(str(tmp_path / name)) == expected, name


def test_examples_may_come_from_lists_generators_and_functions():
    def rows():
        yield from ROWS[:2]

    expected = [Example(row) for row in ROWS[:2]]
    assert load_examples(ROWS[:2]) == load_examples(rows()) == load_examples(rows) == expected
    assert load_examples(expected) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", b'{"a": 1}\n\n{"a": \n', "bad.jsonl, line 3 is not valid JSON"),
        ("bad.jsonl", b'{"a": 1}\n[1]\n', "bad.jsonl, line 2: expected a dict of columns, got list"),
        ("bad.jsonl", b"\n", "bad.jsonl: there are no examples"),
        ("bad.jsonl", b'{"a": "\xff"}\n', "cannot read"),
        (
            "bad.jsonl",
            b'{"a": "1"}\n{"a": ["\\ud83d"]}\n',
            "bad.jsonl, line 2: the text is not valid Unicode",
        ),
        ("bad.jsonl.gz", b"not gzip", "cannot read"),
        ("bad.json", b"[1", "bad.json is not valid JSON: column 3"),
        ("deep.json", b"[" * 100_000, "deep.json: the JSON is nested too deeply"),
        ("deep.jsonl", b'{"a": 1}\n' + b"[" * 100_000, "deep.jsonl, line 2: the JSON is nested too deeply"),
        ("bad.json", b'{"a": 1}', "bad.json: expected a list of dicts, got dict"),
        ("bad.json", b'[{"a": 1}, 2]', "bad.json, row 2"),
        ("bad.parquet", b"not parquet", "cannot read"),
        ("bad.xlsx", b"", "use a .json, .jsonl, .csv, .tsv or .parquet file"),
    ],
)
def test_a_bad_file_is_named_with_the_line_or_row(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_examples(tmp_path / name)
    assert message in str(error.value)
    assert name in str(error.value)


def test_a_missing_file_is_not_taken_for_a_dataset(tmp_path):
    for source in ("nowhere.jsonl", str(tmp_path / "rows"), "./rows", "../x"):
        with pytest.raises(ConfigError, match="no such file"):
            load_examples(source)


def test_a_dataset_without_its_library_gets_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        load_examples("openai/gsm8k:main")


def test_options_of_a_built_in_task_are_strict():
    assert set(TASKS) == {"code", "countdown", "gsm8k", "math", "medquad", "search_qa", "tldr"}
    with pytest.raises(ConfigError, match=r"unknown setting task.options.larges; did you mean 'largest'\?"):
        load_task(TaskConfig(options={"larges": 20}))
    with pytest.raises(ConfigError, match=r"unknown task 'contdown'; did you mean 'countdown'\?"):
        load_task(TaskConfig(name="contdown"))


TASK_FILE = """
import groupwise_task_neighbour
from groupwise.tasks import Task, leave_task_file

task = Task(name="mine", examples=[{"q": 1}], prompt=lambda e: "hi", rewards={"one": lambda r, e: 1.0})

def train(task, **settings):
    leave_task_file(task)
    raise SystemExit("a second run started")

train(task, max_steps=100)
"""


def test_a_task_file_is_loaded_without_starting_the_run_at_its_end(tmp_path):
    (tmp_path / "mine.py").write_text(TASK_FILE)
    (tmp_path / "groupwise_task_neighbour.py").write_text("")
    task = load_task(TaskConfig(name=str(tmp_path / "mine.py")))
    assert task.name == "mine"
    assert not loading_task_file.get()
    leave_task_file(task)  # outside of loading it does nothing


def test_a_task_that_is_only_trained_and_never_named_is_found_too(tmp_path):
    (tmp_path / "groupwise_task_neighbour.py").write_text("")
    text = TASK_FILE.replace("task = Task(", "nameless = Task(").replace(
        "train(task, max", "train(nameless, max"
    )
    (tmp_path / "other.py").write_text(text)
    assert load_task(TaskConfig(name=str(tmp_path / "other.py"))).name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "does not define `task`"),
        ("task = 3\n", "`task` must be a groupwise.Task; got int"),
        ("\n\nx = undefined\n", "broken.py, line 3: NameError"),
        ("x = (\n", "broken.py, line 1: SyntaxError: '\\(' was never closed$"),
        ("from groupwise.tasks import Task\nTask(name='')", "missing"),
    ],
)
def test_a_broken_task_file_names_the_line(tmp_path, monkeypatch, text, message):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("broken.py", str(tmp_path / "broken.py")):
        with pytest.raises(ConfigError, match=message):
            load_task(TaskConfig(name=name))
    assert not loading_task_file.get()


def test_a_missing_task_file_and_options_for_a_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such task file"):
        load_task(TaskConfig(name=str(tmp_path / "none.py")))
    (tmp_path / "mine.py").write_text(TASK_FILE)
    (tmp_path / "groupwise_task_neighbour.py").write_text("")
    with pytest.raises(ConfigError, match="options requires a built-in task"):
        load_task(TaskConfig(name=str(tmp_path / "mine.py"), options={"x": 1}))


def test_data_replaces_the_examples_of_a_task(tmp_path):
    rows = [{"id": i, "nums": [i + 1, 2, 3], "target": i + 6} for i in range(10)]
    path = tmp_path / "puzzles.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    task = load_task(TaskConfig(data=str(path)))
    split = task.split(TaskConfig(), seed=0)
    assert (len(split.train), len(split.held_out)) == (8, 2)
    assert "(1, 2, 3), create an equation that equals 6." in task.ask(Example(rows[0]))[1]["content"]


def test_a_row_with_a_set_has_the_same_fingerprint_in_every_process():
    code = "from groupwise.records import Example; print(Example({'a': {'1', 'x', 'y'}}).fingerprint)"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


class Hidden:
    """A game whose opening does not show its number."""

    def reset(self, example):
        return "Guess my number."

    def reply(self, text):
        return None


class HiddenTools:
    """The same game with a tool, as TRL's `environment_factory`."""

    def reset(self, number, **columns):
        self.number = number

    def guess(self, number: int) -> bool:
        """Guess the number."""
        return number == self.number


def test_games_with_one_opening_are_different_examples():
    rows = [{"number": n} for n in range(50)]
    told = [{"role": "user", "content": "Guess my number."}]
    prompted = [{"prompt": told, "number": n} for n in range(50)]
    tasks = (
        Task(name="hidden", examples=rows, environment=Hidden),
        Task(name="hidden", examples=prompted, environment_factory=HiddenTools, rewards={"r": correct}),
    )
    for task in tasks:
        split = task.split(TaskConfig(held_out=10), seed=0)
        assert (len(split.train), len(split.held_out), split.dropped) == (40, 10, 0)
        asked = {task.asks(example) for example in split.held_out}
        assert len(asked) == 10
        assert asked.isdisjoint(map(task.asks, split.train))


class Doors:
    """A game with as many openings as doors."""

    def __init__(self, doors):
        self.doors = doors

    def __call__(self):
        return self

    def reset(self, example):
        return f"Open door {example['n'] % self.doors}."

    def reply(self, text):
        return None


def test_the_fingerprint_of_games_tells_whether_rows_are_kept_that_earlier_versions_dropped():
    rows = [{"n": n} for n in range(90)]

    def split(doors):
        return Task(name="doors", examples=rows, environment=Doors(doors)).split(TaskConfig(held_out=6), 0)

    # The 6 held-out games have 6 of 30 openings. Earlier versions dropped the 12 other games with these.
    assert (split(90).size, split(30).size) == (84, 84)
    assert split(90).fingerprint == "0e2be6bc9da8c484"  # the same rows as in earlier versions
    assert split(30).fingerprint == "81453e27e93c4995"
