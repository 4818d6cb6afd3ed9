"""A run's files read by slice."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models

from groupwise.model.resolve import TINY_FOLDER
from groupwise.records import Call, Group, Turn
from groupwise.report.rollout_view import RolloutFilter, RolloutView, excerpt, pieces, ratios, search
from groupwise.report.run_reader import (
    MetricsTail,
    as_columns,
    bins_of,
    count,
    distribution,
    evaluations,
    spread,
)
from groupwise.tracking.rollout_files import write_rollouts
from groupwise.tracking.run_files import MetricsFile
from groupwise.tracking.run_folder import RunFolder
from tests.support.synthetic_runs import good_groups, group_of, make_run, rollout

# Metrics as they grow


def test_each_look_reads_what_is_new_and_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.rows() == []
    file = MetricsFile(path)
    file.append(1, {"x": 1.0})
    assert tail.rows() == [{"step": 1, "x": 1.0}]
    with path.open("a") as half:
        half.write('{"step": 2, "x"')
    assert len(tail.rows()) == 1
    with path.open("a") as rest:
        rest.write(": 2.0}\n")
    assert [row["step"] for row in tail.rows()] == [1, 2]


def test_a_run_that_resumes_before_its_end_is_read_anew(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    tail = MetricsTail(file.path)
    for step in (1, 2, 3):
        file.append(step, {"x": float(step)})
    assert len(tail.rows()) == 3
    file.truncate_after(1)
    file.append(2, {"x": 20.0})
    assert tail.rows() == [{"step": 1, "x": 1.0}, {"step": 2, "x": 20.0}]


def test_lines_that_are_no_rows_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnoise\n[1]\n{"step": "two"}\n{"x": 3}\n{"step": 4}\n')
    assert [row["step"] for row in MetricsTail(path).rows()] == [1, 4]


def test_columns_hold_none_where_a_step_lacks_a_metric() -> None:
    assert as_columns([{"step": 1, "a": 1.0}, {"step": 2, "b": None}]) == {
        "step": [1, 2],
        "values": {"a": [1.0, None], "b": [None, None]},
    }


def test_evaluations_come_in_the_order_of_steps_and_others_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=6)
    (run.evaluations / "eval.json").write_text("{}")
    (run.evaluations / "step-000099.json").write_text("torn")
    found = evaluations(run)
    assert [(one.step, one.name) for one in found] == [(0, "before"), (3, "step-000003"), (6, "after")]
    assert found[0].scores["avg@4"] == pytest.approx((0.2, 0.1, 0.3))
    assert found[0].prompts == 20


# Rollouts


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> RolloutView:
    return RolloutView(make_run(tmp_path_factory.mktemp("runs") / "run"))


def test_groups_are_listed_without_their_texts(slices: RolloutView) -> None:
    assert slices.steps() == [1, 2, 3, 4, 5, 6]
    groups = slices.groups(3)
    assert [(group["group"], group["prompt"]) for group in groups] == [(0, "3 + 0?"), (1, "3 + 1?")]
    assert [member["reward"] for member in groups[0]["members"]] == [2.0, 1.0, 1.0]
    assert groups[0]["members"][0]["rewards"] == {"correct": 1.0, "format": 1.0}
    assert "text" not in groups[0]["members"][0]


def test_a_group_has_its_members_best_advantage_first(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    members = [rollout(f"m{i}", member=i, advantage=a) for i, a in enumerate((-1.0, 0.5, 0.5))]
    write_rollouts(run.rollouts_at(1), 1, [group_of(members)])
    found = RolloutView(run).group(1, 0)
    assert found is not None
    assert [member["member"] for member in found["members"]] == [1, 2, 0]
    assert found["prompt"] == [{"role": "user", "content": "2 + 2?"}]
    assert found["example"] == {"question": "2 + 2?"}
    assert RolloutView(run).group(1, 9) is None


def test_one_group_of_many_is_read_from_its_own_part_of_the_file(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    groups = [group_of([rollout(f"{g} {m}", member=m, prompt=f"{g}?") for m in range(16)]) for g in range(32)]
    write_rollouts(run.rollouts_at(1), 1, groups)
    assert pq.ParquetFile(run.rollouts_at(1)).num_row_groups == 4
    found = RolloutView(run).group(1, 29)
    assert found is not None
    assert {member["text"] for member in found["members"]} == {f"29 {m}" for m in range(16)}


def test_tokens_have_text_numbers_and_the_ratio_of_the_update(slices: RolloutView) -> None:
    found = slices.tokens(3, 0, 0)
    assert found is not None
    assert len(found["pieces"]) == len(found["ids"]) == len(found["ratios"]) == 12
    assert found["trained"][:4] == [False, False, False, True]
    assert found["ratios"][:3] == [None, None, None]
    assert found["ratios"][3] == pytest.approx(math.exp(-0.4 - -0.5), abs=1e-4)
    assert found["advantage"] == 1.2
    assert slices.tokens(3, 0, 9) is None


def test_a_rollout_that_was_not_trained_on_has_no_ratios() -> None:
    assert ratios([0.0, -1.0], [False, True], None) is None
    assert ratios([0.0, -1.0], [False, True], [-1.0, -2.0]) is None  # of another rollout
    assert ratios([0.0, -1.0], [False, True], [-1.0]) == [None, 1.0]
    assert ratios([0.0], [True], [-1e9]) == pytest.approx([0.0], abs=1e-4)


def test_turns_are_told_apart_by_the_mask(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    tokenizer = Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json"))
    said, tool, more = (tokenizer.encode(text).ids for text in ("find 7", "seven", "7!"))
    stream = (5, 6, 7, *said, *tool, *more)
    trained = (False,) * 3 + (True,) * len(said) + (False,) * len(tool) + (True,) * len(more)
    zeros = (0.0,) * len(stream)
    made = replace(rollout("x"), tokens=stream, trained=trained, logprobs=zeros, entropies=zeros)
    write_rollouts(run.rollouts_at(1), 1, [group_of([made])])
    found = RolloutView(run).group(1, 0)
    assert found is not None
    assert found["members"][0]["turns"] == [
        {"policy": True, "text": "find 7"},
        {"policy": False, "text": "seven"},
        {"policy": True, "text": "7!"},
    ]


def test_recorded_turns_are_shown_with_their_calls_and_found(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    call = Call(name="search", arguments={"query": "Peru"}, result='Lima "the capital"', error=None)
    made = replace(rollout("Lima."), turns=(Turn(text="I search.", calls=(call,)), Turn(text="Lima.")))
    write_rollouts(run.rollouts_at(1), 1, [group_of([made])])
    found = RolloutView(run).group(1, 0)
    assert found is not None
    assert found["members"][0]["turns"] == [
        {"policy": True, "text": "I search."},
        {
            "policy": False,
            "text": 'Lima "the capital"',
            "name": "search",
            "arguments": {"query": "Peru"},
            "error": None,
        },
        {"policy": True, "text": "Lima."},
    ]
    (hit,) = search(RolloutView(run), RolloutFilter(text='lima "THE')).rollouts
    assert "the capital" in hit["excerpt"]
    assert '"query": "Peru"' in search(RolloutView(run), RolloutFilter(text="peru")).rollouts[0]["excerpt"]
    for word in ("calls", "null", "found"):  # of the record, not of anyone in it
        assert search(RolloutView(run), RolloutFilter(text=word)).rollouts == []


def test_files_of_an_older_schema_can_be_looked_at(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_rollouts(run.rollouts_at(1), 1, good_groups(1))
    table = pq.read_table(run.rollouts_at(1)).drop_columns(["length", "turns"])
    pq.write_table(table, run.rollouts_at(1))
    seen = RolloutView(run)
    assert len(seen.groups(1)) == 2
    assert seen.group(1, 0) is not None
    assert len(search(seen, RolloutFilter(least_length=1)).rollouts) == 6


# Pieces


def test_joined_pieces_are_the_text_and_each_token_has_its_own() -> None:
    tokenizer = Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json"))
    ids = tokenizer.encode("12+7=19\n<answer>é</answer>").ids
    found = pieces(ids, lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False))
    assert len(found) == len(ids)
    assert "".join(found) == "12+7=19\n<answer>é</answer>"
    assert found[0] == "1"


def byte_tokenizer() -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"word": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def test_a_character_of_several_tokens_goes_to_its_last() -> None:
    tokenizer = byte_tokenizer()
    found = pieces(list("a€😀b".encode()), lambda tokens: tokenizer.decode(list(tokens)))
    assert found == ["a", "", "", "€", "", "", "", "😀", "b"]


def test_bytes_that_never_become_a_character_do_not_hold_the_rest_up() -> None:
    tokenizer = byte_tokenizer()
    found = pieces([0xE2] * 9 + [256], lambda tokens: tokenizer.decode(list(tokens)))
    assert len(found) == 10
    assert found[-1].endswith("word")
    assert "".join(found) == "\ufffd" * 9 + "word"


def test_a_leading_space_that_decoding_alone_drops_is_kept() -> None:
    words = {1: "▁hello", 2: "▁world"}

    def decode(tokens: object) -> str:
        return "".join(words[token] for token in tokens).replace("▁", " ").lstrip()  # type: ignore[attr-defined]

    assert pieces([1, 2], decode) == ["hello", " world"]


# Distribution


def test_few_rewards_are_bins_of_their_own_counted_by_hand() -> None:
    steps = [np.array([0.0, 1.0, 1.0]), np.array([2.0, 1.0, 1.0])]
    bins = bins_of(steps)
    assert bins == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert count(steps, bins) == [[1, 0], [2, 2], [0, 1]]


def test_many_rewards_share_even_bins_and_none_is_lost() -> None:
    steps = [np.linspace(0, 1, 101), np.linspace(0, 0.5, 51)]
    bins = bins_of(steps)
    table = np.array(count(steps, bins))
    assert len(bins) == 24
    assert table.sum(axis=0).tolist() == [101, 51]
    assert table[12:, 1].sum() <= 1


def test_the_distribution_leaves_failed_rollouts_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    failed = rollout("x", member=1, reward=9.0, error="lost")
    write_rollouts(run.rollouts_at(1), 1, [group_of([rollout("x"), failed])])
    found = distribution(RolloutView(run))
    assert (found["steps"], found["counts"], found["mean"]) == ([1], [[1]], [1.0])


def test_of_many_steps_evenly_spread_ones_are_read() -> None:
    assert spread([1, 2, 3], 5) == [1, 2, 3]
    assert spread(list(range(1, 102)), 3) == [1, 51, 101]


# Search


def test_search_finds_by_words_reward_length_end_and_step(tmp_path: Path) -> None:
    def groups(step: int) -> list[Group]:
        needle = rollout("The Needle is here", member=1, reward=0.5, finish="length")
        return [group_of([rollout("hay", member=0, reward=1.5), needle])] if step == 2 else good_groups(step)

    seen = RolloutView(make_run(tmp_path / "run", groups=groups))
    (hit,) = search(seen, RolloutFilter(text="needle")).rollouts
    assert (hit["step"], hit["group"], hit["member"], hit["excerpt"]) == (2, 0, 1, "The Needle is here")
    assert [h["member"] for h in search(seen, RolloutFilter(finish="length")).rollouts] == [1]
    assert len(search(seen, RolloutFilter(least_reward=1.5, most_reward=1.5)).rollouts) == 1
    assert len(search(seen, RolloutFilter(least_length=19)).rollouts) == 1
    assert {h["step"] for h in search(seen, RolloutFilter(first=4, last=5)).rollouts} == {4, 5}
    assert search(seen, RolloutFilter(text="100 %")).rollouts == []
    assert search(seen, RolloutFilter(text="needle")).go_on is None


def test_search_stops_at_the_limit_and_goes_on_from_there(slices: RolloutView) -> None:
    first = search(slices, RolloutFilter(text="answer"), limit=7)
    assert [hit["step"] for hit in first.rollouts] == [6] * 6 + [5]
    assert (first.go_on, first.skip) == (5, 1)
    found, place = list(first.rollouts), first
    while place.go_on is not None:
        place = search(slices, RolloutFilter(text="answer", last=place.go_on, skip=place.skip), limit=4)
        assert len(place.rollouts) <= 4
        found += place.rollouts
    assert found == search(slices, RolloutFilter(text="answer")).rollouts
    assert len(found) == 36


def test_search_without_time_looks_at_one_step_and_goes_on_later(slices: RolloutView) -> None:
    found = search(slices, RolloutFilter(text="no such words"), seconds=0.0)
    assert (found.searched, found.go_on) == (1, 5)


def test_an_excerpt_is_one_line_around_the_words() -> None:
    assert excerpt("a\nb", "") == "a b"
    assert excerpt("x" * 100 + " word " + "y" * 100, "WORD") == f"…{'x' * 59} word {'y' * 59}…"


def test_json_of_a_slice_can_be_written(slices: RolloutView) -> None:
    json.dumps([slices.groups(1), slices.group(1, 0), slices.tokens(1, 0, 0)], allow_nan=False)
