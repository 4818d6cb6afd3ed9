"""The agent: what it does is what `train` does, and clones share one model."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import groupwise as gw
from groupwise import cli
from groupwise.errors import ConfigError
from groupwise.evaluate.target import find_target
from groupwise.learner.learner import Learner
from groupwise.model.resolve import TINY_FOLDER
from groupwise.rollout.tools import tool_of
from tests.support.echo_task import ECHO_TASK

SMALL: dict[str, Any] = {
    "model": {"name": "tiny", "device": "cpu"},
    "max_tokens": 4,
    "group_size": 4,
    "temperature": 1.5,
    "learning_rate": 1e-3,
}


def luck(answers: Any) -> torch.Tensor:
    return torch.tensor([[float(sum(map(ord, r.text)) % 3) for r in group] for group in answers])


def weights(agent: gw.Agent) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in agent.weights.items()}


def same(one: gw.Agent, two: gw.Agent) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(two).values(), strict=True))


def loop(agent: gw.Agent, steps: int, *, seed: int = 0) -> list[tuple[float, float]]:
    env = gw.PromptEnv(ECHO_TASK, batch_size=3)
    prompts, _ = env.reset(seed=seed)
    found = []
    for _ in range(steps):
        answers = agent.get_action(prompts)
        prompts, *_ = env.step(answers)
        found.append(agent.learn((answers, luck(answers))))
    return found


@pytest.mark.parametrize("rank", [0, 4])
def test_an_agent_learns_and_a_saved_one_goes_on_bit_for_bit(tmp_path, rank):
    agent = gw.Agent(lora_r=rank, beta=0.1, **SMALL)
    before = weights(agent)
    loop(agent, 2)
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(agent).items())
    again = gw.Agent.load(agent.save(tmp_path / "agent"))
    assert same(agent, again)
    assert loop(agent, 2, seed=1) == loop(again, 2, seed=1)
    assert same(agent, again)


def test_the_kl_divergence_is_from_the_reference_that_was_set():
    agent = gw.Agent(lora_r=4, beta=0.1, optim={"minibatches": 1}, **SMALL)
    loop(agent, 3)
    assert loop(agent, 1)[0][1] > 1e-6
    agent.set_reference_policy()
    assert loop(agent, 1)[0][1] == pytest.approx(0.0, abs=1e-9)
    assert loop(agent, 2)[1][1] > 0


def test_a_clone_starts_equal_and_goes_its_own_way_on_the_same_base():
    agent = gw.Agent(lora_r=4, **SMALL)
    loop(agent, 2)
    clone = agent.clone()
    assert clone.base is agent.base
    assert same(agent, clone)
    kept = weights(agent)
    loop(clone, 2, seed=1)
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights(agent).items())
    assert not same(agent, clone)
    loop(agent, 2, seed=1)
    assert same(agent, clone)  # the optimizer's state was cloned as well


def test_when_not_training_there_is_one_greedy_answer_and_no_noise_is_used_up():
    agent = gw.Agent(lora_r=4, **SMALL)
    prompts = ["1 + 1", "2 + 2"]
    answers = agent.get_action(prompts, training=False)
    assert [len(group) for group in answers] == [1, 1]
    assert agent.get_action(prompts, training=False) == answers
    assert [len(group) for group in agent.get_action(prompts)] == [4, 4]
    assert agent.actions == 1


def test_testing_asks_every_held_out_prompt_once_and_leaves_the_environment_alone():
    env = gw.PromptEnv(ECHO_TASK, batch_size=3)
    prompts, _ = env.reset(seed=0)
    agent = gw.Agent(lora_r=4, **SMALL)
    value = agent.test(env)
    assert agent.fitness == [value]
    assert env.step([[prompt.removeprefix("Say ")] for prompt in prompts])[1].min() >= 1.0


def test_what_could_not_be_scored_is_not_trained_on():
    agent = gw.Agent(lora_r=4, **SMALL)
    before = weights(agent)
    answers = agent.get_action(["1 + 1"])
    assert agent.learn((answers, torch.full((1, 4), float("nan")))) == (0.0, 0.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(agent).items())


def test_a_saved_adapter_loads_with_peft_alone(tmp_path):
    agent = gw.Agent(lora_r=4, **SMALL)
    loop(agent, 2)
    folder = agent.save(tmp_path / "agent")
    base = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, folder)
    ours = agent.weights
    theirs = {name: p for name, p in loaded.named_parameters() if "lora" in name}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_saved_agent_is_the_adapter_or_model_that_it_holds(tmp_path, rank, capsys):
    folder = gw.Agent(lora_r=rank, **SMALL).save(tmp_path / "agent")
    found = find_target(str(folder))
    assert (found.rank, found.run, found.settings) == (rank, None, folder / "config.yaml")
    assert found.trained == (folder if rank else None)
    assert cli.main(["chat", str(folder), "--prompt", "1 + 1", "--max-tokens", "2"]) == 0
    measured = ["--examples", "2", "--samples", "1", "--json"]
    assert cli.main(["eval", str(folder), *measured]) == 0
    assert cli.main(["merge", str(folder), "--output-path", str(tmp_path / "merged")]) == (0 if rank else 2)
    assert "no checkpoint" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "sft", "evolve"])
def test_no_run_goes_on_in_the_folder_of_an_agent(tmp_path, command, capsys):
    (tmp_path / "agent.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("run: {seed: 1}")
    assert cli.main([command, "--resume", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is not a run but a saved agent" in said
    assert said.count("\n") == 1
    with pytest.raises(gw.ConfigError, match="saved agent"):
        gw.train(ECHO_TASK, resume=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.json", "config.yaml"]


def test_what_an_earlier_save_left_does_not_come_back(tmp_path):
    settings = SMALL | {"lora_r": 2, "beta": 0.1, "optim": {"minibatches": 1}}
    first, second = gw.Agent(**settings), gw.Agent(**settings)
    loop(first, 2)
    first.set_reference_policy()
    first.save(tmp_path / "agent")
    second.save(tmp_path / "agent")
    # The second agent is as far from the base model as the first step finds it, which is not at all.
    assert loop(gw.Agent.load(tmp_path / "agent"), 1)[0][1] == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(gw.ConfigError, match="contains an agent of another kind"):
        gw.Agent(**SMALL | {"lora_r": 0}).save(tmp_path / "agent")


def test_an_agent_takes_one_reward_an_answer():
    with pytest.raises(gw.ConfigError, match="one reward per answer"):
        gw.Agent(advantage="gdpo", **SMALL)
    with pytest.raises(gw.ConfigError, match="combine and filter rewards in the environment"):
        gw.Agent(**SMALL, **{"algo.mean_filter": True})
    with pytest.raises(gw.ConfigError, match=r"engine\.kind=own"):
        gw.Agent(**SMALL, **{"engine.kind": "vllm"})


def test_an_agent_that_teaches_itself_must_know_which_rewards_are_right():
    with pytest.raises(gw.ConfigError, match=r"set task\.correct_at to the reward of a right answer"):
        gw.Agent(**SMALL, **{"algo.teacher": "self"})
    for least, taught in ((0.5, True), (2.0, False)):
        agent = gw.Agent(**SMALL, **{"algo.teacher": "self", "task.correct_at": least})
        agent.learn((agent.get_action(["1 + 1 ="]), [[0.0, 1.0, 0.0, 0.0]]))
        assert (agent._member.learner.report()["policy/taught"] > 0) == taught


def test_the_example_loop_of_twenty_lines_runs(tmp_path, monkeypatch, capsys):
    path = Path(__file__).parents[2] / "examples" / "custom_loop.py"
    spec = importlib.util.spec_from_file_location("custom_loop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gw, "PromptEnv", partial(gw.PromptEnv, held_out=4))
    agent = module.main(2, 2)
    assert agent.steps == 2
    assert (tmp_path / "agent" / "model.safetensors").is_file()
    said = capsys.readouterr().out
    assert "before: mean reward" in said
    assert "step 2: reward" in said


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


class Countdown:
    """Counts its turns and ends after the second."""

    def reset(self, example: gw.Example) -> str:
        self.turns = 0
        return f"Say {example['n']}"

    def reply(self, text: str) -> gw.Reply:
        self.turns += 1
        return gw.Reply("Again.", reward=1.0, done=self.turns == 2)


TURNS: dict[str, gw.Task] = {
    "tools": gw.Task(
        name="tools",
        examples=[{"n": n} for n in range(20)],
        prompt=lambda example: f"Double {example['n']}",
        rewards={"calls": lambda rollout, example: float(len(rollout.text) % 2)},
        tools=[double],
    ),
    "environment": gw.Task(name="game", examples=[{"n": n} for n in range(20)], environment=Countdown),
}


SHORT_TURNS = {
    **SMALL,
    "max_tokens": 8,
    "lora_r": 4,
    "rollout": {"stop": ("0", "1", "2", "+")},
    "tools": {"max_turns": 2, "max_tokens": 64},
}


@pytest.mark.parametrize("kind", TURNS)
def test_the_loop_is_the_same_for_a_task_with_turns(kind):
    env = gw.PromptEnv(TURNS[kind], batch_size=2)
    agent = gw.Agent(**SHORT_TURNS)
    prompts, _ = env.reset(seed=0)
    answers = agent.get_action(prompts)
    rollout = answers[0][0]
    schemas = [tool_of(double).schema] if kind == "tools" else []
    assert rollout.tokens[: rollout.prompt_length] == agent.base.policy.encode(prompts[0], tools=schemas)
    assert all(rollout.turns for group in answers for rollout in group)
    following, rewards, *_ = env.step(answers)
    if kind == "environment":
        # A reward of 1 for each of the turns, of which there are two unless the tokens ran out.
        assert rewards.tolist() == [[float(len(r.turns)) for r in group] for group in answers]
        assert max(len(r.turns) for group in answers for r in group) == 2
        read = [t for t, trained in zip(rollout.tokens, rollout.trained, strict=True) if not trained]
        assert "Again." in agent.base.policy.decode(read)
    before = weights(agent)
    agent.learn((answers, luck(answers)))
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(agent).items())
    assert agent.get_action(following[:1], training=False)[0][0].turns
    assert agent.test(env) == agent.fitness[-1]


def test_answers_without_the_tools_of_the_task_are_refused():
    env = gw.PromptEnv(TURNS["tools"], batch_size=2)
    agent = gw.Agent(**SHORT_TURNS)
    prompts, _ = env.reset(seed=0)
    for answers in ([["2"], ["4"]], agent.get_action(list(prompts))):
        with pytest.raises(ConfigError, match="pass it the prompts of the environment unchanged"):
            env.step(answers)
    assert env.step(agent.get_action(prompts))[1].shape == (2, 4)


def test_an_agent_learns_from_a_teacher_and_adapts_its_entropy(tmp_path, monkeypatch):
    reports: list[dict[str, float]] = []
    train_on = Learner.train_on

    def reported(self: Learner, groups: Any) -> dict[str, float]:
        reports.append(train_on(self, groups))
        return reports[-1]

    monkeypatch.setattr(Learner, "train_on", reported)
    agent = gw.Agent(lora_r=4, algo={"teacher": "tiny", "target_entropy": 9.0, "entropy_step": 0.1}, **SMALL)
    loop(agent, 2)
    again = gw.Agent.load(agent.save(tmp_path / "agent"))
    assert loop(agent, 1, seed=1) == loop(again, 1, seed=1)
    assert same(agent, again)
    # The entropy is below 9 nats, so the bonus grows with every step.
    assert [report["policy/entropy_bonus"] for report in reports] == pytest.approx([0.0, 0.1, 0.2, 0.2])


def test_functions_of_your_own_go_with_a_clone():
    called = {"loss": 0, "advantage": 0, "rule": 0}

    def loss(tokens: Any, settings: Any) -> Any:
        called["loss"] += 1
        return -tokens.logprobs_T * tokens.advantages_T, {}

    def advantage(rollouts: Any) -> list[float]:
        called["advantage"] += 1
        return [rollout.reward - 1 for rollout in rollouts]

    def rule(context: list[int], logits: torch.Tensor) -> torch.Tensor:
        called["rule"] += 1
        return logits

    agent = gw.Agent(lora_r=4, loss=loss, advantage=advantage, logits_processor=rule, **SMALL)
    loop(agent, 1)
    assert all(called.values())
    first = dict(called)
    loop(agent.clone(), 1)
    assert all(called[name] > first[name] for name in called)
    with pytest.raises(ConfigError, match="need the same rollout"):
        gw.Agent(base=agent.base, lora_r=4, **SMALL)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"algo": {"sft_weight": 0.5}}, "no worked answers to imitate"),
        ({"callbacks": [gw.Callback]}, "call your functions in your loop"),
        ({"engine": {"kind": "vllm", "servers": ["http://127.0.0.1:1"]}}, "set engine.kind=own"),
    ],
)
def test_what_an_agent_cannot_do_is_refused_in_a_sentence(settings, part):
    with pytest.raises(ConfigError, match=part):
        gw.Agent(**SMALL, **settings)
