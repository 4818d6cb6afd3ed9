"""Rows from tables and data frames, and rewards as a list."""

from __future__ import annotations

import gzip

import pytest

import groupwise as gw
from groupwise.errors import ConfigError

ROWS = [{"q": "a, b", "n": "1"}, {"q": "c", "n": "2"}]


def as_dicts(examples):
    return [dict(example) for example in examples]


@pytest.mark.parametrize(("name", "between"), [("rows.csv", ","), ("rows.tsv", "\t")])
def test_tables_with_a_header_are_read_as_text(tmp_path, name, between):
    path = tmp_path / name
    path.write_text(f'\ufeffq{between}n\n"a, b"{between}1\nc{between}2\n')
    assert as_dicts(gw.load_examples(path)) == ROWS


def test_a_gzipped_table_is_read(tmp_path):
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b'q,n\n"a, b",1\nc,2\n'))
    assert as_dicts(gw.load_examples(path)) == ROWS


@pytest.mark.parametrize("text", ["q,n\na,1,2\n", "q,n\na\n", 'q,n\n"a,1\n'])
def test_a_broken_row_is_named_by_its_line(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rows\.csv, line [12]: "):
        gw.load_examples(path)


class PandasFrame:
    """What we use of a pandas data frame; pandas itself is not required."""

    columns = ("q", "n")

    def to_dict(self, orient):
        assert orient == "records"
        return [{"q": "a, b", "n": 1.0}, {"q": "c", "n": float("nan")}]


class PolarsFrame:
    def to_dicts(self):
        return [{"q": "a, b", "n": 1.0}, {"q": "c", "n": None}]


@pytest.mark.parametrize("frame", [PandasFrame(), PolarsFrame()])
def test_data_frames_are_examples(frame):
    expected = [{"q": "a, b", "n": 1.0}, {"q": "c", "n": None}]
    assert as_dicts(gw.load_examples(frame)) == expected
    task = gw.Task(name="t", examples=frame, prompt=lambda row: row["q"], rewards=[right])
    assert as_dicts(task.examples) == expected


def test_a_real_pandas_frame_is_read():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"q": ["a", "b"], "n": [1, 2]})
    assert as_dicts(gw.load_examples(frame)) == [{"q": "a", "n": 1}, {"q": "b", "n": 2}]


def right(rollout: gw.Rollout, example: gw.Example) -> float:
    return 1.0


def test_a_list_of_functions_is_named_by_them():
    task = gw.Task(name="t", examples=[{}], prompt=lambda row: "?", rewards=[right, gw.rewards.exact_match()])
    assert [*task.rewards] == ["right", "exact_match"]
    assert [*gw.Task(name="t", examples=[{}], prompt=lambda row: "?", rewards=right).rewards] == ["right"]


def test_two_functions_of_one_name_need_a_dict():
    with pytest.raises(ConfigError, match="two rewards are called 'right'"):
        gw.Task(name="t", examples=[{}], prompt=lambda row: "?", rewards=[right, right])
