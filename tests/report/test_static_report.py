"""The report, the plots, comparisons and the list of runs, made from run folders."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.errors import ConfigError
from groupwise.report import static_report
from groupwise.report.compare_runs import (
    change,
    compare_lines,
    in_words,
    list_lines,
    listed,
    remove,
    to_prune,
)
from groupwise.report.run_reader import RunReader
from groupwise.report.static_report import as_script, edges, smooth, write_all, write_plots, write_report
from groupwise.tracking.run_folder import RunFolder, owner
from tests.support.small_runs import run_command, small_config, task_file
from tests.support.synthetic_runs import group_of, healthy, make_run, rollout, write_measured

# The report


def carried(report: Path) -> dict[str, object]:
    found = re.search(
        r'<script type="application/json" id="carried">(.*?)</script>', report.read_text(), re.S
    )
    assert found is not None
    answers: dict[str, object] = json.loads(found[1])
    return answers


def test_the_report_is_one_file_with_page_and_answers(tmp_path: Path) -> None:
    run = RunReader(make_run(tmp_path / "my run"))
    report = write_report(run, state="finished")
    text = report.read_text()
    assert report == tmp_path / "my run" / "report.html"
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    assert "http://" not in re.sub(r"data:[^\"]*|http://www.w3.org[^\"]*", "", text.split("carried")[0])
    answers = carried(report)
    assert {"api/runs", "api/runs/my%20run/curves", "api/runs/my%20run/alarms"} <= set(answers)
    assert "api/runs/my%20run/steps/6/groups/0/members/0" in answers


def test_what_a_model_wrote_cannot_leave_its_script_element(tmp_path: Path) -> None:
    attack = "</script><script>alert(1)</script><!--\u2028"
    made = lambda step: [group_of([rollout(attack, prompt=attack)])]  # noqa: E731
    report = write_report(RunReader(make_run(tmp_path / "run", steps=1, groups=made)), state="finished")
    assert report.read_text().count("</script>") == 3  # its own: answers, import map, start
    group = carried(report)["api/runs/run/steps/1/groups/0"]
    assert group["members"][0]["text"] == attack  # type: ignore[index]
    assert as_script("</script>") == '"\\u003c/script>"'


def test_a_report_carries_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunReader(make_run(tmp_path / "run", steps=20))
    monkeypatch.setattr(static_report, "MOST_BYTES", 9_000)
    answers = carried(write_report(run, state="finished"))
    lists = [path for path in answers if re.fullmatch(r"api/runs/run/steps/\d+", path)]
    groups = [path for path in answers if re.fullmatch(r"api/runs/run/steps/\d+/groups/\d+", path)]
    assert len(lists) == 5
    assert 0 < len(groups) < 10
    assert len({path.split("/")[4] for path in groups}) > 1  # from several steps


def test_a_report_leaves_out_what_is_damaged_and_carries_the_rest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    run.rollouts_at(2).write_text("PAR1 no more")
    run.updates_at(3).parent.mkdir(exist_ok=True)
    run.updates_at(3).write_text("PAR1 no more")
    run.tokenizer.write_text('{"version": ')
    assert main(["report", str(run.path)]) == 0
    answers = carried(run.report)
    lists = [path for path in answers if re.fullmatch(r"api/runs/run/steps/\d+", path)]
    assert lists == ["api/runs/run/steps/1", "api/runs/run/steps/3"]
    tokens = answers["api/runs/run/steps/3/groups/0/members/0"]
    assert tokens["pieces"] == [f"⟨{token}⟩" for token in tokens["ids"]]  # type: ignore[index]
    assert tokens["ratios"] is None  # type: ignore[index]


def test_every_module_of_the_page_is_in_the_import_map() -> None:
    names = set(static_report.modules())
    for name in names:
        for imported in re.findall(r'from\s+"\./([\w./-]+)"', static_report.read(name)):
            assert imported in names, f"{name} imports {imported}"


def test_the_page_never_parses_text_as_markup() -> None:
    for name in static_report.modules():
        if not name.startswith("vendor/"):
            for way in (
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "DOMParser",
            ):
                assert way not in static_report.read(name), f"{name} uses {way}"


# Plots


def test_plots_are_png_and_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    run = RunReader(make_run(tmp_path / "run", steps=8))
    write_plots(run)
    paths = sorted(run.folder.plots.iterdir())
    assert [path.name for path in paths] == ["reward_distribution.png", "rewards.png"]
    first = [path.read_bytes() for path in paths]
    assert all(data.startswith(b"\x89PNG") for data in first)
    write_plots(run)
    assert [path.read_bytes() for path in paths] == first


def test_a_run_without_steps_has_no_plots_but_a_report(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("")
    assert write_all(run, own=True).is_file()
    assert not run.plots.exists()


def test_a_report_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    run.report.mkdir()  # as on a read-only disk, the file cannot be replaced
    with pytest.raises(ConfigError, match=r"cannot write the report in .*run: "):
        write_all(run, own=False)


def test_edges_lie_between_and_averages_start_unbiased() -> None:
    assert edges([1.0, 2.0, 4.0]) == [0.5, 1.5, 3.0, 5.0]
    assert edges([3.0]) == [2.5, 3.5]
    assert smooth([4.0, 0.0], 0.5).tolist() == pytest.approx([4.0, 4.0 / 3])  # (0.5·0.5·4) / (0.25 + 0.5)


# Compare


def test_two_runs_are_compared_in_pairs_with_metrics_and_settings(tmp_path: Path) -> None:
    make_run(tmp_path / "a", accuracy=lambda step: 0.5)
    slow = lambda step: {**healthy(step), "time/step": 7.2}  # noqa: E731
    make_run(
        tmp_path / "b",
        accuracy=lambda step: 0.75,
        metrics=slow,
        overrides=["algo.beta=0.1", "track.project=x"],
    )
    lines = "\n".join(compare_lines([tmp_path / "a", tmp_path / "b"]))
    assert "finished, step 6, 12 s" in lines
    # 5 of 20 prompts go from wrong to right, none back: p = 2 / 2^5.
    assert re.search(
        r"greedy +50\.0 % \[.*\] +75\.0 % \[.*\] +\+25\.0 points \[.*\], 5 better, 0 worse", lines
    )
    assert "p = 0.062" in lines
    assert re.search(r"s/step +3\.60 +7\.20 +\+100\.0 %", lines)
    assert "algo.beta: 0.0 → 0.1" in lines
    assert "track.project" not in lines


def test_runs_that_share_nothing_are_not_paired(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    other = make_run(tmp_path / "b")
    record = json.loads((other.evaluations / "after.json").read_text())
    record["examples"] = [f"other {index}" for index in range(20)]
    (other.evaluations / "after.json").write_text(json.dumps(record))
    assert any("share no held-out examples" in line for line in compare_lines([tmp_path / "a", other.path]))
    for path in other.evaluations.iterdir():
        path.unlink()
    assert any("not measured in b" in line for line in compare_lines([tmp_path / "a", other.path]))


def test_a_pairing_on_some_of_the_questions_says_on_how_many(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    other = make_run(tmp_path / "b")
    assert not any("paired on" in line for line in compare_lines([tmp_path / "a", other.path]))
    record = json.loads((other.evaluations / "after.json").read_text())
    for name in ("examples", "greedy_right", "sampled_right"):
        record[name] = record[name][:4]
    record |= {"majority_right": [], "formatted": [], "rewards": {}}
    (other.evaluations / "after.json").write_text(json.dumps(record))
    told = list(compare_lines([tmp_path / "a", other.path]))
    assert "  paired on the 4 examples that the runs share (of 20 and 4)" in told


def test_a_change_is_relative_where_it_can_be() -> None:
    assert (change(2.0, 3.0), change(0.0, 1.0), change(None, 1.0)) == ("+50.0 %", "+1.00", "")
    # -0.609 -> 1.00 is no "+264.1 %"
    assert (change(-0.609, 1.0), change(1.0, -0.5), change(-0.5, -0.5)) == ("+1.61", "-1.50", "0")


# The list of runs


def test_runs_are_listed_newest_first_with_state_best_and_size(tmp_path: Path) -> None:
    for age, name in ((100, "old"), (0, "new")):
        run = make_run(tmp_path / name, steps=3)
        changed = run.config.stat().st_mtime - age
        os.utime(run.config, (changed, changed))
    write_measured(RunFolder(tmp_path / "old"), 2, 0.9, last=False)
    head, first, second = list_lines(listed(tmp_path))
    assert head.split() == ["run", "state", "steps", "best", "held-out", "size", "started"]
    assert first.startswith("new  finished  3/3")
    assert "90.0 % avg@4 at 2" in second


def test_a_run_is_finished_when_its_last_step_was_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    assert RunReader(run).state() == "finished"  # its checkpoints were deleted after it had ended
    run.stats.write_text(json.dumps({"steps": 2}))
    assert RunReader(run).state() == "stopped"
    run.checkpoint_at(3).mkdir(parents=True)
    assert RunReader(run).state() == "finished"


@pytest.mark.parametrize(
    ("size", "words"), [(12, "12 B"), (1500, "1.5 kB"), (2_340_000, "2.3 MB"), (5e9, "5.0 GB")]
)
def test_sizes_are_in_words(size: int, words: str) -> None:
    assert in_words(size) == words


def test_pruning_names_runs_without_a_step_and_with_keep_the_older_ones(tmp_path: Path) -> None:
    for age, name in ((200, "oldest"), (100, "older"), (0, "newest")):
        run = make_run(tmp_path / name, steps=1)
        os.utime(run.config, (run.config.stat().st_mtime - age,) * 2)
    empty = RunFolder(tmp_path / "empty")
    empty.path.mkdir()
    empty.config.write_text("")
    empty.log.write_text("")
    (tmp_path / "latest").symlink_to(tmp_path / "newest")  # no run of its own, to be kept or removed
    assert [one.path.name for one in to_prune(tmp_path, keep=None, rollouts=False)] == ["empty"]
    assert {one.path.name for one in to_prune(tmp_path, keep=1, rollouts=False)} == {
        "empty",
        "older",
        "oldest",
    }
    only = [one.path.relative_to(tmp_path).as_posix() for one in to_prune(tmp_path, keep=2, rollouts=True)]
    assert sorted(only) == ["empty", "oldest/rollouts", "oldest/updates"]
    remove(to_prune(tmp_path, keep=2, rollouts=True))
    assert (tmp_path / "oldest" / "metrics.jsonl").is_file()
    assert not (tmp_path / "oldest" / "rollouts").exists()
    assert not empty.path.exists()


HOLD = """
import sys, time
from groupwise.tracking.run_folder import RunFolder
from pathlib import Path
lock = RunFolder(Path(sys.argv[1])).lock()
print("held", flush=True)
time.sleep(60)
"""


def test_a_run_that_trains_is_known_by_its_lock_and_never_pruned(tmp_path: Path) -> None:
    import subprocess
    import sys

    run = RunFolder(tmp_path / "busy")
    run.path.mkdir()
    run.config.write_text("")
    assert owner(run) is None
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        assert owner(run) == process.pid
        assert to_prune(tmp_path, keep=0, rollouts=False) == []
        assert listed(tmp_path)[0].state == "training"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert owner(run) is None
    assert [one.path.name for one in to_prune(tmp_path, keep=None, rollouts=False)] == ["busy"]


def test_a_folder_that_only_has_a_file_of_settings_is_not_pruned(tmp_path: Path) -> None:
    for folder in (tmp_path / "project", tmp_path / "project" / "part"):
        folder.mkdir()
        (folder / "config.yaml").write_text("a: 1")
        (folder / "thesis.txt").write_text("x")
    assert to_prune(tmp_path, keep=0, rollouts=False) == []
    (tmp_path / "project" / "training.log").write_text("")
    assert to_prune(tmp_path / "project", keep=0, rollouts=False) == []  # what is named itself stays
    assert len(to_prune(tmp_path, keep=0, rollouts=False)) == 1


def test_a_lock_whose_number_now_belongs_to_another_process_is_nobodys(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / ".lock").write_text(str(os.getppid()))
    assert owner(run) is None


# The commands


def test_the_commands_answer_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    place = ["--output-dir", str(tmp_path)]
    assert main(["report", str(tmp_path / "a")]) == 0
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["runs", *place]) == 0
    assert main(["runs", *place, "prune", "--keep", "1"]) == 0
    assert len(list(tmp_path.iterdir())) == 2
    assert main(["runs", *place, "prune", "--keep", "1", "--yes"]) == 0
    assert len(list(tmp_path.iterdir())) == 1
    out = capsys.readouterr().out
    for words in (
        "report.html",
        "rewards.png",
        "settings that differ",
        "best held-out",
        "add --yes",
        "removed",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["watch", "absent"], "there is no folder absent"),
        (["watch", "--token", "short"], "--token must have at least 16 characters"),
        (["watch", "--port", "70000"], "--port must"),
        (["report", "absent"], "there is no run folder absent"),
        (["compare", "absent", "absent"], "there is no run folder absent"),
        (["runs", "--output-dir", "absent"], "there is no folder absent"),
        (["runs", "--output-dir", ".", "prune", "--rollouts"], "--rollouts requires --keep"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_looking_at_runs_does_not_load_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, groupwise.report.compare_runs, groupwise.report.static_report, "
        "groupwise.report.watch_server; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# At the end of a run


def trained_in(folder: Path, *overrides: str) -> Path:
    from groupwise.training import train

    task_file(folder)
    return train(small_config(folder, "optim.minibatches=1", *overrides))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_in(tmp_path_factory.mktemp("trained"), "track.report=true")


def test_a_run_ends_with_its_report_plots_and_stats(trained: Path) -> None:
    for name in ("report.html", "plots/rewards.png", "plots/reward_distribution.png"):
        assert (trained / name).is_file()
    stats = json.loads((trained / "training_stats.json").read_text())
    assert stats["steps"] == 4
    assert "cut-off" in {alarm["name"] for alarm in stats["alarms"]}  # six tokens are few
    assert carried(trained / "report.html")["api/runs"][0]["state"] == "finished"  # type: ignore[index]


def ratios_in(folder: Path) -> list[float]:
    run = RunReader(RunFolder(folder))
    seen: list[float] = []
    for step in run.rollouts.steps():
        for group in run.rollouts.groups(step):
            for member in group["members"]:
                found = run.rollouts.tokens(step, group["group"], member["member"])
                assert found is not None
                assert (found["ratios"] is not None) == (member["advantage"] != 0.0)
                seen += [ratio for ratio in found["ratios"] or [] if ratio is not None]
    return seen


def test_in_one_pass_the_trainer_gives_every_token_the_samplers_probability(trained: Path) -> None:
    seen = ratios_in(trained)
    assert seen
    assert seen == pytest.approx([1.0] * len(seen), abs=1e-3)


def test_a_second_pass_sees_a_policy_that_has_moved(tmp_path: Path) -> None:
    assert any(abs(ratio - 1) > 0.01 for ratio in ratios_in(trained_in(tmp_path, "optim.epochs=2")))


def test_a_report_that_fails_does_not_take_the_run_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from groupwise.training import recorder, train

    def broken(folder: RunFolder, *, own: bool, stats: object) -> Path:
        raise ConfigError("plots need matplotlib: pip install matplotlib")

    monkeypatch.setattr(recorder, "write_all", broken)
    task_file(tmp_path)
    run = train(small_config(tmp_path, "track.report=true", "run.max_steps=1"))
    said = capsys.readouterr().out
    assert "the report is not complete: plots need matplotlib: pip install matplotlib; groupwise" in said
    assert (run / "training_stats.json").is_file()


def test_an_alarm_is_told_once_while_the_run_goes_on(tmp_path: Path) -> None:
    luckless = task_file(tmp_path).read_text().replace("% 4 == 0", "% 4 == 9")
    task_file(tmp_path, luckless)
    words = [f"run.output_dir={tmp_path}", "run.name=run", *(w for w in SMALL_WORDS)]
    outcome = run_command("train", str(tmp_path / "luck.py"), *words)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("alarm at step 3: Most groups give no training signal. In 100 %") == 1
    assert "alarm at step 3" in (tmp_path / "run" / "training.log").read_text()


SMALL_WORDS = [
    *("run.max_steps=5", "track.trackers=[]", "track.report=false", "model.device=cpu", "evaluate.skip=true"),
    *("rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=4"),
]
