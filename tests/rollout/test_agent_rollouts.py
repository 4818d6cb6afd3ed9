"""Agents that own their loop: their programs, the queue of their model calls, and their sequences."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from contextlib import nullcontext

import pytest

import groupwise as gw
from groupwise.algo.losses import token_weights
from groupwise.algo.samples import batch_size, to_samples
from groupwise.config.schema import AgentConfig
from groupwise.errors import ConfigError, RolloutError
from groupwise.isolation.worker import Command
from groupwise.records import Completion, Example, Group, Sampling
from groupwise.rollout.agent_rollouts import (
    AgentRollouts,
    AgentRun,
    CallQueue,
    generate,
    rollout_of,
    run_concurrently,
)
from groupwise.rollout.collect import collect
from groupwise.rollout.multi_turn import ModelCall, joined
from groupwise.tasks import isolated
from groupwise.tasks.user_code import code_of

NOTHING = Example({"n": 1})


def sampled(*tokens: int, finish: str = "end") -> Completion:
    numbers = tuple(-0.1 * token for token in tokens)
    return Completion(tokens=tokens, logprobs=numbers, entropies=(1.0,) * len(tokens), finish=finish)  # type: ignore[arg-type]


def call(prompt: tuple[int, ...], *completions: Completion) -> ModelCall:
    count = len(completions)
    return ModelCall(prompt=prompt, completions=completions, texts=("x",) * count, tool_calls=((),) * count)


def sequences(*calls: ModelCall) -> list[tuple[list[int], list[int]]]:
    """Each sequence's tokens, and those of them that are trained."""
    trajectories = joined(calls, prompt="?", member=0, results={})
    return [
        (
            [*one.prompt, *one.tokens],
            [token for token, trained in zip(one.tokens, one.trained, strict=True) if trained],
        )
        for one in trajectories
    ]


def test_a_call_that_extends_the_last_one_continues_its_sequence():
    first, second = call((1, 2), sampled(3, 9)), call((1, 2, 3, 9, 4), sampled(5, 9))
    assert sequences(first, second) == [([1, 2, 3, 9, 4, 5, 9], [3, 9, 5, 9])]


def test_a_call_that_changes_what_was_sampled_starts_a_sequence():
    first, second = call((1, 2), sampled(3, 9)), call((1, 2, 7, 9, 4), sampled(5, 9))
    assert sequences(first, second) == [([1, 2, 3, 9], [3, 9]), ([1, 2, 7, 9, 4, 5, 9], [5, 9])]


def test_of_several_calls_that_extend_one_the_first_continues_it_and_each_token_is_trained_once():
    start, one = call((1,), sampled(2)), call((1, 2, 3), sampled(4))
    other, both = call((1, 2, 5), sampled(6)), call((1,), sampled(7), sampled(8))
    assert sequences(start, one, other, both) == [
        ([1, 2, 3, 4], [2, 4]),
        ([1, 2, 5, 6], [6]),
        ([1, 7], [7]),
        ([1, 8], [8]),
    ]


class Codec:
    end_tokens = frozenset({9})


def rolled(*calls: ModelCall, member: int = 0, **about: object) -> gw.Rollout:
    run = AgentRun(number=0, example=NOTHING, member=member, seed_parts=())
    run.calls += calls
    run.answer, run.error = about.get("answer"), about.get("error")  # type: ignore[assignment]
    return rollout_of(run, Codec())


def test_all_sequences_of_a_rollout_have_its_advantage_and_it_counts_once():
    branched = rolled(call((1, 2), sampled(3, 9)), call((5,), sampled(6, 7, 9))).scored(advantage=0.5)
    plain = rolled(call((1, 2), sampled(4, 9)), member=1).scored(advantage=-0.5)
    groups = [Group(example=NOTHING, rollouts=(branched, plain))]
    assert batch_size(groups, mask_truncated=False) == (2, 7)
    main, branch, other = to_samples(groups, mask_truncated=False, keep_zero=False)
    assert (main.prompt, branch.prompt, other.prompt) == (0, 1, 0)
    assert branch.advantages == (0.0, 0.5, 0.5, 0.5)
    assert [sample.whole_length for sample in (main, branch, other)] == [5, 5, 2]
    lengths = [[sample.length for sample in (main, branch, other)]]
    wholes = [[sample.whole_length for sample in (main, branch, other)]]
    (weights,) = token_weights("grpo", lengths, sequences=2, tokens=7, max_tokens=8, rollouts=wholes)
    # Two tokens of the first sequence and three of the second weigh as much as the other rollout.
    assert weights == pytest.approx([0.1, 0.1, 0.25])
    assert 2 * weights[0] + 3 * weights[1] == pytest.approx(2 * weights[2])


def test_advantages_of_tokens_reach_the_branches():
    branched = rolled(call((1, 2), sampled(3, 9)), call((5,), sampled(6, 9)))
    assert branched.turn_lengths == [2, 2]
    judged = branched.scored(advantage=0.25, token_advantages=(0.1, 0.2, 0.3, 0.4))
    main, branch = to_samples(
        [Group(example=NOTHING, rollouts=(judged,))], mask_truncated=False, keep_zero=False
    )
    assert main.advantages == (0.0, 0.0, 0.1, 0.2)
    assert branch.advantages == (0.0, 0.3, 0.4)


def test_the_answer_is_what_the_agent_returned_else_the_last_turn():
    assert rolled(call((1,), sampled(9)), answer="42").text == "42"
    structured = rolled(call((1,), sampled(9)), answer={"total": 3})
    assert (structured.text, structured.state) == ('{"total": 3}', {"total": 3})
    assert rolled(call((1,), sampled(9))).text == "x"


def test_an_agent_that_calls_nothing_is_a_failed_rollout_with_a_reason():
    silent = rolled(answer="42")
    assert silent.error == ("agent: it made no model call; pass it base_url and api_key, and call the policy")
    assert (silent.length, silent.tokens) == (0, ())
    assert rolled(error="agent: it broke").error == "agent: it broke"


def results(agent: object, count: int = 3, *, concurrency: int = 8, seconds: float = 5.0) -> dict[int, dict]:
    rollouts = [(number, Example({"n": number}), "url", f"key {number}") for number in range(count)]
    ran = run_concurrently(agent, rollouts, concurrency=concurrency, seconds=seconds)  # type: ignore[arg-type]
    return {result.pop("number"): result for result in ran}


def test_programs_that_crash_exit_or_hang_fail_alone():
    held = threading.Event()

    def agent(example, base_url, api_key):
        if example["n"] == 0:
            raise ValueError("a bug")
        if example["n"] == 1:
            sys.exit(3)
        if example["n"] == 2:
            held.wait(20)
        return f"{example['n']} {base_url} {api_key}"

    ran = results(agent, 4, seconds=0.5)
    held.set()
    assert "ValueError: a bug (test_agent_rollouts.py" in ran[0]["error"]
    assert "SystemExit" in ran[1]["error"]
    assert ran[2] == {"error": "took longer than 0.5 s", "late": True}
    assert ran[3] == {"answer": "3 url key 3"}


def test_coroutines_run_at_the_same_time_and_are_cancelled_when_late():
    cancelled = []

    async def agent(example, base_url, api_key):
        try:
            await asyncio.sleep(20 if example["n"] == 0 else 0.01)
        except asyncio.CancelledError:
            cancelled.append(example["n"])
            raise
        return example["n"]

    ran = results(agent, 3, seconds=0.4)
    assert ran[0]["error"] == "took longer than 0.4 s"
    assert [ran[1], ran[2]] == [{"answer": 1}, {"answer": 2}]
    for _ in range(100):
        if cancelled:
            break
        time.sleep(0.02)
    assert cancelled == [0]


def test_at_most_so_many_programs_run_at_once():
    running, most = set(), []

    def agent(example, base_url, api_key):
        running.add(example["n"])
        most.append(len(running))
        time.sleep(0.02)
        running.discard(example["n"])

    results(agent, 6, concurrency=2)
    assert max(most) <= 2


def test_a_command_reads_the_example_and_its_output_is_the_answer(tmp_path):
    program = tmp_path / "agent.py"
    program.write_text(
        "import sys\nfrom os import environ\n"
        "print(sys.stdin.read(), environ['OPENAI_BASE_URL'], environ['OPENAI_API_KEY'])\n"
    )
    variables = {"OPENAI_BASE_URL": "u", "OPENAI_API_KEY": "k"}
    assert Command(f"python {program}").run('{"n": 1}', variables=variables, seconds=20) == '{"n": 1} u k'


def test_a_command_that_fails_or_hangs_says_why_and_leaves_no_process():
    with pytest.raises(RolloutError, match="exited with status 3: no luck"):
        Command("sh -c 'echo no luck >&2; exit 3'").run("", variables={}, seconds=20)
    with pytest.raises(RolloutError, match="cannot run 'no-such-program'"):
        Command("no-such-program").run("", variables={}, seconds=20)
    command = Command("sh -c 'sleep 30 & echo $!; sleep 30'")
    with pytest.raises(RolloutError, match=r"took longer than 0.2 s"):
        command.run("", variables={}, seconds=0.2)
    assert command.running == set()


class Lengths:
    """An engine that samples the length of each prompt, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, ...]]] = []

    def generate(self, requests, sampling):
        self.batches.append([request.prompt for request in requests])
        return [[sampled(len(request.prompt), 9) for _ in request.seeds] for request in requests]


def queue_of(count: int, *, overlap: bool, **settings: int) -> tuple[list[AgentRun], CallQueue]:
    runs = [AgentRun(number=n, example=NOTHING, member=n, seed_parts=(n,)) for n in range(count)]
    config = AgentConfig(**settings)  # type: ignore[arg-type]
    return runs, CallQueue(runs, sampling=Sampling(max_tokens=4), config=config, overlap=overlap)


def test_without_overlap_a_batch_waits_for_all_running_agents_and_is_sorted():
    runs, queue = queue_of(3, overlap=False)
    engine, sampling = Lengths(), Sampling(max_tokens=4)

    def work() -> None:
        late = queue.submit(runs[2], (1, 2, 3), sampling, count=1, seed=None)
        early = queue.submit(runs[0], (1,), sampling, count=1, seed=None)
        time.sleep(0.05)
        assert not early.future.done()
        queue.end(runs[1])
        assert late.future.result(5)[0].tokens == (3, 9)
        queue.end(runs[0])
        queue.end(runs[2])

    thread = threading.Thread(target=work)
    thread.start()
    for batch in queue.batches():
        generate(engine, batch)
    thread.join()
    assert engine.batches == [[(1,), (1, 2, 3)]]


def test_with_overlap_a_call_is_generated_while_another_agent_computes():
    runs, queue = queue_of(2, overlap=True)
    waiting = queue.submit(runs[0], (1,), Sampling(max_tokens=4), count=1, seed=None)
    (batch,) = [next(queue.batches())]
    assert batch == [waiting]


def test_noise_depends_on_the_rollout_and_the_prompt_not_on_the_order_of_calls():
    def seeds(order):
        runs, queue = queue_of(2, overlap=True)
        calls = {
            (run, prompt): queue.submit(runs[run], prompt, Sampling(), count=2, seed=None)
            for run, prompt in order
        }
        return {key: one.request.seeds for key, one in calls.items()}

    order = [(0, (1,)), (0, (2,)), (1, (1,))]
    assert seeds(order) == seeds(order[::-1])
    assert len({seed for each in seeds(order).values() for seed in each}) == 6
    runs, queue = queue_of(1, overlap=True)
    again = [queue.submit(runs[0], (1,), Sampling(), count=1, seed=None).request.seeds for _ in range(2)]
    assert again[0] != again[1]


def test_calls_beyond_the_limit_and_after_the_end_are_refused():
    runs, queue = queue_of(1, overlap=True, max_calls=1)
    waiting = queue.submit(runs[0], (1,), Sampling(), count=1, seed=None)
    with pytest.raises(RolloutError, match=r"has made 1 model calls, the limit of agent\.max_calls"):
        queue.submit(runs[0], (2,), Sampling(), count=1, seed=None)
    queue.end(runs[0], error="agent: late")
    with pytest.raises(RolloutError, match="this rollout has ended"):
        waiting.future.result(1)
    assert queue.run_of(runs[0].key) is None
    assert list(queue.batches()) == []


def batch_errors(task: gw.Task, *, seconds: float = 5.0) -> list[str | None]:
    """Why each rollout of a batch of three examples failed; the agents reach no endpoint."""
    rollouts = AgentRollouts(
        task.agent, AgentConfig(seconds=seconds), lambda calls, codec: nullcontext("url")
    )  # type: ignore[arg-type]
    groups = collect(
        [Example({"n": n}) for n in range(3)],
        ask=task.ask,
        codec=Codec(),  # type: ignore[arg-type]
        engine=Lengths(),
        sampling=Sampling(),
        group_size=1,
        seed_parts=(0,),
        tools=rollouts,
    )
    return [rollout.error for group in groups for rollout in group.rollouts]


def test_an_agent_that_ends_or_blocks_its_worker_does_not_end_the_run(tmp_path):
    marks = [tmp_path / name for name in ("exit", "block")]

    def agent(example, base_url, api_key):
        if marks[0].exists():
            marks[0].unlink()
            os._exit(1)
        if marks[1].exists() and example["n"] == 1:
            marks[1].unlink()
            time.sleep(60)
        return str(os.getpid())

    task = gw.Task(name="own", examples=[{"n": 1}], rewards={"r": lambda rollout, example: 1.0}, agent=agent)
    silent = "agent: it made no model call; pass it base_url and api_key, and call the policy"
    with isolated(task) as moved:
        marks[0].touch()
        lost = batch_errors(moved)
        assert any("terminated its worker process" in str(error) for error in lost)
        assert batch_errors(moved) == [silent] * 3
        marks[1].touch()
        assert batch_errors(moved, seconds=1.0) == [silent, "agent: took longer than 1 s", silent]
        assert batch_errors(moved) == [silent] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"agent": 3}, "agent must be a command line, or a function of"),
        ({"agent": " "}, "got an empty string"),
        ({"agent": lambda example: ""}, "too many positional arguments"),
        ({"agent": "run", "prompt": str}, "has an agent, which writes the prompts; leave out `prompt`"),
        ({"agent": "run", "state": dict}, "has an agent, which owns its loop; leave out `state`"),
    ],
)
def test_a_wrong_agent_is_refused_when_the_task_is_made(wrong, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        gw.Task(name="own", examples=[{"n": 1}], rewards={"r": lambda rollout, example: 1.0}, **wrong)


def test_the_program_of_a_command_is_part_of_what_a_resumed_run_must_not_change(tmp_path):
    program = tmp_path / "agent.py"
    program.write_text("print(1)\n")
    rewards = {"r": lambda rollout, example: 1.0}
    task = gw.Task(name="own", examples=[{"n": 1}], rewards=rewards, agent=f"python {program}")
    before = code_of(task)["agent"]
    program.write_text("print(2)\n")
    assert code_of(task)["agent"] != before
    assert os.path.exists(program)
