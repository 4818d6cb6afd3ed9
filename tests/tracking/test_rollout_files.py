"""Rollouts as Parquet: prompts and examples as structures that other programs read as they are."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from groupwise.records import Example, Group, Rollout, stored_form
from groupwise.report.rollout_view import RolloutView
from groupwise.run_result import RunResult
from groupwise.tracking.rollout_files import RolloutSchema, kind_of, merge, read_rollouts, write_rollouts
from groupwise.tracking.run_folder import RunFolder

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3 + 4 = ?"}]


def group(columns: dict[str, Any], *, prompt: Any = CHAT, rewards: Sequence[str] = ("right",)) -> Group:
    rollout = Rollout(
        prompt=prompt,
        text="7",
        tokens=(5, 6, 7),
        trained=(False, False, True),
        logprobs=(0.0, 0.0, -0.5),
        entropies=(0.0, 0.0, 1.5),
        prompt_length=2,
        finish="end",
        rewards=dict.fromkeys(rewards, 1.0),
        reward=1.0,
    )
    return Group(example=Example(columns), rollouts=(rollout, rollout))


def written(folder: Path, columns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    path = folder / "step-000001.parquet"
    write_rollouts(path, 1, [group(one) for one in columns])
    return [row["example"] for row in read_rollouts(path)][::2]


ROWS = [
    {"question": "3 + 4 = ?", "answer": 7, "numbers": [3, 4], "about": {"level": 1, "tags": ["sum"]}},
    {"question": "1 + 1 = ?", "answer": 2, "numbers": [], "about": {"level": 2, "tags": []}},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, the second with other examples than the first."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    schema = RolloutSchema(rewards=["right", "short"], examples=ROWS)
    for step, row in enumerate(ROWS, start=1):
        write_rollouts(folder / "rollouts" / f"step-{step:06}.parquet", step, [group(row)], schema)
    return folder


def test_prompts_are_lists_of_messages_and_examples_structs(run: Path) -> None:
    schema = pq.read_schema(run / "rollouts" / "step-000001.parquet")
    message = pa.struct({"role": pa.string(), "content": pa.string()})
    assert schema.field("prompt").type == pa.list_(message)
    assert schema.field("example").type == pa.struct(
        {
            "question": pa.string(),
            "answer": pa.int64(),
            "numbers": pa.list_(pa.int64()),
            "about": pa.struct({"level": pa.int64(), "tags": pa.list_(pa.string())}),
        }
    )


def test_all_files_of_a_run_have_the_same_schema(run: Path) -> None:
    one, other = (pq.read_schema(path) for path in sorted((run / "rollouts").iterdir()))
    assert one == other
    assert one.field("rewards").type == pa.struct({"right": pa.float64(), "short": pa.float64()})


def test_datasets_reads_all_files_of_a_run(run: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    files = str(run / "rollouts" / "*.parquet")
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path))
    assert rows[0]["prompt"] == CHAT
    assert [rows[0]["example"], rows[2]["example"]] == ROWS
    assert rows[0]["rewards"] == {"right": 1.0, "short": None}


def test_pandas_reads_all_files_of_a_run(run: Path) -> None:
    frame = pd.read_parquet(run / "rollouts")
    assert list(frame["prompt"][0]) == CHAT
    assert frame["example"][2]["answer"] == 2


def test_polars_reads_all_files_of_a_run(run: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.read_parquet(run / "rollouts" / "*.parquet")
    assert frame["prompt"][0].to_list() == CHAT
    assert frame["example"].struct.field("answer").to_list() == [7, 7, 2, 2]


def test_duckdb_queries_all_files_of_a_run(run: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    query = "SELECT prompt[2].content, example.about.level FROM read_parquet(?) ORDER BY step"
    rows = duckdb.execute(query, [str(run / "rollouts" / "*.parquet")]).fetchall()
    assert rows == [("3 + 4 = ?", 1)] * 2 + [("3 + 4 = ?", 2)] * 2


def test_the_frame_of_a_run_has_messages_and_examples(run: Path) -> None:
    frame = RunResult(run).rollouts()
    assert frame["prompt"][0] == CHAT
    assert frame["example"].tolist()[::2] == ROWS
    assert frame["rewards"][0] == {"right": 1.0}


def test_the_page_shows_prompts_and_examples(run: Path) -> None:
    view = RolloutView(RunFolder(run))
    assert view.groups(1)[0]["prompt"] == "3 + 4 = ?"
    shown = view.group(2, 0)
    assert shown is not None
    assert (shown["prompt"], shown["example"]) == (CHAT, ROWS[1])


def test_files_of_earlier_versions_with_json_text_are_read(run: Path, tmp_path: Path) -> None:
    table = pq.read_table(run / "rollouts" / "step-000001.parquet")
    for name, value in (("prompt", CHAT), ("example", ROWS[0])):
        text = pa.array([json.dumps(value)] * table.num_rows)
        table = table.set_column(table.schema.get_field_index(name), pa.field(name, pa.string()), text)
    old = tmp_path / "run"
    (old / "rollouts").mkdir(parents=True)
    (old / "config.yaml").write_text("")
    pq.write_table(table, old / "rollouts" / "step-000001.parquet")
    assert (RunResult(old).rollouts()["prompt"][0], RunResult(old).rollouts()["example"][0]) == (
        CHAT,
        ROWS[0],
    )
    view = RolloutView(RunFolder(old))
    shown = view.group(1, 0)
    assert shown is not None
    assert (view.groups(1)[0]["prompt"], shown["example"]) == ("3 + 4 = ?", ROWS[0])
    # A resumed run continues with structures.
    schema = RolloutSchema(folder=old / "rollouts")
    write_rollouts(old / "rollouts" / "step-000002.parquet", 2, [group(ROWS[1])], schema)
    assert RunResult(old).rollouts()["example"].tolist()[::2] == ROWS


def test_a_text_prompt_is_text_even_if_it_looks_like_json(tmp_path: Path) -> None:
    path = tmp_path / "step-000001.parquet"
    write_rollouts(path, 1, [group({"n": 1}, prompt='["a"]')])
    assert pq.read_schema(path).field("prompt").type == pa.string()
    assert read_rollouts(path)[0]["prompt"] == '["a"]'


@pytest.mark.parametrize(
    "values",
    [
        [1, "one"],
        [{"a": 1}, [1]],
        [True, 2],
        [2**70, 1],
        [{}, {}],
        [[1, "a"], []],
        [{"deep": {"deeper": [1, {"x": "y"}]}}, None],
        [dict.fromkeys(map(str, range(100)), 0), {"0": 1}],
        [[[[[[[[[[1]]]]]]]]], []],
    ],
)
def test_values_without_a_common_type_come_back_as_they_were(tmp_path: Path, values: list[Any]) -> None:
    rows = [{"n": number, "value": value} for number, value in enumerate(values)]
    assert written(tmp_path, rows) == rows
    stored = pq.read_schema(tmp_path / "step-000001.parquet").field("example").type
    assert stored.field("n").type == pa.int64()  # only the field that differs is JSON


def test_numbers_dates_arrays_and_sets_become_plain_values(tmp_path: Path) -> None:
    row = {
        "a": np.float32(0.5),
        "b": np.arange(2),
        "c": {"y", "x"},
        "d": datetime.date(2026, 1, 2),
        5: "V",
    }
    assert written(tmp_path, [row]) == [{"a": 0.5, "b": [0, 1], "c": ["x", "y"], "d": "2026-01-02", "5": "V"}]


def test_integers_and_floats_are_floats_and_a_missing_column_is_null(tmp_path: Path) -> None:
    assert written(tmp_path, [{"a": 1}, {"a": 0.5, "b": None}]) == [
        {"a": 1.0, "b": None},
        {"a": 0.5, "b": None},
    ]


@pytest.mark.parametrize(
    "values",
    [
        [1, 0.5, None],
        [{"a": 1}, {"b": [2, None]}, {}],
        [True, 1, 1.5],
        [2**70, 2**53 + 1, -1],
        [np.int64(3), np.float32(0.1), np.arange(2.0).sum()],
        [np.arange(2), [], [0.5]],
        [{"y", "x"}, ("x",), [["z"]]],
        [datetime.date(2026, 1, 2), "one", ""],
        [{1: {"a": None}}, {"1": {"b": 2}}, None],
    ],
)
def test_an_example_and_what_is_read_back_have_one_form(tmp_path: Path, values: list[Any]) -> None:
    rows = [{"n": number, "value": value} for number, value in enumerate(values)] + [{"n": 0.5}]
    forms = [stored_form(row) for row in written(tmp_path, rows)]
    assert forms == [stored_form(row) for row in rows]
    assert len(set(forms)) == len(rows)


def test_messages_keep_only_the_keys_they_have(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    prompt = [CHAT[1], call, {"role": "tool", "content": "7", "name": "add"}]
    path = tmp_path / "step-000001.parquet"
    write_rollouts(path, 1, [group({"n": 1}, prompt=prompt)])
    assert read_rollouts(path)[0]["prompt"] == prompt


def test_a_resumed_run_writes_the_same_bytes_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    """Without examples known in advance, types grow from step to step."""
    steps = [{"a": None}, {"a": 1, "b": {}}, {"a": 0.5, "b": {"c": 1}}, {"a": "x", "b": {"c": 2}}]
    whole = RolloutSchema(folder=tmp_path / "whole")
    for step, columns in enumerate(steps, start=1):
        groups = [group(columns, rewards=("right", f"step {step}"))]
        write_rollouts(tmp_path / "whole" / f"step-{step:06}.parquet", step, groups, whole)
        again = RolloutSchema(folder=tmp_path / "again")
        write_rollouts(tmp_path / "again" / f"step-{step:06}.parquet", step, groups, again)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (1, 2, "int"),
        (1, 0.5, "float"),
        (None, "x", "text"),
        ("x", 1, "json"),
        ([1], [0.5], ["float"]),
        ([], [1], ["int"]),
        ({"a": 1}, {"b": "x"}, {"a": "int", "b": "text"}),
        ({"a": 1}, 1, "json"),
    ],
)
def test_two_values_have_one_type(one: Any, other: Any, common: Any) -> None:
    assert merge(kind_of(one), kind_of(other)) == common
