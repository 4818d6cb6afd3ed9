"""Games of TextArena and Gymnasium, played by a policy."""

from __future__ import annotations

import random
import re

import pytest

import groupwise as gw
from groupwise.errors import ConfigError
from groupwise.records import Example


def play(factory, seed, moves):
    """Play one game; `moves` makes a move of everything that was observed."""
    game = factory()
    seen = [game.reset(Example({"seed": seed}))]
    replies = []
    while not replies or not replies[-1].done:
        replies.append(game.reply(moves(seen)))
        seen.append(replies[-1].text)
    return seen, replies


def test_a_frozen_lake_is_crossed_and_a_wrong_word_is_explained():
    pytest.importorskip("gymnasium")
    lake = gw.gymnasium("FrozenLake-v1", render_mode="ansi", is_slippery=False)
    path = iter(["I go 1", "1", "2", "2", "jump", "7", "1", "2"])
    seen, replies = play(lake, 0, lambda seen: next(path))
    assert seen[0].count("H") == 4
    assert [reply.text for reply in replies[4:6]] == ["Answer with a number from 0 to 3."] * 2
    assert [reply.reward for reply in replies] == [0.0] * 7 + [1.0]


def test_the_environment_is_a_task_and_own_functions_read_and_show():
    pytest.importorskip("gymnasium")
    make = gw.gymnasium(
        "Blackjack-v1", act=lambda text: int("hit" in text), observe=lambda o: f"You have {o[0]}."
    )
    task = gw.Task(name="jack", examples=[{"seed": n} for n in range(9)], environment=make)
    assert re.fullmatch(r"You have \d+\.", str(task.ask(Example({"seed": 3}))))
    _, replies = play(make, 3, lambda seen: "stay")
    assert replies[-1].reward in (-1.0, 0.0, 1.0, 1.5)
    with pytest.raises(ConfigError, match="Gymnasium cannot make 'Nothing-v0'"):
        gw.gymnasium("Nothing-v0")


@pytest.fixture
def spaces():
    """Register an environment that shows the actions it gets, whatever their space."""
    library = pytest.importorskip("gymnasium")

    class Showing(library.Env):
        render_mode = None

        def __init__(self, space) -> None:
            self.action_space, self.observation_space = space, library.spaces.Text(200)

        def reset(self, *, seed=None, options=None):
            return "act", {}

        def step(self, action):
            assert self.action_space.contains(action)
            return f"{action.tolist() if hasattr(action, 'tolist') else action!r}", 0.0, False, False, {}

    library.register("Showing-v0", Showing, disable_env_checker=True, order_enforce=False)
    yield library.spaces
    library.registry.pop("Showing-v0")


def test_every_space_of_whole_numbers_is_read_from_text(spaces):
    def replies(space, *texts):
        game = gw.gymnasium("Showing-v0", space=space)()
        game.reset(Example({"seed": 0}))
        return [game.reply(text).text for text in texts]

    assert replies(spaces.Discrete(5, start=-2), "-2", "x = -1", "7-2", "go-2", "3", "-3") == [
        "-2", "-1", "2", "2", *["Answer with a number from -2 to 2."] * 2,
    ]  # fmt: skip
    assert replies(spaces.Discrete(4), "-1", "step 1: 2") == ["Answer with a number from 0 to 3.", "2"]
    several = "Answer with 2 numbers: from 1 to 3, from 0 to 1."
    both = spaces.MultiDiscrete([3, 2], start=[1, 0])
    assert replies(both, "3 0", "turn 7: 1, 1", "0 0", "1") == ["[3, 0]", "[1, 1]", several, several]
    grid = spaces.MultiBinary((2, 2))
    assert replies(grid, "1 0\n0 1", "1 0 2 1")[0] == "[[1, 0], [0, 1]]"
    assert replies(spaces.Text(10), " left \n") == ["'left'"]
    with pytest.raises(ConfigError, match=r"Showing-v0 has actions of Box.*; give act=…"):
        gw.gymnasium("Showing-v0", space=spaces.Box(0.0, 1.0))


def test_a_number_is_guessed_in_textarena_and_games_do_not_share_randomness():
    pytest.importorskip("textarena", reason="textarena is not installed")
    guess = gw.textarena("GuessTheNumber-v0", max_number=9)
    bounds = [1, 9]

    def halve(seen):
        if "is higher" in seen[-1]:
            bounds[0] = sum(bounds) // 2 + 1
        elif "is lower" in seen[-1]:
            bounds[1] = sum(bounds) // 2 - 1
        return f"[{sum(bounds) // 2}]"

    seen, replies = play(guess, 3, halve)
    assert "between 1 and 9" in seen[0]
    assert replies[-1].reward == 1.0
    assert len(replies) <= 4
    random.seed(1)
    first, second = guess(), guess()
    openings = [first.reset(Example({"seed": 5})), second.reset(Example({"seed": 5}))]
    assert openings[0] == openings[1]
    assert first.game.game_number == second.game.game_number
    assert random.random() == random.Random(1).random()


def test_an_opponent_plays_the_other_side():
    pytest.importorskip("textarena", reason="textarena is not installed")
    with pytest.raises(ConfigError, match="requires opponent"):
        gw.textarena("TicTacToe-v0", players=2)
    with pytest.raises(ConfigError, match="has no game"):
        gw.textarena("Nothing-v0")

    def free(text):
        taken = re.findall(r"in cell (\d)", text)
        return next(f"[{cell}]" for cell in "8765" if cell not in taken)

    game = gw.textarena("TicTacToe-v0", players=2, opponent=free)
    moves = iter(["[0]", "[1]", "[2]"])
    _, replies = play(game, 0, lambda seen: next(moves))
    assert (replies[-1].reward, replies[-1].done) == (1.0, True)
    moves = iter(["[0]", "[0]", "[0]", "[0]"])
    _, replies = play(game, 0, lambda seen: next(moves))
    assert replies[-1].reward == -1.0
