"""A loss and an advantage of the user's own: from Python, by import path, resumed, and with mistakes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise as gw
from groupwise.algo.advantages import checked_advantage, with_advantages
from groupwise.algo.losses import try_loss
from groupwise.algo.samples import to_samples
from groupwise.algo.surrogates import checked_loss, register_loss
from groupwise.config import read_config
from groupwise.config.schema import AlgoConfig
from groupwise.learner.learner import loss_settings, try_custom_loss
from groupwise.records import Group, Rollout
from groupwise.tasks.user_code import load_function, name_of, split_functions
from tests.support.scripted_rollouts import with_trained
from tests.support.small_runs import LUCK, SMALL, run_artifacts, run_command, task_file

SMALL_KEYWORDS: dict[str, Any] = {
    "max_tokens": 5,
    "batch_size": 2,
    "group_size": 4,
    "temperature": 1.5,
    "no_trackio": True,
    "skip_evaluation": True,
    "model": {"device": "cpu"},
    "track": {"report": False},
}
OWN = """
import torch
import groupwise as gw

SCALE = 1.0

def plain(tokens: gw.Tokens, settings: gw.LossSettings):
    ratio = (tokens.logprobs_N - tokens.old_N).exp()
    return -SCALE * ratio * tokens.advantages_N, {"policy/own": ratio.detach().sum()}

def centred(rollouts):
    mean = sum(rollout.reward for rollout in rollouts) / len(rollouts)
    return [rollout.reward - mean for rollout in rollouts]
"""


def rollout(reward: float = 0.0, turns: tuple[int, ...] = (3,)) -> Rollout:
    """A rollout with a prompt of one token and turns of these lengths, a tool result between any two."""
    trained = [False]
    for number, length in enumerate(turns):
        trained += [False] * bool(number) + [True] * length
    return with_trained(trained, reward=reward)


def advantages_of(values: Any, *rollouts: Rollout) -> list[tuple[float, ...]]:
    """What each token of each rollout gets when the user's function returns these values."""
    from groupwise.algo.advantages import register_advantage

    register_advantage("test:own", lambda rollouts: values)
    group = Group(example=gw.Example({}), rollouts=rollouts)
    compared = with_advantages(group, kind="test:own", weights={})
    return [sample.advantages for sample in to_samples([compared], mask_truncated=False, keep_zero=True)]


def test_an_advantage_per_answer_goes_to_every_token_of_the_answer():
    assert advantages_of([0.5, -1], rollout(), rollout(turns=(2,))) == [(0, 0.5, 0.5, 0.5), (0, -1, -1)]


def test_an_advantage_per_turn_goes_to_the_tokens_of_that_turn():
    assert advantages_of([[1.0, -2.0]], rollout(turns=(2, 3))) == [(0, 1, 1, 0, -2, -2, -2)]


def test_an_advantage_per_token_goes_where_it_belongs():
    values = [[0.1, 0.2, 0.0, -0.4, 0.5], 2.0]
    assert advantages_of(values, rollout(turns=(2, 3)), rollout(turns=(1,))) == [
        (0, 0.1, 0.2, 0, 0.0, -0.4, 0.5),
        (0, 2.0),
    ]


def test_tensors_and_arrays_are_numbers_too():
    assert advantages_of(torch.tensor([1.0, -1.0]), rollout(turns=(1,)), rollout(turns=(1,))) == [
        (0, 1.0),
        (0, -1.0),
    ]


def test_tokens_whose_advantages_cancel_out_still_teach():
    group = Group(example=gw.Example({}), rollouts=(rollout(turns=(2,)),))
    own = checked_advantage("own", lambda rollouts: [[1.0, -1.0]])
    assert own(group.rollouts, {}) == [(1.0, -1.0)]
    assert group.rollouts[0].scored(advantage=0.0, token_advantages=(1.0, -1.0)).has_signal
    assert not group.rollouts[0].has_signal


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([1.0], "algo.advantage own must return one value per rollout, 2 here; got 1 values"),
        (None, "algo.advantage own must return one value per rollout, 2 here; got None"),
        ([1.0, float("nan")], "algo.advantage own must return finite numbers; got nan"),
        ([1.0, "much"], "algo.advantage own must return finite numbers; got 'much'"),
        (
            [1.0, [1.0] * 4],
            "algo.advantage own must return a number, or a list with one per turn (2) or per token (5); got "
            "a list of 4",
        ),
    ],
)
def test_a_mistake_in_an_advantage_is_one_sentence_that_names_it(values, sentence):
    with pytest.raises(gw.ConfigError) as caught:
        checked_advantage("own", lambda rollouts: values)([rollout(), rollout(turns=(2, 3))], {})
    assert str(caught.value) == sentence


def test_an_advantage_that_raises_is_named_with_its_error():
    with pytest.raises(gw.ConfigError, match=r"algo\.advantage own raised ZeroDivisionError: division by"):
        checked_advantage("own", lambda rollouts: 1 / 0)([rollout()], {})


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            lambda t, s: t.logprobs_N.sum(),
            "must return one loss per token, a tensor of shape (5,); got shape ()",
        ),
        (lambda t, s: 1.0, "must return one loss per token, a tensor of shape (5,); got float"),
        (
            lambda t, s: t.advantages_N,
            "has no gradient; compute its loss from tokens.logprobs_N without detach()",
        ),
        (lambda t, s: t.logprobs_N / 0, "returned NaN or inf for 5 of 5 tokens"),
        (lambda t, s: (t.logprobs_N, {"a": t.old_N}), "with shape (5,); return its sum over tokens"),
        (lambda t, s: t.logprob, "raised AttributeError: 'Tokens' object has no attribute 'logprob'"),
    ],
)
def test_a_mistake_in_a_loss_shows_before_a_model_loads(function, sentence):
    register_loss("test:loss", function)
    with pytest.raises(gw.ConfigError) as caught:
        try_loss(loss_settings(AlgoConfig(loss="test:loss")))
    assert str(caught.value).startswith("algo.loss test:loss ")
    assert sentence in str(caught.value)


def test_the_trial_of_a_loss_has_the_log_probs_of_a_teacher_as_the_run_has_them():
    def towards_teacher(tokens: gw.Tokens, settings: gw.LossSettings) -> torch.Tensor:
        return (tokens.logprobs_N - tokens.teacher_N).square()

    register_loss("test:towards", towards_teacher)
    for model in ("runs/big", "selfrag/selfrag_llama2_7b"):
        try_custom_loss(AlgoConfig(loss="test:towards", teacher=model))
    with pytest.raises(gw.ConfigError, match=r"algo\.loss test:towards raised TypeError"):
        try_custom_loss(AlgoConfig(loss="test:towards"))
    for partial in ("self", "http://localhost:8000"):
        with pytest.raises(gw.ConfigError, match="returned NaN or inf for 3 of 5 tokens"):
            try_custom_loss(AlgoConfig(loss="test:towards", teacher=partial))


def test_a_loss_may_return_the_losses_alone():
    own = checked_loss("own", lambda tokens, settings: -tokens.logprobs_N)
    ones = torch.ones(3, requires_grad=True)
    settings = loss_settings(AlgoConfig())
    tokens = gw.Tokens(
        logprobs_N=ones, old_N=ones, sampled_N=ones, reference_N=None, entropy_N=None, advantages_N=ones,
        weights_N=ones, sequence_N=torch.zeros(3),
    )  # fmt: skip
    loss_N, metrics = own(tokens, settings)
    assert loss_N.tolist() == [-1.0, -1.0, -1.0]
    assert metrics == {}


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `own_algo` in the working folder."""
    (tmp_path / "own_algo.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "own_algo.py"
    sys.modules.pop("own_algo", None)


def test_functions_are_named_by_where_they_can_be_imported_from(own_module):
    loss = load_function("algo.loss", "own_algo:plain")
    assert name_of(loss) == "own_algo:plain"
    from_file = load_function("algo.loss", f"{own_module}:plain")
    assert name_of(from_file) == f"{own_module}:plain"
    assert name_of(lambda tokens, settings: tokens).startswith("python:test_functions_are_named")
    named, functions = split_functions(
        {"loss": loss, "algo": {"advantage": from_file, "beta": 0.1}, "seed": 1}
    )
    assert named == {
        "algo.loss": "own_algo:plain",
        "algo": {"advantage": f"{own_module}:plain", "beta": 0.1},
        "seed": 1,
    }
    assert functions == {"algo.loss": loss, "algo.advantage": from_file}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("own_algo:plan", "algo.loss: own_algo has no function 'plan'; did you mean 'plain'?"),
        ("own_algo:SCALE", "algo.loss: own_algo:SCALE must be a function; got float"),
        (
            "own_algos:plain",
            "algo.loss: there is no module 'own_algos'; write FILE.py:function for a file elsewhere",
        ),
        ("none.py:plain", "algo.loss: there is no file none.py"),
        (
            "python:<lambda>",
            "algo.loss: <lambda> was defined in Python and cannot be imported: resume the run from Python "
            "with groupwise.train(task, resume=RUN, loss=…)",
        ),
    ],
)
def test_a_function_that_is_not_there_is_one_sentence(own_module, name, sentence):
    with pytest.raises(gw.ConfigError) as caught:
        load_function("algo.loss", name)
    assert str(caught.value) == sentence


def test_a_module_that_fails_is_named_with_its_line(own_module):
    own_module.write_text("import torch\n1 / 0\n")
    with pytest.raises(gw.ConfigError, match=r"own_algo\.py, line 2: ZeroDivisionError: division by zero"):
        load_function("algo.loss", f"{own_module}:plain")
    own_module.write_text("import no_such_package\n")
    with pytest.raises(gw.ConfigError, match="imports 'no_such_package', which is not installed"):
        load_function("algo.loss", "own_algo:plain")


def test_a_word_that_is_neither_a_loss_nor_a_function_lists_both(own_module):
    with pytest.raises(
        gw.ConfigError, match=r"algo\.loss must be one of grpo, .* or a function as module:fun"
    ):
        AlgoConfig(loss="gpro")


TASK = gw.Task(
    name="lucky",
    examples=[{"n": n} for n in range(9)],
    prompt=lambda row: f"{row['n']}?",
    rewards={"lucky": lambda rollout, example: sum(map(ord, rollout.text)) % 3 / 2},
)


def test_the_same_function_trains_alike_from_python_and_from_the_shell_and_is_resumed(own_module, tmp_path):
    """One loss and one advantage, by object and by name; then edited, which a resumed run refuses."""
    task = task_file(tmp_path, LUCK)
    names = [f"algo.loss={own_module}:plain", f"algo.advantage={own_module}:centred"]
    place = [f"run.output_dir={tmp_path}", "run.name=shell"]
    ended = run_command("train", str(task), *SMALL, *names, *place)
    assert (ended.code, ended.err) == (0, "")
    run = tmp_path / "shell"
    assert read_config(run / "config.yaml").algo.loss == f"{own_module}:plain"
    assert "policy/own" in (run / "metrics.jsonl").read_text()

    # dapo without clipping and dr_grpo are the same functions.
    usual = ["algo.clip_low=1", "algo.clip_high=1e9", "algo.advantage=dr_grpo", "run.name=usual"]
    ended = run_command("train", str(task), *SMALL, *place[:1], *usual)
    assert ended.code == 0
    ours, theirs = run_artifacts(run), run_artifacts(tmp_path / "usual")
    assert (
        ours["checkpoints/step-000004/model.safetensors"]
        == theirs["checkpoints/step-000004/model.safetensors"]
    )

    own_module.write_text(OWN.replace("SCALE = 1.0", "SCALE = 2.0"))
    ended = run_command("train", "--resume", str(run), "run.max_steps=5")
    assert ended.code == 2
    assert "its code differs in algo.loss: put it back, or start a new run" in ended.err
    own_module.write_text(OWN)
    assert run_command("train", "--resume", str(run), "run.max_steps=5").code == 0


def test_a_function_of_a_notebook_is_recorded_and_resumed_from_python_only(tmp_path):
    scale = 1.0

    def own(tokens: gw.Tokens, settings: gw.LossSettings) -> torch.Tensor:
        return -scale * tokens.logprobs_N * tokens.advantages_N

    where = {"output_dir": tmp_path, "run_name": "run"}
    run = gw.train(TASK, loss=own, max_steps=1, **where, **SMALL_KEYWORDS)
    name = read_config(Path(run) / "config.yaml").algo.loss
    assert name.startswith("python:test_a_function_of_a_notebook")
    with pytest.raises(
        gw.ConfigError, match=r"resume the run from Python with groupwise\.train\(task, resume=RUN"
    ):
        gw.train(TASK, resume=run, max_steps=2)
    gw.train(TASK, resume=run, loss=own, max_steps=2)
    scale = 2.0
    with pytest.raises(gw.ConfigError, match=r"its code differs in algo\.loss"):
        gw.train(TASK, resume=run, loss=own, max_steps=3)


def test_a_mistake_in_a_loss_leaves_no_run_behind(tmp_path):
    with pytest.raises(gw.ConfigError, match="has no gradient"):
        gw.train(TASK, loss=lambda t, s: t.advantages_N, output_dir=tmp_path, **SMALL_KEYWORDS)
    assert list(tmp_path.iterdir()) == []


def test_an_agent_learns_by_a_loss_of_the_user():
    seen: list[int] = []

    def own(tokens: gw.Tokens, settings: gw.LossSettings) -> torch.Tensor:
        seen.append(len(tokens.logprobs_N))
        return -tokens.logprobs_N * tokens.advantages_N

    agent = gw.Agent(loss=own, group_size=2, max_tokens=4, temperature=1.5, model={"device": "cpu"})
    answers = agent.get_action(["1 + 1"])
    agent.learn((answers, [[0.0, 1.0]]))
    assert seen
