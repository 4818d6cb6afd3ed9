"""Teachers, cross-entropy on what the policy reads, and supervised samples: the naive gradient, by hand."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest
import torch

import groupwise as gw
from groupwise.algo.losses import Tokens, policy_loss
from groupwise.algo.samples import predicting_results
from groupwise.config.schema import AlgoConfig
from groupwise.engine.vllm import vllm_client
from groupwise.learner.learner import Learner, loss_settings
from groupwise.learner.micro_batch import MicroBatchInputs
from groupwise.learner.teacher import (
    ModelTeacher,
    SelfTeacher,
    ServerTeacher,
    shown_answer,
)
from groupwise.records import Group, Rollout, Sample, Sampling
from tests.support.distillation_parity import (
    distillation_from_a_model,
    self_distillation,
    supervised_tokens,
)
from tests.support.process_groups import in_processes
from tests.support.small_models import tiny_tokenizer
from tests.support.update_parity import (
    OPTIM,
    SAMPLING,
    assert_same_gradients,
    demonstration,
    policy_and_plain,
    some_samples,
)


@pytest.mark.parametrize("lora", [False, True])
def test_distilling_from_a_model_has_the_gradient_of_the_reverse_kl(lora):
    assert_same_gradients(*distillation_from_a_model(lora=lora))


def test_the_policy_teaches_itself_on_the_answers_that_have_a_hint():
    assert_same_gradients(*self_distillation())


@pytest.mark.parametrize("budget", [1, 45, 100_000])
def test_supervised_tokens_add_their_cross_entropy_at_temperature_1(budget):
    assert_same_gradients(*supervised_tokens(budget))


def test_a_step_of_demonstrations_alone_is_supervised_learning():
    policy, plain, _ = policy_and_plain(lora=False)
    learner = Learner(policy, algo=AlgoConfig(), optim=OPTIM, sampling=SAMPLING, max_steps=1)
    samples = [demonstration(0, (5, 6), (7, 8), 0.5)]
    report = learner.update(samples, sequences=1, tokens=1)
    logprobs = plain(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0].log_softmax(-1)
    expected = -(logprobs[1, 7] + logprobs[2, 8]) / 2
    assert report["policy/loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_the_teacher_pulls_by_the_difference_of_log_probabilities_where_it_has_one():
    logprobs_N = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    fixed_N = logprobs_N.detach()
    zeros_N = torch.zeros(3, dtype=torch.float64)
    tokens = Tokens(
        logprobs_N=logprobs_N,
        old_N=fixed_N,
        sampled_N=fixed_N,
        reference_N=None,
        entropy_N=None,
        teacher_N=torch.tensor([-1.5, math.nan, -1.0], dtype=torch.float64),
        advantages_N=zeros_N,
        weights_N=torch.ones_like(zeros_N),
        sequence_N=torch.zeros(3, dtype=torch.int64),
    )
    how = loss_settings(AlgoConfig(teacher="other", distill=2.0, correction="none"))
    loss, metrics = policy_loss(tokens, how)
    # log p - log t: 0.5, unknown, -2; times the coefficient 2. The values are halves of squares.
    assert loss.item() == pytest.approx(2 * (0.125 + 2.0))
    assert torch.autograd.grad(loss, logprobs_N)[0].tolist() == pytest.approx([1.0, 0.0, -4.0])
    assert (metrics["policy/teacher_kl"].item(), metrics["policy/taught"].item()) == (-1.5, 2)


def test_what_comes_between_turns_is_predicted_and_nothing_else():
    zeros = (0.0,) * 6
    sample = Sample(
        tokens=(1, 2, 3, 4, 5, 6),
        trained=(False, False, True, False, False, True),
        logprobs=zeros,
        entropies=zeros,
        advantages=zeros,
        prefix=2,
        group=0,
    )
    (echo,) = predicting_results([sample], weight=0.5)
    assert echo.supervised == (0.0, 0.0, 0.0, 0.25, 0.25, 0.0)
    single = replace(sample, trained=(False, False, True, True, True, True))
    assert predicting_results([single], weight=0.5) == [single]


def answer(member: int, reward: float, text: str, prompt: Any = "1 + 1") -> Rollout:
    return Rollout(
        prompt=prompt, text=text, tokens=(5, 6, 7), trained=(False, True, True), logprobs=(0.0,) * 3,
        entropies=(0.0,) * 3, prompt_length=1, finish="end", member=member, reward=reward,
    )  # fmt: skip


def hints_of(groups: list[Group], policy: Any) -> dict[tuple[int, int], tuple[int, ...]]:
    """The hints where an answer is right from a reward of 1."""
    return SelfTeacher(policy, SAMPLING, is_right=lambda rollout: rollout.reward >= 1).hints(groups)


def test_failed_answers_are_shown_the_first_best_one_of_their_group(small_policy):
    groups = [
        Group(
            example=gw.Example({}), rollouts=(answer(0, 0.0, "3"), answer(1, 1.0, "2"), answer(2, 1.0, "two"))
        ),
        Group(example=gw.Example({}), rollouts=(answer(0, 0.5, "a"), answer(1, 0.5, "b"))),
    ]
    hints = hints_of(groups, small_policy)
    assert list(hints) == [(0, 0)]
    assert small_policy.decode(hints[0, 0]).count("A right answer to this is:\n2\n") == 1
    chat = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "It is"}]
    shown = shown_answer(answer(0, 1.0, "2", prompt=chat))
    assert [message["role"] for message in shown] == ["user", "assistant"]
    assert shown[0]["content"].startswith("1 + 1\n\nA right answer to this is:\n2\n")


def test_a_best_answer_that_is_wrong_is_not_shown(small_policy):
    close = (answer(0, 0.0, "3"), answer(1, 0.5, "two, or so"))
    assert hints_of([Group(example=gw.Example({}), rollouts=close)], small_policy) == {}
    # A wrong answer may have a higher reward than a right one: the right one is shown, to lower rewards only.
    mixed = [answer(0, 0.0, "3"), answer(1, 2.0, "so well put"), answer(2, 1.0, "2")]
    teacher = SelfTeacher(small_policy, SAMPLING, is_right=lambda rollout: rollout.text == "2")
    hints = teacher.hints([Group(example=gw.Example({}), rollouts=tuple(mixed))])
    assert list(hints) == [(0, 0)]
    assert "A right answer to this is:\n2\n" in small_policy.decode(hints[0, 0])


class Scorer(BaseHTTPRequestHandler):
    """Answers as servers of completions do: the log-probability of token t in a prompt is -t / 100."""

    failures: ClassVar[list[int]] = []
    """Status codes of the next answers."""
    prompts: ClassVar[list[list[int]]] = []
    context: ClassVar[int | None] = None

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "teacher", "max_model_len": self.context}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.failures:
            self.send_error(self.failures.pop())
            return
        self.prompts.append(body["prompt"])
        assert (body["model"], body["echo"], body["logprobs"]) == ("teacher", True, 1)
        scores = [None, *(-t / 100 for t in body["prompt"][1:]), -9.0]
        self.answer({"choices": [{"logprobs": {"token_logprobs": scores}}]})

    def answer(self, content: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def scorer() -> Iterator[str]:
    Scorer.failures, Scorer.prompts, Scorer.context = [], [], None
    server = HTTPServer(("127.0.0.1", 0), Scorer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_a_server_scores_the_trained_tokens_of_every_sample(scorer):
    _, plain, _ = policy_and_plain(lora=False)
    samples = some_samples(plain, groups=1)
    part = MicroBatchInputs.build(samples, [1.0] * len(samples), device=torch.device("cpu"))
    scores = ServerTeacher(scorer, seconds=5, patience=5).logprobs(part)
    trained = [t for one in samples for t, flag in zip(one.tokens, one.trained, strict=True) if flag]
    assert scores.tolist() == pytest.approx([-t / 100 for t in trained])
    with pytest.raises(gw.InvariantError, match=r"the teacher http://127\.0\.0\.1:9 did not answer"):
        ServerTeacher("http://127.0.0.1:9", seconds=1, patience=0)


def scored(address: str, samples: list[Sample], **patience: float) -> list[float]:
    part = MicroBatchInputs.build(samples, [1.0] * len(samples), device=torch.device("cpu"))
    scores: list[float] = (
        ServerTeacher(address, **{"seconds": 5, "patience": 5} | patience).logprobs(part).tolist()
    )
    return scores


def trained_sample(*tokens: int) -> Sample:
    """A sample whose first token is the prompt."""
    zeros = (0.0,) * len(tokens)
    return Sample(
        tokens=tokens, trained=(False, *[True] * (len(tokens) - 1)), logprobs=zeros, entropies=zeros,
        advantages=zeros, prefix=1, group=0,
    )  # fmt: skip


def test_a_server_that_fails_for_a_moment_is_asked_again(scorer, monkeypatch):
    monkeypatch.setattr(vllm_client, "FIRST_PAUSE", 0.01)
    Scorer.failures += [429, 503]
    assert scored(scorer, [trained_sample(5, 20, 30)]) == pytest.approx([-0.2, -0.3])
    Scorer.failures += [500] * 50
    with pytest.raises(gw.InvariantError, match=r"no teacher has responded for 0\.1 s \(engine\.patience\)"):
        scored(scorer, [trained_sample(5, 20, 30)], patience=0.1)
    Scorer.failures[:] = [400]
    with pytest.raises(gw.InvariantError, match=r"did not score a prompt: .* returned 400"):
        scored(scorer, [trained_sample(5, 20, 30)])


def test_a_server_is_not_sent_samples_without_trained_tokens(scorer):
    assert scored(
        scorer, [demonstration(0, (5, 6), (7, 8), 0.5), replace(trained_sample(5, 20), group=1)]
    ) == pytest.approx([-0.2])
    assert Scorer.prompts == [[5, 20]]


def test_an_answer_that_fills_the_context_of_a_server_is_scored_but_for_its_last_token(scorer):
    Scorer.context = 4
    whole, cut = scored(scorer, [trained_sample(5, 20, 30)]), scored(scorer, [trained_sample(5, 20, 30, 40)])
    assert whole == pytest.approx([-0.2, -0.3])
    assert cut[:2] == whole
    assert math.isnan(cut[2])
    assert Scorer.prompts == [[5, 20, 30]] * 2


def test_a_server_needs_the_plain_distribution():
    with pytest.raises(
        gw.ConfigError, match=r"scores at temperature 1 without truncation; set rollout\.temp"
    ):
        gw.train("countdown", algo={"teacher": "http://127.0.0.1:9"})


def test_a_teacher_with_another_tokenizer_is_refused(small_policy):
    other = copy.copy(small_policy)
    other.tokenizer = copy.deepcopy(tiny_tokenizer())
    other.tokenizer.add_tokens(["<new>"])
    with pytest.raises(gw.ConfigError, match=r"algo\.teacher other has another tokenizer than the policy"):
        ModelTeacher(other, Sampling(), student=small_policy, name="other")


SMALL: dict[str, Any] = {
    "max_steps": 2,
    "batch_size": 2,
    "group_size": 6,
    "max_tokens": 40,
    "no_trackio": True,
    "skip_evaluation": True,
    "model": {"device": "cpu"},
    "track": {"report": False},
}


def test_a_run_learns_from_a_teacher_from_itself_and_from_worked_answers_at_once(tmp_path):
    algo = {"teacher": "tiny", "distill": 0.1, "sft_weight": 0.2}
    result = gw.train("countdown", algo=algo, output_dir=tmp_path, run_name="a", **SMALL)
    metrics = result.metrics
    # The teacher is what the policy was before: they differ after the first update only.
    assert (metrics["policy/taught"] == 1.0).all()
    assert metrics["policy/cross_entropy"].between(0, 2).all()
    assert (metrics["rollout/groups"] == 2).all()
    result = gw.train("countdown", algo={"teacher": "self"}, output_dir=tmp_path, run_name="b", **SMALL)
    assert result.metrics["policy/taught"].dropna().between(0.01, 1.0).all()


class Sum:
    """Two turns: the first is rewarded for being short, the second for its last character."""

    def reset(self, example: gw.Example) -> str:
        self.turn = 0
        return f"{example['n']} + 1 ="

    def reply(self, text: str) -> gw.Reply:
        self.turn += 1
        if self.turn == 1:
            return gw.Reply("And twice that?", reward=float(len(text) % 2))
        return gw.Reply("", reward=float(sum(map(ord, text)) % 2), done=True)


def test_turns_get_advantages_of_their_own_and_replies_are_predicted(tmp_path):
    task = gw.Task(name="sums", examples=[{"n": n} for n in range(12)], environment=Sum)
    stops = {"rollout": {"stop": list("0123456789"), "refill": 0}}
    settings = {**SMALL, **stops, "max_tokens": 12, "temperature": 1.5, "task.held_out": 2}
    algo = {"advantage": "turn", "echo": 0.3}
    result = gw.train(task, algo=algo, output_dir=tmp_path, run_name="run", **settings)
    rollouts = result.rollouts()
    assert (rollouts["turns"].map(len) == 2).any()
    each = rollouts["token_advantages"].dropna()
    assert len(each)
    assert all(
        len(own) == length for own, length in zip(each, rollouts.loc[each.index, "length"], strict=True)
    )
    assert (result.metrics["policy/cross_entropy"] > 0).all()
    trained = [dict.fromkeys(own) for own in each]
    assert max(map(len, trained)) == 2  # one value a turn


def test_members_of_a_population_learn_by_a_loss_of_the_user(tmp_path):
    seen: list[int] = []

    def own(tokens: gw.Tokens, settings: gw.LossSettings) -> torch.Tensor:
        seen.append(len(tokens.logprobs_N))
        return -tokens.logprobs_N * tokens.advantages_N

    settings = {**SMALL, "max_steps": 1, "task.held_out": 2, "skip_evaluation": False}
    searched = {"population": 2, "every": 1}
    result = gw.evolve("countdown", loss=own, evolve=searched, output_dir=tmp_path, lora_r=4, **settings)
    assert seen
    assert result.config.algo.loss.startswith("python:")


def small_training(folder: str, name: str) -> list[tuple[float, float, float]]:
    """Train with a teacher and worked answers; return loss, cross-entropy and distance of each step."""
    from groupwise.config import config_from_keywords
    from groupwise.training import train

    algo = {"teacher": "tiny", "distill": 0.1, "sft_weight": 0.2, "advantage": "dr_grpo"}
    keywords = {**SMALL, "output_dir": folder, "run_name": name, "optim": {"micro_batch_tokens": 120}}
    run = train(config_from_keywords(task="countdown", algo=algo, **keywords))
    metrics = gw.RunResult(run).metrics
    names = ("policy/loss", "policy/cross_entropy", "policy/teacher_kl")
    return [tuple(float(metrics.loc[step, name]) for name in names) for step in (1, 2)]


def test_two_processes_distill_and_imitate_as_one(tmp_path):
    alone = small_training(str(tmp_path), "alone")
    together, _ = in_processes(2, small_training, str(tmp_path), "together")
    for one, two in zip(alone, together, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-5)
