"""A judge behind an OpenAI-compatible server: asked once, bounded, never a silent 0."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import pytest

from groupwise.errors import ConfigError, RolloutError
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.llm_judge import LLMJudge, judged, spent_by_judges
from groupwise.rewards.runner import RewardContext
from groupwise.rewards.score_ahead import score_ahead
from groupwise.training.collector import Batch
from groupwise.training.step_metrics import batch_metrics


@pytest.fixture
def server():
    asked: list[dict] = []
    says = ["<grade>7</grade>"]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
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
    threading.Thread(target=running.serve_forever, daemon=True).start()
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
    judge = LLMJudge(url, "m", characters=10, most_calls=1)
    judge.grade("q", "g" * 1000, "a" * 1000)
    assert len(asked[0]["messages"][0]["content"]) < 500
    with pytest.raises(RolloutError, match="limit"):
        judge.grade("q", "g", "another")


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
    threading.Thread(target=running.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{running.server_port}/v1"
    reward = judged(url=url, model="m", golds=lambda example: ["gold"], rubric="Be kind.")
    example = Example({"question": "q"})
    texts = ("a", "b", "c", "d", "a")
    rollouts = tuple(
        Rollout(
            prompt="?",
            text=f"<answer>{text}</answer>",
            tokens=(1,),
            trained=(True,),
            logprobs=(0.0,),
            entropies=(0.0,),
            prompt_length=0,
            finish="end",
        )
        for text in texts
    )
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
