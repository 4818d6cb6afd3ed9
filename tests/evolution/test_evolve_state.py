"""What is shown of a population: a table that stays in the panel, or lines where there is none."""

from __future__ import annotations

from groupwise.evolution.evolve_state import MemberRecord, SearchState, table
from groupwise.tracking.terminal import LiveDisplay, PlainDisplay
from tests.support.terminals import FakeTerminal

STORY = SearchState(
    step=8,
    tokens=12_345,
    names=4,
    people=(
        MemberRecord(name=0, place=0, parent=None, born=0, values={"algo.beta": 0.001}, scores=(0.0, 0.5)),
        MemberRecord(name=3, place=1, parent=0, born=4, values={"algo.beta": 0.0012}, scores=(1.0, 0.5)),
        MemberRecord(
            name=2, place=2, parent=None, born=0, values={"algo.beta": 0.5}, trouble="diverged: nan"
        ),
    ),
)


def test_the_table_has_values_lineage_and_fitness_and_marks_the_best():
    lines = table(STORY, {0: 1.25}).splitlines()
    assert lines[0] == "step 8 · 12,345 tokens"
    assert lines[1].split() == ["member", "parent", "born", "beta", "reward", "accuracy"]
    assert lines[2].split()[:6] == ["0", "base", "0", "0.001", "1.25", "25.0"]
    assert lines[3].split()[:5] == ["*3", "0", "4", "0.0012", "75.0"]
    assert lines[4].split() == ["2", "base", "0", "0.5", "diverged:", "nan"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_without_a_terminal_only_news_is_printed():
    stream = FakeTerminal()
    display = PlainDisplay(stream, clock=lambda: 0.0)
    display.start(10, "title")
    display.note("old\ntable", new=False)
    display.note("new\ntable", new=True)
    assert stream.getvalue() == "title\nnew\ntable\n"


def test_in_a_terminal_the_table_stays_in_the_panel():
    stream = FakeTerminal(terminal=True)
    display = LiveDisplay(stream, clock=lambda: 0.0)
    display.start(10, "title")
    display.note(table(STORY, {}), new=False)
    display.close()
    assert "12,345 tokens" in stream.getvalue()
    assert "*3" in stream.getvalue()
