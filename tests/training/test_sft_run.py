"""Warm starts: what is imitated, token by token, and that a run of them is a run like any other."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.commands.sft import sft_config
from groupwise.config import Config, read_config
from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.learner.sft_learner import SFTLearner
from groupwise.model.policy import Policy
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.extraction import evaluate_expression, final_answer, is_well_formed
from groupwise.rollout.tools import tool_of
from groupwise.tasks.builtin.countdown import countdown
from groupwise.tasks.registry import load_task
from groupwise.tasks.sft_data import (
    ROLLOUT_COLUMNS,
    Demonstration,
    SampledTokens,
    SFTPlan,
    best_answers,
    fault_in,
    held_out_of,
    of_rollout,
    of_row,
    plan_warm_start,
    turns_of,
)
from groupwise.tracking.rollout_files import write_rollouts
from groupwise.tracking.run_folder import RunFolder
from groupwise.training.sft_run import encode, to_samples
from tests.support.small_models import policy_of, small_model, tiny_tokenizer
from tests.support.small_runs import KILL, SignalAt, run_artifacts, run_command

SMALL = (
    *("run.save_every=2", "track.trackers=[]", "model.device=cpu", "sft.batch=3", "rollout.max_tokens=6"),
    *("evaluate.every=3", "evaluate.samples=2", "task.held_out=4"),
)


def text(policy: Policy, tokens: tuple[int, ...]) -> str:
    return str(policy.tokenizer.decode(list(tokens)))


def parts(policy: Policy, demonstration: Demonstration) -> tuple[str, list[str]]:
    """Return the whole text, and each segment of it that is trained."""
    tokens, trained = encode(policy, demonstration)
    segments: list[list[int]] = []
    for index, (token, imitated) in enumerate(zip(tokens, trained, strict=True)):
        if imitated and not (index and trained[index - 1]):
            segments.append([])
        if imitated:
            segments[-1].append(token)
    return text(policy, tokens), [text(policy, tuple(segment)) for segment in segments]


def test_of_prompt_and_completion_the_completion_and_its_end_are_trained(small_policy):
    whole, trained = parts(small_policy, Demonstration(prompt="1 + 1", completion="= 2"))
    assert whole == "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n= 2<|im_end|>"
    assert trained == ["= 2<|im_end|>"]


def test_a_completion_continues_an_answer_that_the_prompt_began(small_policy):
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so <think>"}]
    whole, trained = parts(small_policy, Demonstration(prompt=prompt, completion="b"))
    assert whole.endswith("<|im_start|>assistant\nso <think>b<|im_end|>")
    assert trained == ["b<|im_end|>"]


def test_of_a_chat_every_answer_is_trained_and_nothing_else(small_policy):
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": f"{n}{role}"} for n, role in enumerate(roles)]
    whole, trained = parts(small_policy, of_row(Example({"messages": messages})))
    assert whole == tiny_tokenizer().apply_chat_template(messages, tokenize=False).rstrip("\n")
    assert trained == ["2assistant<|im_end|>", "4assistant<|im_end|>"]


def test_a_demonstration_with_tools_is_laid_out_as_a_rollout_is(small_policy):
    tools = [{"type": "function", "function": {"name": "look", "description": "?", "parameters": {}}}]
    asked = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Hm"}]
    turns = ["<think> a</think> b", "<think> c</think> d"]
    rows = [
        *asked,
        {"role": "assistant", "content": turns[0]},
        {"role": "tool", "name": "look", "content": "e"},
        {"role": "assistant", "content": turns[1]},
    ]
    tokens, trained = encode(small_policy, of_row(Example({"messages": rows, "tools": tools})))
    end = small_policy.tokenizer.eos_token_id
    wrote = [(*small_policy.encode_text(turn, special=False), end) for turn in turns]
    prompt = small_policy.encode(asked, tools=tools)
    read = small_policy.encode_results(["e"], prefill="", ended=True)
    assert tokens == (*prompt, *wrote[0], *read, *wrote[1])
    assert [token for token, own in zip(tokens, trained, strict=True) if own] == [*wrote[0], *wrote[1]]


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"query": "x"}'}}
CALLED = '<tool_call>\n{"name": "look", "arguments": {"query": "x"}}\n</tool_call>'


def test_a_worked_answer_with_calls_is_laid_out_as_a_rollout_that_begins_every_turn(small_policy):
    prompt = [{"role": "user", "content": "Hm"}, {"role": "assistant", "content": "<think>"}]
    answer = [
        {"role": "assistant", "content": " a</think>", "tool_calls": [CALL]},
        {"role": "tool", "content": "e"},
        {"role": "assistant", "content": " c</think> d"},
    ]
    turns = turns_of(answer)
    shown = [tool_of(look).schema]
    demonstration = Demonstration(prompt=prompt, completion=turns[-1].text, turns=turns, tools=shown)
    whole, trained = parts(small_policy, demonstration)
    assert trained == [f" a</think>\n{CALLED}<|im_end|>", " c</think> d<|im_end|>"]
    tokens = encode(small_policy, demonstration)[0]
    given = small_policy.encode(prompt, tools=shown)
    assert tokens[: len(given)] == given
    assert '"name": "look", "description": "Look something up."' in whole  # the tools are in the prompt
    assert whole.endswith("<tool_response>\ne\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
                          "<think> c</think> d<|im_end|>")  # fmt: skip


def test_a_worked_conversation_with_an_environment_is_laid_out_as_a_rollout(small_policy):
    answer = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": "b"},
    ]
    turns = turns_of(answer)
    assert [(turn.text, turn.observation) for turn in turns] == [("a", "Again."), ("b", "")]
    demonstration = Demonstration(prompt="Say b", completion="b", turns=turns)
    whole, trained = parts(small_policy, demonstration)
    assert trained == ["a<|im_end|>", "b<|im_end|>"]
    assert whole.endswith(
        "a<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
            "every turn except the last must call a tool or be followed by a user message",
        ),
        ([{"role": "user", "content": "a"}], "must begin with an assistant message"),
        ([{"role": "tool", "content": "a"}], "must begin with an assistant message"),
        ([{"role": "assistant", "content": "", "tool_calls": [CALL]}], "1 tool calls but 0 results"),
        (
            [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}],
            "0 tool calls but 1 results",
        ),
        ([{"role": "assistant", "content": "a"}] * 2, "every turn except the last must call a tool"),
        (
            [{"role": "assistant", "content": CALLED}, {"role": "tool", "content": "b"}],
            "every turn except the last must call a tool",
        ),
    ],
)
def test_a_worked_answer_that_no_rollout_could_be_is_refused(answer, reason):
    with pytest.raises(ConfigError, match=reason):
        turns_of(answer)


def test_calls_in_the_form_of_openai_are_trained_as_text_where_the_template_knows_no_tools(small_policy):
    messages = [
        {"role": "user", "content": "Hm"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "e"},
        {"role": "tool", "tool_call_id": "1", "content": "f"},
        {"role": "assistant", "content": "d"},
    ]
    for row in (messages, [{k: v for k, v in m.items() if v is not None} for m in messages]):
        assert fault_in(Example({"messages": row})) is None
        whole, trained = parts(small_policy, of_row(Example({"messages": row})))
        assert trained == [f"{CALLED}\n{CALLED}<|im_end|>", "d<|im_end|>"]
        assert "<tool_response>\ne\n</tool_response>\n<tool_response>\nf\n</tool_response>" in whole


def test_a_template_that_knows_tools_is_given_the_arguments_of_a_call_as_an_object():
    row = Example({"messages": [
        {"role": "user", "content": "Hm"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "e"},
        {"role": "assistant", "content": "d", "tool_calls": None},
    ]})  # fmt: skip
    completion = of_row(row).completion
    assert isinstance(completion, tuple)
    assert completion[0]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"query": "x"}}
    assert "tool_calls" not in completion[2]


def test_a_task_with_tools_and_without_worked_answers_is_refused(run_with_tools):
    words = [f"{run_with_tools.parent}/task.py"]
    with pytest.raises(ConfigError, match=r"task t has tools but no worked answers.* set worked="):
        plan_warm_start(sft_config(words, config=None, resume=None, given={"max_steps": 1}, flags={}))


def test_an_answer_that_the_template_rewrites_later_is_not_trained(small_policy):
    forgetful = (
        "{% for m in messages %}{{ m['role'] + ':' + (m['content'] if loop.last or m['role'] == 'user' "
        "else '…') + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    tokenizer = small_policy.tokenizer
    before = tokenizer.chat_template
    messages = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"))] * 2
    tokenizer.chat_template = forgetful
    try:
        whole, trained = parts(small_policy, of_row(Example({"messages": messages})))
    finally:
        tokenizer.chat_template = before
    assert whole == "user:a<|im_end|>assistant:…<|im_end|>user:a<|im_end|>assistant:b<|im_end|>"
    assert trained == ["b<|im_end|>"]


def test_sampled_tokens_are_trained_as_they_were_sampled(small_policy):
    prompt = small_policy.encode("x")
    odd = (*prompt, *small_policy.tokenizer("<", add_special_tokens=False)["input_ids"], 5, 6)
    mask = (False,) * len(prompt) + (True,) * (len(odd) - len(prompt))
    sampled = SampledTokens(tokens=odd, trained=mask, prompt_length=len(prompt))
    assert encode(small_policy, Demonstration(prompt="x", completion="y", sampled=sampled)) == (odd, mask)
    other = Demonstration(prompt="another", completion="y", sampled=sampled)
    assert parts(small_policy, other)[1] == ["y<|im_end|>"]  # the ids are of another prompt: encoded anew


TOOL_TASK = """
import groupwise as gw

def look(query: str) -> str:
    'Look something up.'
    return query

task = gw.Task(
    name="t", examples=[{"n": n} for n in range(20)], prompt=lambda e: f"{e['n']}",
    rewards={"r": lambda rollout, example: 0.0}, tools=[look],
)
"""


def sampled_with_tools(policy: Policy, prompt: str, tools: Any, *, result: str = "c") -> Rollout:
    """An answer that called a tool, read its result and ended."""
    end = policy.tokenizer.eos_token_id
    given = policy.encode(prompt, tools=tools)
    first, last = ((*policy.encode_text(turn, special=False), end) for turn in ("<think> a</think>", "b"))
    read = policy.encode_results([result], prefill="", ended=True)
    mask = [False] * len(given) + [True] * len(first) + [False] * len(read) + [True] * len(last)
    nothing = (0.0,) * len(mask)
    return replace(
        rollout(prompt, "b", 1.0),
        tokens=(*given, *first, *read, *last),
        trained=tuple(mask),
        logprobs=nothing,
        entropies=nothing,
        prompt_length=len(given),
    )


@pytest.fixture
def run_with_tools(tmp_path) -> Path:
    """The folder of a run whose task has a tool; it has no rollouts yet."""
    (tmp_path / "task.py").write_text(TOOL_TASK)
    run = RunFolder.create(tmp_path, name="tools", task="t", model="m")
    run.config.write_text(f"task: {{name: {tmp_path}/task.py, held_out: 0}}\n")
    return run.path


def test_a_runs_answers_with_tools_are_trained_with_their_calls(small_policy, run_with_tools):
    tools = [tool_of(load_task(TaskConfig(name=f"{run_with_tools.parent}/task.py")).tools[0]).schema]
    answer = sampled_with_tools(small_policy, "3", tools)
    path = RunFolder.open(run_with_tools).rollouts_at(1)
    write_rollouts(path, 1, [Group(example=Example({"n": 3}), rollouts=(answer,))])
    given = {"from_run": str(run_with_tools), "epochs": 1}
    plan = plan_warm_start(sft_config(["task.held_out=0"], config=None, resume=None, given=given, flags={}))
    (demonstration,), _ = plan.demonstrations.take(0, 1)
    assert encode(small_policy, demonstration) == (answer.tokens, answer.trained)


def test_answers_that_end_alike_after_other_calls_are_not_one(small_policy, run_with_tools):
    ways = [sampled_with_tools(small_policy, "3", [tool_of(look).schema], result=r) for r in "cdc"]
    path = RunFolder.open(run_with_tools).rollouts_at(1)
    write_rollouts(path, 1, [Group(example=Example({"n": 3}), rollouts=tuple(ways))])
    config = read_config(overrides=[f"sft.from_run={run_with_tools}"])
    found = best_answers(config, weights={})
    assert [tuple(row["tokens"]) for row in found] == [ways[0].tokens, ways[1].tokens]


def test_answers_with_tools_after_another_prompt_are_refused(small_policy):
    answer = sampled_with_tools(small_policy, "3", [tool_of(look).schema])
    columns = {name: getattr(answer, name) for name in ROLLOUT_COLUMNS}
    with pytest.raises(ConfigError, match="with the run's own model and task"):
        encode(small_policy, of_rollout(Example(columns)))


def look(query: str) -> str:
    """Look something up."""
    return query


def test_equal_prompts_are_shared_and_long_rows_left_out(small_policy):
    rows = [("a", "1"), ("b", "2"), ("a", "3"), ("a", "4" * 50)]
    samples = to_samples(small_policy, [Demonstration(prompt=p, completion=c) for p, c in rows], longest=40)
    assert [sample.group for sample in samples] == [0, 1, 0]


def test_the_held_out_loss_changes_nothing(small_policy):
    imitator = SFTLearner(small_policy, optim=Config().resolve().optim, max_steps=1)
    samples = to_samples(small_policy, [Demonstration(prompt="a", completion="b")], longest=40)
    before = imitator.loss(samples)
    assert imitator.loss(samples) == before
    assert imitator.updates == 0
    assert all(p.grad is None for p in small_policy.trainable().values())
    assert imitator.update(samples)["sft/loss"] == pytest.approx(before)


def test_worked_puzzles_are_well_formed_and_say_what_is_true():
    task = countdown(numbers=3, largest=50)
    assert task.worked is not None
    rng = random.Random(0)
    right = 0
    for index in range(200):
        example = task.examples.train(index, seed=0)
        answer = task.worked(example, rng)
        if answer is None:
            continue
        assert is_well_formed(answer)
        for line in answer.partition("</think>")[0].replace("\n", ",").split(","):
            left, _, result = line.partition("=")
            assert evaluate_expression(left).value == int(result)
        found = evaluate_expression(final_answer(answer))
        assert list(found.numbers) == sorted(example["numbers"])
        right += found.value == example["target"]
    assert 60 < right < 170  # with four tries of insight 0.3, about half


def rollout(prompt: str, answer: str, reward: float, **settings: Any) -> Rollout:
    nothing = (0.0,) * 3
    made = Rollout(
        prompt=prompt,
        text=answer,
        tokens=(5, 6, 7),
        trained=(False, True, True),
        logprobs=nothing,
        entropies=nothing,
        prompt_length=1,
        finish="end",
        reward=reward,
    )
    return replace(made, **settings)


@pytest.fixture
def finished(tmp_path) -> Path:
    """The folder of a run with two steps of answers."""
    run = RunFolder.create(tmp_path, name="done", task="t", model="m")
    run.config.write_text("task: {name: countdown}\n")
    early = (rollout("p", "good early", 2.0), rollout("p", "bad", 0.0), rollout("p", "good", 2.0))
    late = (
        *(rollout("p", "good", 2.0), rollout("p", "cut off", 2.0, finish="length")),
        *(rollout("p", "broken", 2.0, error="no"), rollout("p", "good late", 2.0)),
    )
    other = (rollout("q", "fair", 1.0),)
    for step, groups in ((1, (early,)), (2, (late, other))):
        records = [Group(example=Example({"n": 1}), rollouts=rollouts) for rollouts in groups]
        write_rollouts(run.rollouts_at(step), step, records)
    return run.path


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), ["good", "good late", "good early"]),  # the highest reward; later before earlier, none twice
        (("sft.per_prompt=1",), ["good"]),
        (("sft.min_reward=1",), ["good", "good late", "good early", "fair"]),
    ],
)
def test_a_runs_best_answers_are_chosen(finished, settings, expected):
    config = read_config(overrides=[f"sft.from_run={finished}", *settings])
    assert [row["text"] for row in best_answers(config, weights={})] == expected


@pytest.mark.parametrize(
    ("words", "settings", "expected"),
    [
        ((), None, "tiny-search"),
        (("model.name=tiny",), None, "tiny"),
        ((), "model: {device: cpu}", "tiny-search"),
        ((), "model: {name: tiny}", "tiny"),
    ],
)
def test_a_runs_answers_are_imitated_by_its_model_unless_another_is_named(
    finished, tmp_path, words, settings, expected
):
    (finished / "config.yaml").write_text("task: {name: countdown}\nmodel: {name: tiny-search}\n")
    config = None
    if settings is not None:
        config = tmp_path / "settings.yaml"
        config.write_text(settings)
    given = {"from_run": str(finished), "epochs": 1}
    assert sft_config(words, config=config, resume=None, given=given, flags={}).model.name == expected


def test_rewards_that_were_combined_within_their_groups_are_added_up_to_find_the_best(finished):
    run = RunFolder.open(finished)
    parts = {"a": {"right": 1.0, "form": 0.5}, "b": {"right": 1.0, "form": 0.0}}
    combined = {"a": 0.1, "b": 7.0}
    rollouts = tuple(replace(rollout("p", text, combined[text]), rewards=parts[text]) for text in parts)
    write_rollouts(run.rollouts_at(2), 2, [Group(example=Example({"n": 1}), rollouts=rollouts)])
    run.rollouts_at(1).unlink()
    config = read_config(overrides=[f"sft.from_run={finished}"])
    assert [row["text"] for row in best_answers(config, weights={"form": 2.0})] == ["b"]
    (finished / "config.yaml").write_text("algo: {combine: pca}")
    assert [row["text"] for row in best_answers(config, weights={"form": 2.0})] == ["a"]


GAME = """
import groupwise as gw

class Hidden:
    def reset(self, example):
        return "OPENING".format(**example)

    def reply(self, text):
        return None

task = gw.Task(name="hidden", examples=ROWS, environment=Hidden)
"""


def game_file(folder: Path, rows: list[dict[str, Any]], *, opening: str = "p") -> Path:
    path = folder / "game.py"
    path.write_text(GAME.replace("ROWS", repr(rows)).replace("OPENING", opening))
    return path


def plan_from_games(run: Path, game: Path, recorded: list[dict[str, Any]], *, prompt: str = "p") -> SFTPlan:
    """Plan to imitate the run's answers to these examples, one answer to each."""
    groups = [
        Group(example=Example(row), rollouts=(rollout(prompt.format(**row), f"game {n}", 2.0),))
        for n, row in enumerate(recorded)
    ]
    write_rollouts(RunFolder.open(run).rollouts_at(2), 2, groups)
    RunFolder.open(run).rollouts_at(1).unlink()
    words = (f"task.name={game}", f"sft.from_run={run}", "run.kind=sft", "sft.passes=1", "model.name=tiny")
    return plan_warm_start(read_config(overrides=words))


GAMES = {
    "equal columns": [{"n": n} for n in range(20)],
    "different columns": [{"n": n} if n % 2 else {"n": n, "hint": "h"} for n in range(20)],
    "integers and floats": [{"n": n if n % 2 else n + 0.5} for n in range(20)],
    "nested columns": [{"n": n, "board": {"a": 1} if n % 2 else {"b": [n]}} for n in range(20)],
}


@pytest.mark.parametrize("opening", ["p", "game {n}"], ids=["one opening", "own openings"])
@pytest.mark.parametrize("rows", GAMES.values(), ids=GAMES)
def test_the_best_answers_to_games_are_those_to_each_game_that_is_not_held_out(
    finished, tmp_path, rows, opening
):
    # Openings in the run are those of an earlier version of the game, so that only examples tell it.
    plan = plan_from_games(finished, game_file(tmp_path, rows, opening=opening), rows, prompt="p")
    assert plan.task is not None
    held = {f"game {rows.index(dict(example))}" for example in held_out_of(plan.config, plan.task)}
    shown = {one.completion for one in plan.demonstrations.take(0, plan.demonstrations.split.size or 0)[0]}
    assert len(held) == 4
    assert shown == {f"game {n}" for n in range(20)} - held


def test_games_may_have_numbers_as_keys(finished, tmp_path):
    rows = GAMES["equal columns"]
    game = game_file(tmp_path, rows)
    game.write_text(game.read_text().replace("environment=", "key=lambda row: row['n'], environment="))
    assert plan_from_games(finished, game, rows).demonstrations.split.size == 16


def test_recorded_games_that_the_task_does_not_have_are_refused(finished, tmp_path):
    rows = GAMES["equal columns"]
    with pytest.raises(
        ConfigError, match=r"\{'n': 20\} .* is not in task hidden, .*: use the task and the data"
    ):
        plan_from_games(finished, game_file(tmp_path, rows), [*rows, {"n": 20}])


@pytest.mark.parametrize(
    ("opening", "dropped"), [("p", 0), ("game {n}", 4)], ids=["one opening", "own openings"]
)
def test_chats_with_openings_that_only_held_out_games_have_are_left_out(tmp_path, opening, dropped):
    rows = GAMES["equal columns"]
    game, path = game_file(tmp_path, rows, opening=opening), tmp_path / "rows.jsonl"
    chats = [{"prompt": opening.format(**row), "completion": f"{n}"} for n, row in enumerate(rows)]
    path.write_text("\n".join(map(json.dumps, chats)))
    assert planned(path, str(game)).demonstrations.dropped == dropped


def planned(path, *words):
    return plan_warm_start(sft_config(words, config=None, resume=None, given={"data": str(path)}, flags={}))


@pytest.mark.parametrize(
    "setting",
    ["run.callbacks=stop.py:Stop", "rollout.logits_processor=rule.py:rule", "rollout.grammar=g.lark"],
)
def test_settings_of_sampling_and_of_the_loop_are_refused(tmp_path, setting):
    name = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{name} requires groupwise train; remove it from the settings"):
        planned(tmp_path / "rows.jsonl", setting)


def test_a_run_that_began_with_an_ignored_setting_still_resumes(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{n}", "completion": "x"}) for n in range(5)))
    words = ["rollout.grammar=g.lark"]
    old = sft_config(words, config=None, resume=None, given={"data": str(path)}, flags={})
    assert plan_warm_start(old, resumed=True).demonstrations.split.size == 4  # a fifth is kept back


def test_all_answers_to_a_prompt_are_on_one_side(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}", "completion": f"{k}"} for n in range(50) for k in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = planned(path, "task.held_out=40").demonstrations
    shown = {one.prompt for one in found.take(0, 160)[0]}
    held = [one.prompt for one in found.held_out()]
    assert (len(held), len(set(held)), len(shown), found.dropped) == (40, 10, 40, 0)
    assert not shown & set(held)
    assert planned(path, "task.max_examples=5").demonstrations.split.size == 5


def test_a_chat_asks_the_same_in_whatever_order_its_keys_come(tmp_path):
    task = tmp_path / "task.py"
    task.write_text(
        "import groupwise as gw\ntask = gw.Task(name='t', examples=[{'n': n} for n in range(20)], "
        "prompt=lambda e: [{'role': 'user', 'content': str(e['n'])}], "
        "rewards={'r': lambda rollout, example: 0.0})\n"
    )
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": [{"content": str(n), "role": "user"}], "completion": "x"} for n in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert planned(path, str(task)).demonstrations.dropped == 4


def test_worked_answers_to_what_evaluation_asks_are_not_imitated(tmp_path):
    path = tmp_path / "rows.jsonl"
    twice = [(n, k) for n in range(60) for k in range(2)]
    rows = [{"id": f"{n}-{k}", "question": f"{n} + 1?", "answer": f"{n + 1}"} for n, k in twice]
    path.write_text("\n".join(map(json.dumps, rows)))
    words = ["run.kind=sft", "task.name=gsm8k", f"task.data={path}", "sft.passes=1"]
    plan = plan_warm_start(read_config(overrides=words))
    assert plan.task is not None
    asked = {str(plan.task.ask(example)) for example in held_out_of(plan.config, plan.task)}
    shown = {str(one.prompt) for one in plan.demonstrations.take(0, plan.demonstrations.split.size or 0)[0]}
    assert len(asked) > 10
    assert not asked & shown


def test_a_reward_that_nobody_earned_is_refused(finished):
    config = read_config(overrides=[f"sft.from_run={finished}", "sft.min_reward=3"])
    with pytest.raises(ConfigError, match="the best has 2"):
        best_answers(config, weights={})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "a"}, "prompt and completion, or messages; got"),
        ({"prompt": "a", "completion": 3}, "completion must be a string"),
        ({"prompt": "", "completion": "b"}, "prompt must be a string"),
        ({"messages": [{"role": "user", "content": "a"}]}, "end with an assistant message"),
        ({"messages": "a"}, "a list of messages"),
        (
            {"prompt": "a", "completion": [{"role": "user", "content": "b"}]},
            "completion has no assistant message",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "tool_calls": [{"name": 3}]},
                ]
            },
            "tool_calls must be a list of",
        ),
        ({"prompt": "a", "completion": "b", "tools": "look"}, "tools must be a list"),
        ({"prompt": "a", "completion": "b", "tools": '{"name": "look"}'}, "tools must be a list"),
    ],
)
def test_a_bad_row_is_refused_with_its_number(tmp_path, row, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ({"prompt": "a", "completion": "b"}, row))))
    settings = sft_config([], config=None, resume=None, given={"data": str(path)}, flags={})
    with pytest.raises(ConfigError, match=f"rows.jsonl, row 2: .*{reason}"):
        plan_warm_start(settings)


def test_tools_may_be_written_as_json():
    tools = [{"type": "function", "function": {"name": "look"}}]
    for written in (tools, json.dumps(tools)):
        assert of_row(Example({"prompt": "a", "completion": "b", "tools": written})).tools == tools
    assert of_row(Example({"prompt": "a", "completion": "b", "tools": "[]"})).tools == ()


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "a"}]], ids=["null", "parts"])
def test_a_chat_that_the_template_cannot_write_is_refused_in_a_sentence(small_policy, content):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    with pytest.raises(ConfigError, match="chat template cannot render these messages"):
        encode(small_policy, of_row(Example({"messages": messages})))


def test_a_warm_start_that_fails_at_its_first_rows_leaves_no_folder(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b" * 99}))
    words = ("sft", "--data", str(path), "--max-steps", "1", "--max-length", "9", *SMALL)
    ended = run_command(*words, f"run.output_dir={tmp_path}", "run.name=r")
    assert ended.code == 2
    assert "raise sft.max_length" in ended.err
    assert not (tmp_path / "r").exists()


def test_a_chat_that_cannot_be_written_is_found_before_a_step_comes_to_it(tmp_path):
    chats = [[{"role": "user", "content": str(n)}, {"role": "assistant", "content": "b"}] for n in range(20)]
    chats[7][1]["content"] = [{"type": "text", "text": "c"}]  # type: ignore[assignment]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    words = ("sft", "--data", str(path), "--max-steps", "1", "sft.batch=1", "task.held_out=0", *SMALL)
    ended = run_command(*words, f"run.output_dir={tmp_path}", "run.name=r")
    assert ended.code == 2
    assert "chat template cannot render these messages" in ended.err
    assert "'7'" in ended.err
    assert not (tmp_path / "r").exists()


def test_rows_that_ask_what_evaluation_asks_are_left_out(tmp_path):
    task = tmp_path / "task.py"
    task.write_text(
        "import groupwise as gw\ntask = gw.Task(name='t', examples=[{'n': n} for n in range(20)], "
        "prompt=lambda e: f\"{e['n']}\", rewards={'r': lambda rollout, example: 0.0})\n"
    )
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}", "completion": "x"} for n in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = sft_config([str(task)], config=None, resume=None, given={"data": str(path)}, flags={})
    plan = plan_warm_start(settings)
    assert plan.task is not None
    asked = {plan.task.ask(example) for example in plan.task.split(settings.task, 0).held_out}
    assert plan.demonstrations.dropped == len(asked) == 4
    taken = {demonstration.prompt for demonstration in plan.demonstrations.take(0, 40)[0]}
    assert not taken & asked


def test_epochs_count_passes_over_the_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{n}", "completion": "x"}) for n in range(25)))
    given = {"data": str(path), "epochs": 3, "batch_size": 8}
    plan = plan_warm_start(sft_config([], config=None, resume=None, given=given, flags={}))
    assert plan.demonstrations.split.size == 20  # a fifth is kept back to measure the loss on
    assert plan.config.run.max_steps == 8  # 3 × 20 / 8, rounded up


def test_a_pass_over_few_rows_is_one_small_batch(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{n}", "completion": "x"}) for n in range(5)))
    given = {"data": str(path), "epochs": 2, "batch_size": 32}
    settings = sft_config([], config=None, resume=None, given=given, flags={})
    plan = plan_warm_start(settings)
    assert (plan.config.sft.batch, plan.config.run.max_steps) == (4, 2)  # a fifth is kept back
    assert plan_warm_start(plan.config, resumed=True).config == plan.config
    old = plan_warm_start(settings, resumed=True).config  # begun when batches were filled up
    assert (old.sft.batch, old.run.max_steps) == (32, 1)


@pytest.mark.parametrize("variant", [(), ("lora.r=4", "lora.dropout=0.1")], ids=["full", "lora"])
def test_killed_and_resumed_a_warm_start_gives_the_same_bits(tmp_path, variant):
    words = ["sft", "--task", "countdown", "--max-steps", "4", f"run.output_dir={tmp_path}", *SMALL, *variant]
    assert run_command(*words, "run.name=whole").code == 0
    run = tmp_path / "killed"
    assert (
        run_command(*words, "run.name=killed", signals=[SignalAt("metrics.jsonl", KILL, nth=4)]).code == -KILL
    )
    assert run_command("train", "--resume", str(run)).code == 2  # not a run of that kind
    assert run_command("sft", "--resume", str(run)).code == 0
    assert run_artifacts(run) == run_artifacts(tmp_path / "whole")
    # Step 3 was measured, none did better, and it is kept though only even ones are due.
    assert [path.name for path in sorted(run.glob("checkpoints/*"))] == ["step-000003", "step-000004"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert "sft/held_out_loss" in rows[2]
    assert "eval/greedy" in rows[3]


def test_a_warm_start_on_rows_needs_no_task(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"say {n}", "completion": f"{n}"}) for n in range(10)))
    words = ("sft", "--data", str(path), "--max-steps", "3", f"run.output_dir={tmp_path}", "run.name=r")
    ended = run_command(*words, *SMALL, "optim.learning_rate=0.003")
    assert ended.code == 0, ended.err
    assert f"groupwise train --model {tmp_path}/r/checkpoints/step-000003" in ended.out
    rows = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"]
    # What it wrote is a model like any other.
    assert run_command("eval", str(tmp_path / "r")).code == 2
    again = ("sft", "--data", str(path), "--model", str(tmp_path / "r/checkpoints/step-000003"))
    more = run_command(*again, "--max-steps", "1", f"run.output_dir={tmp_path}", "lora.r=0", *SMALL)
    assert more.code == 0, more.err


def test_the_loss_of_a_warm_start_does_not_depend_on_micro_batches():
    losses = []
    for budget in (1, 10_000):
        policy = policy_of(small_model())
        optim = replace(Config().resolve().optim, micro_batch_tokens=budget)
        imitator = SFTLearner(policy, optim=optim, max_steps=3)
        rows = [Demonstration(prompt=p, completion=c) for p, c in (("a", "bcd"), ("e", "f"), ("a", "g"))]
        samples = to_samples(policy, rows, longest=100)
        losses.append([imitator.update(samples)["sft/loss"] for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
