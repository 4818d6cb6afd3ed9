from __future__ import annotations

import json
import logging
import math
import os
import pty
import socket
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from groupwise.config.schema import TrackConfig
from groupwise.errors import ConfigError
from groupwise.files import remove_temporaries, write_atomically
from groupwise.records import Call, Example, Group, Rollout, Turn
from groupwise.tracking import trackers
from groupwise.tracking.rollout_files import read_rollouts, write_rollouts
from groupwise.tracking.run_files import (
    MetricsFile,
    as_ranges,
    read_metrics,
    remove_steps_after,
    write_completions,
)
from groupwise.tracking.run_folder import RunFolder, log_to, step_name, step_of
from groupwise.tracking.trackers import Rows, Tracker, TrackerInfo, open_trackers

# Files


def test_a_file_is_replaced_whole_and_its_folder_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_atomically(path, "one")
    write_atomically(path, b"two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


def test_a_write_that_fails_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.txt"
    write_atomically(path, "old")

    def no_space(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


# The run folder


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-000010", 10),
        ("step-000010.parquet", 10),
        ("step-1234567", 1234567),
        ("step-10", None),
        ("xstep-000010", None),
        (".step-000010.tmp-1", None),
    ],
)
def test_a_step_is_read_back_from_its_name(name: str, step: int | None) -> None:
    assert step_of(name) == step
    assert step is None or name.startswith(step_name(step))


def create(parent: Path, name: str | None = None) -> RunFolder:
    return RunFolder.create(parent, name=name, task="tasks/capitals.py", model="Qwen/Qwen2.5-0.5B Instruct")


def test_a_run_without_a_name_gets_task_model_and_time_and_never_shares_a_folder(tmp_path: Path) -> None:
    first, second = create(tmp_path / "runs"), create(tmp_path / "runs")
    assert first.path.is_dir()
    assert first.name.startswith("capitals-Qwen2.5-0.5B-Instruct-20")
    assert first.path != second.path


def test_the_paths_are_those_of_the_design(tmp_path: Path) -> None:
    run = create(tmp_path, "mine")
    listed = [run.config, run.metrics, run.log, run.stats, run.rollouts_at(10), run.checkpoint_at(100)]
    assert [path.relative_to(tmp_path / "mine").as_posix() for path in listed] == [
        "config.yaml",
        "metrics.jsonl",
        "training.log",
        "training_stats.json",
        "rollouts/step-000010.parquet",
        "checkpoints/step-000100",
    ]
    assert (run.evaluations.name, run.plots.name) == ("eval", "plots")


def test_a_named_folder_that_holds_a_run_is_refused_and_untouched(tmp_path: Path) -> None:
    create(tmp_path, "mine").config.write_text("seed: 1")
    with pytest.raises(ConfigError, match=r"mine already contains a run: resume it with --resume .*mine, or"):
        create(tmp_path, "mine")
    assert (tmp_path / "mine" / "config.yaml").read_text() == "seed: 1"


def test_a_named_folder_with_nothing_in_it_can_be_used(tmp_path: Path) -> None:
    create(tmp_path, "mine").lock().close()
    assert create(tmp_path, "mine").path == tmp_path / "mine"


@pytest.mark.parametrize("name", ["a/b", "..", "/tmp/x", ""])
def test_a_name_cannot_leave_the_output_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="plain folder name"):
        create(tmp_path, name)


def test_an_output_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot create a run folder in"):
        create(tmp_path / "file")


def test_only_a_folder_with_a_config_opens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run folder"):
        RunFolder.open(tmp_path / "absent")
    run = create(tmp_path, "mine")
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        RunFolder.open(run.path)
    run.config.write_text("")
    assert RunFolder.open(run.path) == run


LOCK = "import sys; from groupwise.tracking.run_folder import *; RunFolder(Path(sys.argv[1])).lock()"


def lock_elsewhere(run: RunFolder) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOCK, str(run.path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()  # as on a read-only disk, the file cannot be opened
    with pytest.raises(ConfigError, match=r"cannot write to .*: Is a directory"):
        RunFolder(tmp_path).lock()


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    run = create(tmp_path, "mine")
    with run.lock():
        refused = lock_elsewhere(run)
    assert f"mine is in use by process {os.getpid()}" in refused.stderr
    assert lock_elsewhere(run).returncode == 0


def test_a_child_that_outlives_a_killed_trainer_does_not_hold_its_folder(tmp_path: Path) -> None:
    run = create(tmp_path, "mine")
    parent = f"""
import os, sys, time
from pathlib import Path
from groupwise.tracking.run_folder import RunFolder
lock = RunFolder(Path({str(run.path)!r})).lock()
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""
    killed = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    child = int(killed.stdout.readline())
    killed.wait(timeout=60)
    try:
        assert lock_elsewhere(run).returncode == 0
    finally:
        os.kill(child, 9)
        killed.stdout.close()


# Metrics


def test_a_step_is_one_line_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(3, {"reward/mean": 0.5, "policy/kl": math.nan, "policy/gap": math.inf, "rollout/failed": 0})
    text = file.path.read_text()
    assert text == (
        '{"step": 3, "reward/mean": 0.5, "policy/kl": null, "policy/gap": null, "rollout/failed": 0}\n'
    )


def three_steps(path: Path) -> MetricsFile:
    file = MetricsFile(path)
    for step in (1, 2, 3):
        file.append(step, {"reward/mean": step / 10})
    return file


@pytest.mark.parametrize("cut", range(1, 31))
def test_a_line_torn_anywhere_is_left_out(tmp_path: Path, cut: int) -> None:
    file = three_steps(tmp_path / "metrics.jsonl")
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-cut])
    steps = [row["step"] for row in read_metrics(file.path)]
    assert steps == ([1, 2, 3] if cut == 1 else [1, 2])  # without its newline alone, a line is whole
    file.truncate_after(2)
    file.append(3, {"reward/mean": 0.3})
    assert file.path.read_bytes() == whole


def test_resuming_forgets_later_steps_and_leaves_the_rest_to_the_byte(tmp_path: Path) -> None:
    file = three_steps(tmp_path / "metrics.jsonl")
    whole = file.path.read_bytes()
    file.truncate_after(1)
    assert read_metrics(file.path) == [{"step": 1, "reward/mean": 0.1}]
    assert whole.startswith(file.path.read_bytes())
    file.truncate_after(0)
    assert file.path.read_bytes() == b""


def test_steps_whose_lines_were_lost_are_named(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 6, 8):
        metrics.append(step, {"reward/mean": 0.5})
    assert metrics.truncate_after(7) == [3, 4, 5, 7]
    assert as_ranges([3, 4, 5, 7]) == "3 – 5, 7"
    assert metrics.truncate_after(2) == []


def test_a_line_is_on_the_disk_when_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sizes = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    MetricsFile(path).append(1, {"reward/mean": 0.5})
    assert path.stat().st_size in sizes


def test_temporary_files_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = [tmp_path / f".report.html.tmp-{gone.pid}", tmp_path / f".report.html.tmp-{10**30}"]
    other = tmp_path / f".report.html.tmp-{os.getppid()}"
    for path in (*stale, other):
        path.write_text("half")
    remove_temporaries(tmp_path)
    assert list(tmp_path.iterdir()) == [other]


def test_truncating_a_file_that_does_not_exist_does_nothing(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "metrics.jsonl").truncate_after(3)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnoise\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"line 2 of .*metrics.jsonl is damaged"):
        read_metrics(path)


# Rollouts


def group(**changes: Any) -> Group:
    rollout = Rollout(
        prompt=[{"role": "user", "content": "3 + 4 = ?"}],
        text="é 7",
        tokens=(5, 6, 7, 2),
        trained=(False, False, True, True),
        logprobs=(0.0, 0.0, -0.5, -0.25),
        entropies=(0.0, 0.0, 1.5, 0.75),
        prompt_length=2,
        finish="end",
        member=1,
        rewards={"correct": 1.0, "short": 0.1},
        reward=1.02,
        advantage=-0.3,
        turns=(Turn(text="hm", calls=(Call(name="add", arguments={"a": 3}, result="7"),)), Turn(text="é 7")),
    )
    failed = replace(rollout, member=2, rewards={}, reward=0.0, error="correct raised", prompt="text?")
    return Group(
        example=Example({"answer": 7, "numbers": [3, 4]}), rollouts=(replace(rollout, **changes), failed)
    )


def test_rollouts_come_back_with_every_token_and_reward(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step-000010.parquet"
    write_rollouts(path, 10, [group(), group()])
    rows = read_rollouts(path)
    assert [(row["group"], row["member"]) for row in rows] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert rows[0] == {
        "step": 10,
        "group": 0,
        "member": 1,
        "prompt": [{"role": "user", "content": "3 + 4 = ?"}],
        "text": "é 7",
        "turns": [
            {
                "text": "hm",
                "calls": [{"name": "add", "arguments": {"a": 3}, "result": "7", "found": [], "error": None}],
                "observation": "",
                "reward": 0.0,
            },
            {"text": "é 7", "calls": [], "observation": "", "reward": 0.0},
        ],
        "tokens": [5, 6, 7, 2],
        "trained": [False, False, True, True],
        "logprobs": [0.0, 0.0, -0.5, -0.25],
        "entropies": [0.0, 0.0, 1.5, 0.75],
        "prompt_length": 2,
        "length": 2,
        "rewards": {"correct": 1.0, "short": 0.1},
        "reward": 1.02,
        "advantage": -0.3,
        "token_advantages": None,
        "finish": "end",
        "error": None,
        "example": {"answer": 7, "numbers": [3, 4]},
    }
    assert (rows[1]["prompt"], rows[1]["error"], rows[1]["rewards"]) == ("text?", "correct raised", {})


def test_datasets_loads_rollouts_as_they_are(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "step-000001.parquet"
    write_rollouts(path, 1, [group()])
    rows = datasets.load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert rows[0]["rewards"] == {"correct": 1.0, "short": 0.1}
    assert rows[0]["tokens"] == [5, 6, 7, 2]


def test_rollouts_without_any_reward_and_those_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "step-000001.parquet"
    write_rollouts(path, 1, [group(rewards={})])
    assert [row["rewards"] for row in read_rollouts(path)] == [{}, {}]
    write_rollouts(path, 1, [group()])
    table = pq.read_table(path)
    at = table.schema.get_field_index("rewards")
    pairs = [list((rewards or {}).items()) for rewards in table["rewards"].to_pylist()]
    as_map = pa.array(pairs, pa.map_(pa.string(), pa.float64()))
    pq.write_table(table.set_column(at, "rewards", as_map), path)
    assert [row["rewards"] for row in read_rollouts(path)] == [{"correct": 1.0, "short": 0.1}, {}]


def test_the_same_rollouts_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_rollouts(tmp_path / name, 10, [group()])
    write_rollouts(tmp_path / "c", 10, [group(advantage=0.3)])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_resuming_removes_the_rollouts_of_later_steps_only(tmp_path: Path) -> None:
    for name in ("step-000009.parquet", "step-000010.parquet", "step-000011.parquet", "notes.txt"):
        (tmp_path / name).write_text("")
    remove_steps_after(tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "step-000009.parquet",
        "step-000010.parquet",
    ]
    remove_steps_after(tmp_path / "absent", 10)


def test_perfect_answers_are_written_to_be_read_and_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "completions" / "step-000010.txt"
    write_completions(path, [group(reward=1.9)], is_perfect=lambda rollout: rollout.reward >= 2)
    assert not path.exists()
    groups = [group(reward=1.9), group(reward=2.0), group(reward=2.0, error="x")]
    write_completions(path, groups, is_perfect=lambda rollout: rollout.reward >= 2)
    assert path.read_text() == f"Prompt 3 + 4 = ?\nhm\n[add] 7\né 7\n{'=' * 50}\n"


# The log


def test_a_log_that_meets_a_full_disk_fills_no_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="No space left"), log_to(Path("/dev/full")) as logger:
        logger.info("a step")
    assert capsys.readouterr().err == ""


def test_the_log_file_gets_what_the_package_says_and_the_terminal_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("groupwise.learner")
    for message in ("first session", "second session"):
        with log_to(tmp_path / "training.log"):
            logger.info(message)
    logging.getLogger("groupwise").info("after")
    lines = (tmp_path / "training.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO first session", "INFO second session"]
    assert lines[0].startswith("20")
    assert capsys.readouterr() == ("", "")


# Trackers


class Recorder:
    """A tracker for tests: keeps what it is told, fails at the call it is told to."""

    def __init__(self, *, fails_at: str = "") -> None:
        self.fails_at = fails_at
        self.calls: list[tuple[Any, ...]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.record("log", step, dict(metrics))

    def samples(self, step: int, rows: Rows) -> None:
        self.record("samples", step, list(rows))

    def finish(self) -> None:
        self.record("finish")

    def record(self, call: str, *values: Any) -> None:
        self.calls.append((call, *values))
        if call == self.fails_at:
            raise ConnectionError("server gone")


def guarded(tracker: Tracker, tmp_path: Path) -> Tracker:
    opening = TrackerInfo(project="p", run_name="r", config={}, folder=tmp_path, resumed_from=None)
    return trackers.SafeTracker("recorder", lambda _: tracker, opening, warn=trackers.logger.warning)


def test_trackers_get_finite_values_only(tmp_path: Path) -> None:
    recorder = Recorder()
    guarded(recorder, tmp_path).log(1, {"reward/mean": 0.5, "policy/kl": math.nan})
    assert recorder.calls == [("log", 1, {"reward/mean": 0.5})]


@pytest.mark.parametrize("call", ["log", "samples", "finish"])
def test_a_tracker_that_fails_is_off_after_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    recorder = Recorder(fails_at=call)
    tracker = guarded(recorder, tmp_path)
    for step in (1, 2):
        tracker.log(step, {"reward/mean": 0.5})
        tracker.samples(step, [{"text": "7"}])
        tracker.finish()
    assert recorder.calls[-1][0] == call
    assert [name for name, *_ in recorder.calls].count(call) == 1
    assert caplog.text.count("recorder failed and is disabled for the rest of this run") == 1


def test_a_tracker_that_cannot_open_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: TrackerInfo) -> Tracker:
        raise PermissionError("read-only")

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", broken)
    (tracker,) = open_trackers(
        TrackConfig(trackers=("tensorboard",)), run_name="r", config={}, folder=tmp_path
    )
    tracker.log(1, {"reward/mean": 0.5})
    tracker.finish()
    assert caplog.text.count("tensorboard failed") == 1


def test_a_tracker_that_is_named_but_not_installed_is_the_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb is not installed; run pip install wandb"):
        open_trackers(TrackConfig(trackers=("wandb",)), run_name="r", config={}, folder=tmp_path)
    assert open_trackers(TrackConfig(), run_name="r", config={}, folder=tmp_path) == []


TRACKIO = """
import sys
from pathlib import Path
from groupwise.config.schema import TrackConfig
from groupwise.tracking.trackers import open_trackers
assert "trackio" not in sys.modules, "imported before it is used"
for resumed_from, steps in ((None, (1, 2)), (1, (2, 3))):
    (tracker,) = open_trackers(
        TrackConfig(project="countdown"), run_name="tiny", config={"run": {"seed": 7}},
        folder=Path(sys.argv[1]), resumed_from=resumed_from,
    )
    for step in steps:
        tracker.log(step, {"reward/mean": step / 4, "policy/kl": float("nan")})
        tracker.samples(step, [{"text": "3 + 4", "reward": 1.0}])
    tracker.finish()
"""


def test_trackio_writes_its_own_file_says_nothing_and_holds_each_step_of_a_resumed_run_once(
    tmp_path: Path,
) -> None:
    pytest.importorskip("trackio")
    with socket.create_server(("127.0.0.1", 0)) as hub:
        # With a token, trackio by itself asks the Hub for the user's name.
        hub_address = f"http://127.0.0.1:{hub.getsockname()[1]}"
        environment = {"TRACKIO_DIR": str(tmp_path), "HF_TOKEN": "any", "HF_ENDPOINT": hub_address}
        command = [sys.executable, "-c", TRACKIO, str(tmp_path)]
        outcome = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
        )
        assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", "")
        hub.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody called
            hub.accept()
    with sqlite3.connect(tmp_path / "countdown.db") as database:
        rows = database.execute("select run_name, run_id, step, metrics from metrics order by id").fetchall()
        (config,) = database.execute("select config from configs").fetchone()
    logged = [(step, json.loads(metrics)) for _, _, step, metrics in rows if b"samples" not in metrics]
    assert logged == [(step, {"reward/mean": step / 4}) for step in (1, 2, 3)]
    assert len(rows) == 2 * len(logged)
    assert {name for name, *_ in rows} == {"tiny"}
    assert len({run_id for _, run_id, *_ in rows}) == 1
    assert json.loads(config)["run"] == {"seed": 7}
    assert b'{"text":"3 + 4","reward":1.0}' in rows[1][3]


WANDB = """
import sys
from pathlib import Path
from groupwise.config.schema import TrackConfig
from groupwise.tracking.trackers import open_trackers
assert "wandb" not in sys.modules, "imported before it is used"
(tracker,) = open_trackers(
    TrackConfig(trackers=("wandb",), project="countdown"), run_name="tiny", config={"run": {"seed": 7}},
    folder=Path(sys.argv[1]), resumed_from=int(sys.argv[2]) or None, warn=print,
)
for step in map(int, sys.argv[3:]):
    tracker.log(step, {"reward/mean": step / 4, "policy/kl": float("nan")})
    tracker.samples(step, [{"text": "3 + 4", "reward": 1.0}])
tracker.finish()
"""


def wandb_session(folder: Path, *words: str, mode: str, terminal: int = subprocess.DEVNULL) -> str:
    """What a session with no account prints; `terminal` is where wandb could ask for one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    outcome = subprocess.run(
        [sys.executable, "-c", WANDB, str(folder), *words],
        env=kept | {"HOME": str(folder), "WANDB_MODE": mode, "TERM": "xterm"},
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        timeout=120,
        check=True,
    )
    return outcome.stdout


def wandb_records(path: Path) -> Iterator[Any]:
    """What a .wandb file holds: after 7 bytes, blocks of 32 kB with pieces of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at < len(data):
        left = -at % 32768
        if 0 < left < 7:  # no room for another header in this block
            at += left
            continue
        _, length, piece = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if piece in (1, 4):  # whole, or the last of its pieces
            yield Record.FromString(record)
            record = b""


def test_wandb_gets_metrics_config_and_samples_and_goes_on_with_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for words in (("0", "1", "2"), ("1", "2", "3")):
        assert wandb_session(tmp_path, *words, mode="offline") == ""
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    sessions = [list(wandb_records(path)) for path in files]
    runs = [next(record.run for record in session if record.HasField("run")) for session in sessions]
    assert [(run.run_id, run.display_name, run.project) for run in runs] == [
        ((tmp_path / "wandb" / "id").read_text(), "tiny", "countdown")
    ] * 2
    assert [{i.key: i.value_json for i in run.config.update}["run"] for run in runs] == ['{"seed":7}'] * 2
    histories = [[record.history for record in session if record.HasField("history")] for session in sessions]
    assert [
        [(history.step.num, values["reward/mean"]) for history in one for values in [wandb_values(history)]]
        for one in histories
    ] == [[(1, "0.25"), (2, "0.5")], [(2, "0.5"), (3, "0.75")]]
    table = files[0].parent / "files" / json.loads(wandb_values(histories[0][0])["samples/path"])
    assert json.loads(table.read_text())["data"] == [["3 + 4", 1.0]]


def wandb_values(history: Any) -> dict[str, str]:
    return {item.key or "/".join(item.nested_key): item.value_json for item in history.item}


def test_wandb_without_an_account_is_off_and_asks_nobody(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    keyboard, terminal = pty.openpty()
    try:
        said = wandb_session(tmp_path, "0", "1", mode="online", terminal=terminal)
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert said.startswith("wandb failed and is disabled for the rest of this run: UsageError('No API key")
    assert said.count("\n") == 1


def test_an_id_for_wandb_is_made_once_for_each_run_folder(tmp_path: Path) -> None:
    first, again, other = (trackers.lasting_id(tmp_path / name / "id") for name in ("a", "a", "b"))
    assert first == again != other


def test_tensorboard_events_read_back_and_a_resumed_run_hides_what_it_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track = TrackConfig(trackers=("tensorboard",))
    for resumed_from, steps in ((None, (1, 2, 3)), (1, (2,))):
        (tracker,) = open_trackers(
            track, run_name="r", config={"run": {"seed": 7}}, folder=tmp_path, resumed_from=resumed_from
        )
        for step in steps:
            tracker.log(step, {"reward/mean": step / 4})
        tracker.samples(steps[-1], [{"text": "3 + 4\n<b>", "reward": 1.0}])
        tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert [tag for tag in events.Tags()["tensors"] if "hparams" not in tag] == [
        "config/text_summary",
        "samples/0/text_summary",
    ]
    (config,) = events.Tensors("config/text_summary")
    assert b'"seed": 7' in config.tensor_proto.string_val[0]
    *_, sample = events.Tensors("samples/0/text_summary")
    assert b"    3 + 4\n    <b>" in sample.tensor_proto.string_val[0]  # indented: shown, not rendered


def test_tensorboard_has_the_settings_that_runs_are_compared_by(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    config = {
        "optim": {"learning_rate": 0.5, "kind": "adamw"},
        "lora": {"targets": ("q", "v")},
        "run": {"seed": 7},
    }
    (tracker,) = open_trackers(
        TrackConfig(trackers=("tensorboard",)), run_name="r", config=config, folder=tmp_path
    )
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["optim.learning_rate"].number_value == 0.5
    assert hparams["lora.targets"].string_value == '["q", "v"]'
    assert "run.seed" not in hparams


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_gets_settings_metrics_and_tables_and_holds_each_step_of_a_resumed_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    for resumed_from, steps in ((None, (1, 2)), (1, (2, 3))):
        (tracker,) = open_trackers(
            TrackConfig(trackers=("mlflow",), project="countdown"),
            run_name="tiny",
            config={"run": {"seed": 7}, "optim": {"learning_rate": 0.5}},
            folder=folder,
            resumed_from=resumed_from,
            warn=pytest.fail,
        )
        for step in steps:
            tracker.log(step, {"reward/mean": step / 4, "eval/pass@8": 0.5, "policy/kl": math.nan})
            tracker.samples(step, [{"answer": "3 + 4", "reward": 1.0, "reward/right": None}])
        tracker.finish()
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("countdown").experiment_id])
    assert (run.info.run_name, run.info.status) == ("tiny", "FINISHED")
    assert run.data.params == {"run.seed": "7", "optim.learning_rate": "0.5"}
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.data.metrics["eval/pass_at_8"] == 0.5
    files = client.list_artifacts(run.info.run_id, "samples")
    assert [file.path for file in files] == [f"samples/step-00000{step}.json" for step in (1, 2, 3)]
    (table,) = tmp_path.rglob("samples/step-000001.json")
    assert json.loads(table.read_text())["data"] == [["3 + 4", 1.0, None]]
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}, "nothing in the working directory"
