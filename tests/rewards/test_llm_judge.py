"""A judge behind an OpenAI-compatible server: asked once, bounded, never a silent 0."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import pytest

import groupwise as gw
from groupwise.errors import ConfigError, RolloutError
from groupwise.isolation.time_limit import TimeLimits
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.llm_judge import LLMJudge, judge, judged, spent_by_judges
from groupwise.rewards.runner import RewardContext, score_group, score_within
from groupwise.rewards.score_ahead import score_ahead
from groupwise.training.collector import Batch
from groupwise.training.step_metrics import batch_metrics
from tests.support.scripted_rollouts import answered

DELAY = [0.0]
"""Seconds that the server of a test takes to answer."""


@pytest.fixture
def server():
    asked: list[dict] = []
    says = ["<grade>7</grade>"]
    DELAY[0] = 0.0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            time.sleep(DELAY[0])
            reply = {
                "choices": [{"message": {"content": says[0]}}],
                "usage": {"prompt_tokens": 50, "completion_tokens": 2, "total_tokens": 52},
            }
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    running = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}/v1", asked, says
    running.shutdown()
    running.server_close()


def test_a_grade_is_asked_for_once_and_its_cost_is_counted(server, tmp_path):
    url, asked, _ = server
    judge = LLMJudge(url, "m", cache=tmp_path)
    assert judge.grade("q", "gold", "answer") == judge.grade("q", "gold", "answer") == 0.7
    assert LLMJudge(url, "m", cache=tmp_path).grade("q", "gold", "answer") == 0.7
    assert len(asked) == 1
    assert judge.spent == {"calls": 1, "prompt_tokens": 50, "completion_tokens": 2}
    assert "<answer>\nanswer\n</answer>" in asked[0]["messages"][0]["content"]


def test_what_is_sent_is_bounded(server):
    url, asked, _ = server
    judge = LLMJudge(url, "m", characters=10)
    judge.grade("q", "g" * 1000, "a" * 1000)
    assert len(asked[0]["messages"][0]["content"]) < 500


def test_a_judge_of_a_long_run_goes_on_after_100_000_calls(server):
    url, _, _ = server
    judge = LLMJudge(url, "m")
    judge.spent["calls"] = 100_000
    assert judge.grade("q", "g", "a") == 0.7
    assert judge.spent["calls"] == 100_001


def test_a_judge_that_fails_fails_the_rollout(server):
    url, _, says = server
    says[0] = "no idea"
    with pytest.raises(RolloutError, match="must reply with <grade>"):
        LLMJudge(url, "m").grade("q", "g", "a")
    with pytest.raises(RolloutError, match="did not answer"):
        LLMJudge("http://127.0.0.1:9/v1", "m", seconds=1.0).grade("q", "g", "a")
    with pytest.raises(ConfigError, match="http"):
        judged(url="localhost:8000", model="m", golds=lambda e: [])


@pytest.mark.parametrize(
    "reply",
    [
        "8/10", "3 out of 10", "0. The answer scores 0 of 10 points.", "7.5", "-3", "7", "",
        "<grade>7.5</grade>",
        "<grade>-3</grade>", "<grade>11</grade>", "<grade>8/10</grade>", "<grade></grade>",
        "<grade>٧</grade>",
        "<grade>0</grade><grade>10</grade>", "The answer says <grade>10</grade>, which is a trick: 0",
        '{"grade": 7}',
    ],
)  # fmt: skip
def test_a_reply_in_any_other_form_fails_the_rollout(server, reply):
    url, _, says = server
    says[0] = reply
    with pytest.raises(RolloutError, match="must reply with <grade>"):
        LLMJudge(url, "m").grade("q", "g", "a")


@pytest.mark.parametrize(("reply", "grade"), [("<grade>0</grade>", 0.0), (" <grade> 10 </grade>\n", 1.0)])
def test_a_grade_in_its_tags_is_read(server, reply, grade):
    url, asked, says = server
    says[0] = reply
    assert LLMJudge(url, "m").grade("q", "g", "a") == grade
    assert "<grade>0</grade>" in asked[0]["messages"][0]["content"]


def test_a_steps_metrics_say_what_the_judge_cost(server):
    url, _, _ = server
    reward = judged(url=url, model="m", golds=lambda example: [example["answer"]])
    assert spent_by_judges({"judge": reward, "other": len}) == {}
    rollout = Rollout(
        prompt="?", text="fine", tokens=(1, 2), trained=(False, True), logprobs=(0.0, -1.0),
        entropies=(0.0, 0.0), prompt_length=1, finish="end",
    )  # fmt: skip
    example = Example({"question": "q", "answer": "a"})
    assert reward(rollout, example) == 0.7
    batch = Batch(
        groups=(Group(example=example, rollouts=(rollout,)),), dropped=(), replaced=0, cursor=1, rates={},
        passed_over=0, rollout_seconds=1.0, reward_seconds=1.0,
        judge_usage=spent_by_judges({"judge": reward}),
    )  # fmt: skip
    metrics = batch_metrics(batch)
    assert (metrics["judge/calls"], metrics["judge/prompt_tokens"]) == (1.0, 50.0)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_judge_may_take_longer_than_other_rewards(server, ahead):
    url, _, _ = server
    DELAY[0] = 0.3
    rewards = {"judge": judge(url=url, model="m"), "late": lambda rollout, example: time.sleep(0.3) or 1.0}
    group = Group(example=Example({"question": "q"}), rollouts=(answered("<answer>a</answer>"),))
    context = RewardContext()
    with TimeLimits(0.1) as limit:
        if ahead:
            score_ahead([group], rewards=rewards, seconds=0.1, concurrency=4, context=context)
            assert list(context.ready.values()) == [0.7]
        scored = score_within(limit, group, rewards={"judge": rewards["judge"]}, weights={}, context=context)
        late = score_within(limit, group, rewards=rewards, weights={})
    assert scored.rollouts[0].reward == 0.7
    assert late.rollouts[0].error == "reward late: took longer than 0.1 s"


def test_a_judge_that_takes_too_long_fails_the_rollout(server):
    url, asked, _ = server
    DELAY[0] = 0.5
    slow = judge(url=url, model="m", seconds=0.2)
    group = Group(example=Example({"question": "q"}), rollouts=(answered("<answer>a</answer>"),))
    scored = score_group(group, rewards={"judge": slow}, weights={}, seconds=0.1)
    error = scored.rollouts[0].error
    assert error is not None
    assert "took longer than 0.2 s" in error or "timed out" in error
    assert len(asked) == 1  # the attempts share the limit


def test_the_calls_of_a_batch_run_at_the_same_time_and_a_busy_server_is_asked_again(monkeypatch):
    monkeypatch.setattr("groupwise.rewards.llm_judge.PAUSE_SECONDS", 0.01)
    together = threading.Barrier(4)  # answers only when four calls have arrived
    refused: list[str] = []
    prompts: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0][
                "content"
            ]
            if prompt not in refused:
                refused.append(prompt)
                self.send_response(429)
                self.end_headers()
                return
            together.wait(10)
            prompts.append(prompt)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"choices": [{"message": {"content": "<grade>8</grade>"}}]}')

        def log_message(self, *arguments: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{running.server_port}/v1"
    reward = judged(url=url, model="m", golds=lambda example: ["gold"], rubric="Be kind.")
    example = Example({"question": "q"})
    texts = ("a", "b", "c", "d", "a")
    rollouts = tuple(answered(f"<answer>{text}</answer>") for text in texts)
    context = RewardContext()
    score_ahead(
        [Group(example=example, rollouts=rollouts)],
        rewards={"judge": reward},
        seconds=10.0,
        concurrency=8,
        context=context,
    )
    running.shutdown()
    running.server_close()
    assert list(context.ready.values()) == [0.8] * 5
    assert len(prompts) == 4  # equal answers are graded once, also at the same time
    assert all("Be kind." in prompt for prompt in prompts)
    assert reward.judge.spent["calls"] == 4


class Comparing:
    """A stand-in server that prefers the longer answer, or says what it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.says: str | None = None
        self.refusals = 0
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = body["messages"][0]["content"]
                judge.asked.append(prompt)
                if judge.refusals:
                    judge.refusals -= 1
                    self.send_error(503)
                    return
                reply = {"choices": [{"message": {"content": judge.says or judge.preferred(prompt)}}]}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(reply).encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def preferred(self, prompt: str) -> str:
        first, second = (
            len(prompt.partition(f"<answer_{name}>\n")[2].partition("\n</answer")[0]) for name in "AB"
        )
        return f"<better>{'tie' if first == second else 'A' if first > second else 'B'}</better>"


@pytest.fixture
def comparing():
    stand_in = Comparing()
    yield stand_in
    stand_in.server.shutdown()
    stand_in.server.server_close()


def group_of(*texts: str, **columns: object) -> Group:
    return Group(
        example=Example({"question": "q", **columns}),
        rollouts=tuple(answered(text, [{"role": "user", "content": "the prompt"}]) for text in texts),
    )


def test_answers_of_a_group_are_compared_in_pairs_and_in_both_orders(comparing, tmp_path):
    reward = gw.rewards.judge(
        url=comparing.url, model="m", pairwise=True, rubric="Longer is better.", cache=tmp_path, opponents=1
    )
    groups = [group_of("a", "abc", "ab", "abcd", answer="gold"), group_of("same", "same"), group_of("alone")]
    context = RewardContext()
    score_ahead(groups, rewards={"judge": reward}, seconds=5, concurrency=8, context=context)
    scores = [[context.ready["judge", id(r)] for r in group.rollouts] for group in groups]
    # In the ring a-abc-ab-abcd: a loses to abc and abcd, abc wins twice, ab loses twice, abcd wins twice.
    assert scores == [[0.0, 1.0, 0.0, 1.0], [0.5, 0.5], [None]]
    assert len(comparing.asked) == 8  # 4 pairs in both orders; equal answers are not sent
    assert all("Longer is better." in prompt and "\ngold\n" in prompt for prompt in comparing.asked)
    assert spent_by_judges({"judge": reward})["calls"] == 8
    again = gw.rewards.judge(
        url=comparing.url, model="m", pairwise=True, rubric="Longer is better.", cache=tmp_path, opponents=1
    )
    scored = score_group(groups[0], rewards={"judge": again}, weights={}, seconds=5)
    assert [rollout.reward for rollout in scored.rollouts] == [0.0, 1.0, 0.0, 1.0]
    assert len(comparing.asked) == 8  # from the disk


def test_an_answer_alone_gets_no_verdict_and_the_other_rewards_count(comparing):
    better = gw.rewards.judge(url=comparing.url, model="m", pairwise=True)
    alone = group_of("alone")
    scored = score_group(alone, rewards={"better": better, "own": lambda r, e: 0.25}, weights={}, seconds=5)
    assert scored.rollouts[0].rewards == {"own": 0.25}
    (only,) = score_group(alone, rewards={"better": better}, weights={}, seconds=5).rollouts
    assert only.error == "no reward applies: every reward function returned None"
    assert comparing.asked == []


def test_a_judge_that_always_prefers_the_first_place_gives_ties(comparing):
    comparing.says = "<better>A</better>"
    reward = gw.rewards.judge(url=comparing.url, model="m", pairwise=True, reference=None)
    assert reward.score_batch([group_of("a", "b", "c")], concurrency=4) == [[0.5, 0.5, 0.5]]


def test_a_failed_comparison_fails_its_two_rollouts_only(comparing, monkeypatch):
    monkeypatch.setattr("groupwise.rewards.llm_judge.PAUSE_SECONDS", 0.001)
    reward = gw.rewards.judge(url=comparing.url, model="m", pairwise=True, opponents=1)
    preferred = comparing.preferred
    comparing.preferred = lambda prompt: (
        "no idea" if "odd" in prompt and "even" in prompt else preferred(prompt)
    )
    (scores,) = reward.score_batch([group_of("odd", "even", "xxxxxx", "yyyyyyyyyy")], concurrency=4)
    assert [isinstance(score, RolloutError) for score in scores] == [True, True, False, False]
    assert "must reply with <better>" in str(scores[0])
    assert scores[2:] == [0.5, 1.0]
    comparing.refusals = 2  # asked again
    assert reward.score_batch([group_of("1", "22")], concurrency=1) == [[0.0, 1.0]]


def test_a_rubric_grades_without_a_reference_and_without_a_question_column(comparing):
    comparing.says = "<grade>4</grade>"
    reward = gw.rewards.judge(url=comparing.url, model="m", rubric="Be kind.", question="none")
    group = group_of("hello")
    assert reward(group.rollouts[0], group.example) == 0.4
    assert "<reference>" not in comparing.asked[0]
    assert "<question>\nthe prompt\n</question>" in comparing.asked[0]
    assert "Be kind." in comparing.asked[0]
    with pytest.raises(ConfigError, match="opponents must be at least 1"):
        gw.rewards.judge(url=comparing.url, model="m", pairwise=True, opponents=0)
