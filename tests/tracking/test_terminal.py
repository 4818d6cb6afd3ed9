from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from groupwise.evaluate.intervals import wilson
from groupwise.tracking.number_format import duration, number, printable, sparkline
from groupwise.tracking.terminal import (
    Display,
    LiveDisplay,
    PlainDisplay,
    Progress,
    RunSummary,
    live_panel,
    open_display,
)
from tests.support.terminals import FakeTerminal

METRICS = {
    "reward/mean": 0.84,
    "reward/std": 0.5,
    "reward/correct/mean": 0.42,
    "reward/correct/std": 0.49,
    "reward/[bold]\x1b[31mform/mean": 0.97,
    "rollout/length": 71.24,
    "rollout/truncated": 0.03,
    "advantage/zero_variance": 0.22,
    "policy/entropy": 0.412,
    "policy/kl": 0.00012,
    "policy/gap": float("nan"),
    "speed/tokens_per_second": 5123.4,
    "time/step": 3.148,
}
BEFORE = {"greedy": wilson(102, 512), "avg@8": wilson(82, 512), "pass@8": wilson(174, 512)}
AFTER = {"greedy": wilson(307, 512), "avg@8": wilson(246, 512), "pass@8": wilson(430, 512)}
SUMMARY = RunSummary(
    headline="60 steps done",
    seconds=252,
    folder=Path("runs/mine"),
    before=BEFORE,
    after=AFTER,
    next_commands=(("groupwise chat runs/mine", "talk to it"), ("groupwise eval runs/mine", "measure it")),
)


def ticking() -> Iterator[float]:
    time = 0.0
    while True:
        yield time
        time += 1.0


def show(stream: FakeTerminal) -> Display:
    ticks = ticking()
    display = open_display(stream, clock=lambda: next(ticks))
    display.start(60, "groupwise · countdown · tiny")
    display.evaluation("before", BEFORE)
    display.update(1, METRICS)
    display.message("a warning\x1b[2J with codes")
    display.evaluation("at step 1", AFTER)
    return display


def test_the_panel_compares_with_the_first_evaluation_on_the_same_prompts() -> None:
    progress = Progress(title="", total=60, step=0, now=0.0)
    progress.evaluated({"greedy": wilson(64, 128)}, now=0.0)
    progress.evaluated({"greedy": wilson(60, 96)}, first={"greedy": wilson(24, 96)}, now=1.0)
    console = Console(file=io.StringIO(), width=100)
    console.print(live_panel(progress, now=2.0))
    assert "was 25.0 %" in console.file.getvalue()  # type: ignore[attr-defined]


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    stream = FakeTerminal()
    show(stream).finish(SUMMARY)
    lines = stream.getvalue().splitlines()
    assert lines[:5] == [
        "groupwise · countdown · tiny",
        "evaluation before · greedy 19.9 % [16.7, 23.6] · avg@8 16.0 % [13.1, 19.4] · "
        "pass@8 34.0 % [30.0, 38.2]",
        # the step took 1 s after the evaluation ended, so 59 more take 59 s
        "step 1/60 · 59 s left · reward 0.840 (correct 0.420, [bold] [31mform 0.970) · length 71.2 · "
        "entropy 0.412 · tokens/s 5,123 · truncated 3 % · KL 1.2e-04 · s/step 3.15 · no signal 22 %",
        "a warning [2J with codes",
        "evaluation at step 1 · greedy 60.0 % [55.7, 64.1] · avg@8 48.0 % [43.7, 52.4] · "
        "pass@8 84.0 % [80.6, 86.9]",
    ]
    assert lines[5:] == [
        "60 steps done in 4 min 12 s, saved in runs/mine",
        "",
        "held-out accuracy, with 95 % intervals",
        "  greedy     19.9 % [16.7, 23.6]  →  60.0 % [55.7, 64.1]     +40.0 points",
        "  avg@8      16.0 % [13.1, 19.4]  →  48.0 % [43.7, 52.4]     +32.0 points",
        "  pass@8     34.0 % [30.0, 38.2]  →  84.0 % [80.6, 86.9]     +50.0 points",
        "",
        "next",
        "  groupwise chat runs/mine",
        "      talk to it",
        "  groupwise eval runs/mine",
        "      measure it",
    ]
    assert all(character.isprintable() for line in lines for character in line)


def test_a_reader_that_goes_away_does_not_stop_the_run() -> None:
    stream = FakeTerminal()
    display = show(stream)
    stream.gone = BrokenPipeError(32, "Broken pipe")
    display.update(2, METRICS)
    display.finish(SUMMARY)
    assert "step 2/60" not in stream.getvalue()


def test_a_stream_that_cannot_write_the_arrow_gets_a_question_mark() -> None:
    raw = io.BytesIO()
    display = PlainDisplay(io.TextIOWrapper(raw, encoding="ascii"), clock=lambda: 0.0)
    display.finish(SUMMARY)
    assert b"[16.7, 23.6]  ?  60.0 %" in raw.getvalue()


@pytest.mark.parametrize(
    ("terminal", "term", "kind"),
    [
        (True, "xterm-256color", LiveDisplay),
        (True, "dumb", PlainDisplay),
        (False, "xterm-256color", PlainDisplay),
    ],
)
def test_only_a_real_terminal_gets_the_panel(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str, kind: type
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")  # colour may be forced into a pipe; a moving cursor must not be
    assert type(open_display(FakeTerminal(terminal=terminal))) is kind


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "30")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return FakeTerminal(terminal=True)


def drawn(stream: FakeTerminal) -> list[str]:
    """Every line written to a terminal, without the control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n").splitlines()


def test_the_panel_shows_the_run_in_80_columns(live: FakeTerminal) -> None:
    show(live).finish(SUMMARY)
    lines = drawn(live)
    assert max(map(len, lines)) <= 80
    text = "\n".join(" ".join(line.split()) for line in lines)
    for expected in (
        "groupwise · countdown · tiny",
        "step 1/60 · ",
        "held-out greedy 60.0 % [55.7, 64.1] ▁█ was 19.9 %",
        "avg@8 48.0 % [43.7, 52.4] ▁█ was 16.0 %",
        "reward total 0.840 ± 0.500 ▁",
        "correct 0.420 ± 0.490 ▁",
        "[bold] [31mform 0.970 ▁",
        "length 71.2 entropy 0.412 tokens/s 5,123",
        "truncated 3 % KL 1.2e-04 s/step 3.15",
        "no signal 22 % gap grad norm",  # what is not finite or not logged stays empty
        "a warning [2J with codes",
        "60 steps done in 4 min 12 s, saved in runs/mine",
        "groupwise chat runs/mine",
    ):
        assert expected in text


@pytest.mark.parametrize("width", [24, 40, 50, 60, 70, 80])
def test_no_number_of_the_panel_is_cut_on_a_narrow_terminal(width: int) -> None:
    progress = Progress(title="tiny", total=60, step=0, now=0.0)
    for step in range(1, 20):
        progress.evaluated(BEFORE if step == 1 else AFTER, now=float(step))
        progress.advance(step, {**METRICS, "policy/grad_norm": 0.456, "policy/gap": 0.0123}, now=float(step))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(live_panel(progress, now=20.0))
    text = "\n".join(" ".join(line.split()) for line in console.export_text().splitlines())
    told = ("length 71.2", "tokens/s 5,123", "KL 1.2e-04", "s/step 3.15", "gap 0.012", "grad norm 0.456")
    for expected in told:
        assert (expected in text) == (width > 26)
        assert expected in text or expected.split()[0] not in text
    for share in (r"60\.0 % \[55\.7, 64\.1\]", r"0\.840 ± 0\.500"):
        assert (re.search(share, text) is not None) == (width > 42)
    assert re.search(r"was(?! \d\d\.\d %)", text) is None
    assert ("was 19.9 %" in text) == (width > 60)


def test_closing_gives_the_terminal_back_and_may_happen_twice(live: FakeTerminal) -> None:
    stdout = sys.stdout
    display = show(live)
    display.close()
    display.close()
    assert sys.stdout is stdout
    assert (
        live.getvalue().count("\x1b[?25l") == live.getvalue().count("\x1b[?25h") == 1
    )  # cursor hidden, shown


def test_colours_are_left_out_when_the_user_says_so(
    live: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    colour = re.compile(r"\x1b\[(?:[0-9;]*;)?3[0-9][;m]")
    show(live).finish(SUMMARY)
    assert colour.search(live.getvalue())
    monkeypatch.setenv("NO_COLOR", "1")
    plain = FakeTerminal(terminal=True)
    show(plain).finish(SUMMARY)
    assert not colour.search(plain.getvalue())


def test_a_terminal_that_goes_away_does_not_stop_the_run(live: FakeTerminal) -> None:
    display = show(live)
    live.gone = OSError(5, "Input/output error")
    display.update(2, METRICS)
    display.message("still here")
    display.finish(SUMMARY)
    assert "still here" not in live.getvalue()


def test_time_left_follows_the_recent_pace_and_counts_down_within_a_step() -> None:
    progress = Progress(title="", total=10, step=4, now=100.0)  # resumed after step 4
    assert progress.seconds_left(103.0) is None
    progress.evaluated(BEFORE, now=130.0)
    progress.advance(5, {}, now=132.0)
    progress.advance(6, {}, now=136.0)
    assert progress.seconds_left(136.0) == pytest.approx(4 * 3.0)
    assert progress.seconds_left(137.0) == pytest.approx(11.0)
    assert progress.seconds_left(1000.0) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (72, "1 min 12 s"),
        (3700, "1 h 1 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(5123.4, "5,123"), (71.24, "71.2"), (3.148, "3.15"), (-0.412, "-0.412"), (0.00012, "1.2e-04"), (0, "0")],
)
def test_numbers_keep_the_digits_that_matter(value: float, text: str) -> None:
    assert number(value) == text


def test_a_sparkline_spans_the_range_and_averages_what_does_not_fit() -> None:
    assert sparkline([0.0, 0.5, 1.0], width=8) == "▁▅█"
    assert sparkline([0, 0, 1, 1, 3, 3], width=3) == "▁▃█"
    assert sparkline([0.90, 0.91, 0.90], width=8) == "▁▂▁"  # noise stays low
    assert sparkline([], width=8) == ""


def test_printable_text_is_one_line_without_codes() -> None:
    assert printable("a\nb\x1b[1mé") == "a b [1mé"
