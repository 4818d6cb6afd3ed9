"""From demonstrations to trained tokens: the answers, each with its end token, and nothing else."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.learner.sft_learner import SFTLearner, masked_sample
from groupwise.model.policy import Policy
from groupwise.model.tokenizer import knows_tools, render
from groupwise.parallel.processes import Processes, joined_processes
from groupwise.records import Group, Rollout, Sample, derive_seed
from groupwise.rollout.multi_turn import prefill_of
from groupwise.tasks import Split, Task, isolated
from groupwise.tasks.sft_data import Demonstration, SFTPlan, held_out_of, of_task, written
from groupwise.tracking.terminal import open_display
from groupwise.tracking.trackers import tracker_names
from groupwise.training.base_run import BaseRun
from groupwise.training.evaluator import Evaluator
from groupwise.training.prompt_selection import PromptLimit
from groupwise.training.resume import RunStart
from groupwise.training.run_end import explain_full_disk
from groupwise.training.step_metrics import peak_memory


def to_samples(policy: Policy, demonstrations: Sequence[Demonstration], *, longest: int) -> list[Sample]:
    """Encode demonstrations, without those of more than `longest` tokens; equal prompts are shared."""
    samples: list[Sample] = []
    groups: dict[tuple[int, ...], int] = {}
    for demonstration in demonstrations:
        tokens, trained = encode(policy, demonstration)
        if len(tokens) > longest or not any(trained):
            continue
        prefix = tokens[: trained.index(True)]
        samples.append(masked_sample(tokens, trained, group=groups.setdefault(prefix, len(groups))))
    return samples


def check_chats(policy: Policy, demonstrations: Iterable[Demonstration]) -> None:
    """Refuse a chat that the template cannot render, before a step would fail on it."""
    for demonstration in demonstrations:
        if isinstance(demonstration.completion, tuple):
            deque(segments(policy, demonstration), maxlen=0)
        elif not isinstance(demonstration.prompt, str) and policy.tokenizer.chat_template is not None:
            render(policy.tokenizer, demonstration.prompt, tools=demonstration.tools)


def encode(policy: Policy, demonstration: Demonstration) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return a demonstration's tokens, and which of them are trained.

    A prompt is encoded as generation encodes it, and each answer apart from what precedes it: the ids
    that are trained are ids that can be sampled.
    """
    if isinstance(demonstration.completion, tuple):
        return joined(policy, list(segments(policy, demonstration)))
    if demonstration.turns:
        return encode_turns(policy, demonstration)
    prompt = policy.encode(demonstration.prompt, tools=demonstration.tools)
    sampled = demonstration.sampled
    if sampled is not None and sampled.tokens[: sampled.prompt_length] == prompt:
        return sampled.tokens, sampled.trained
    if sampled is not None and (demonstration.tools or sampled.read_more):
        # The text is only the last turn: training on it would teach the policy not to call tools.
        raise ConfigError(
            "the run's answers used tools, and its prompts are not those that this model and task give: "
            "imitate them with the run's own model and task"
        )
    answer = (*policy.encode_text(demonstration.completion, special=False), end_token(policy))
    return (*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer)


def encode_turns(policy: Policy, demonstration: Demonstration) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return turns as the tokens of a rollout: those of the policy are trained, those it reads are not."""
    tokens = list(policy.encode(demonstration.prompt, tools=demonstration.tools))
    trained = [False] * len(tokens)
    prefill = prefill_of(demonstration.prompt)
    for turn in demonstration.turns:
        wrote = (*policy.encode_text(turn.text, special=False), end_token(policy))
        results = [call.result for call in turn.calls]
        read = policy.encode_results(results, prefill=prefill, ended=True) if results else ()
        if turn.observation:
            (read,) = policy.encode_all_results(
                [(turn.observation,)], prefill=prefill, ended=True, role="user"
            )
        tokens += (*wrote, *read)
        trained += [True] * len(wrote) + [False] * len(read)
    return tuple(tokens), tuple(trained)


def segments(policy: Policy, demonstration: Demonstration) -> Iterator[tuple[str, bool]]:
    """Yield the chat as text in turns, each with whether the policy writes it (True) or reads it (False).

    A template that writes an answer differently once more messages follow (many drop its thinking) makes
    earlier answers impossible to imitate in one sequence: they are then given, and the last is imitated.
    """
    if policy.tokenizer.chat_template is None:
        raise ConfigError(
            "the model has no chat template: give prompt and completion as text instead of messages"
        )
    assert not isinstance(demonstration.completion, str)
    prompt = demonstration.prompt
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    messages = [*given, *demonstration.completion]
    tokenizer, tools = policy.tokenizer, demonstration.tools
    if not knows_tools(tokenizer):  # such a template would drop the calls
        messages = [{"role": m["role"], "content": written(m)} if "tool_calls" in m else m for m in messages]
    whole = render(tokenizer, messages, tools=tools, add_generation_prompt=False)
    ending = policy.tokenizer.eos_token or ""
    done = 0
    for index in range(len(given), len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], tools=tools)
        after = render(tokenizer, messages[: index + 1], tools=tools, add_generation_prompt=False)
        ends = bool(ending) and after.rfind(ending) >= len(before)
        stop = after.rfind(ending) + len(ending) if ends else len(after)
        fits = len(before) >= done and after.startswith(before) and whole.startswith(after[:stop])
        if fits and (ends or index == len(messages) - 1):
            yield whole[done : len(before)], False
            yield whole[len(before) : stop], True
            done = stop


def joined(policy: Policy, turns: Sequence[tuple[str, bool]]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    tokens: list[int] = []
    trained: list[bool] = []
    for text, imitated in turns:
        ids = policy.encode_text(text, special=False)
        if imitated and (not ids or ids[-1] not in policy.end_tokens):
            ids = (*ids, end_token(policy))
        tokens += ids
        trained += [imitated] * len(ids)
    return tuple(tokens), tuple(trained)


def end_token(policy: Policy) -> int:
    token = policy.tokenizer.eos_token_id
    if token is None:
        raise ConfigError("the model's tokenizer names no end token (eos_token): answers could never end")
    return int(token)


def run_sft(plan: SFTPlan, *, resume: Path | None = None) -> Path:
    """Train on demonstrations and return the run's folder. `resume` continues from the last checkpoint."""
    config = plan.config
    tracker_names(config.track)
    with ExitStack() as resources:
        if plan.task is not None:
            moved = isolated(plan.task, workers=config.task.reward_workers)
            plan = replace(plan, task=resources.enter_context(moved))
        processes = resources.enter_context(joined_processes())
        return run_sft_with(processes, plan, resume)


def run_sft_with(processes: Processes, plan: SFTPlan, resume: Path | None) -> Path:
    """Train as one of these processes."""
    config = plan.config
    start = RunStart.shared(
        processes,
        lambda: (
            RunStart.new(config, task=f"sft-{plan.title}")
            if resume is None
            else RunStart.resumed(resume, config)
        ),
    )
    if done := start.already_done(config):
        start.lock.close()
        if processes.leader:
            open_display().message(done)
        return start.folder.path

    with explain_full_disk(start.folder, config), SFTRun(plan, start=start, processes=processes) as run:
        for step in run.steps():
            batch = run.take(step)
            report = run.learn(step, batch)
            run.track(step, batch, report)
    return run.folder.path


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTBatch:
    """The demonstrations of one step."""

    samples: list[Sample]
    too_long: int
    cursor: int


class SFTRun(BaseRun):
    """A supervised fine-tuning run."""

    learner: SFTLearner

    def __init__(self, plan: SFTPlan, *, start: RunStart, processes: Processes | None = None) -> None:
        self.task = plan.task
        self.demonstrations = plan.demonstrations
        super().__init__(plan.config, title=f"warm start · {plan.title}", start=start, processes=processes)

    def read_data(self) -> Split:
        """Return the data that the plan has already read to count the steps."""
        return self.demonstrations.split

    def data_notices(self) -> Iterator[str]:
        if self.demonstrations.dropped:
            yield f"{self.demonstrations.dropped} rows are left out: each repeats another or is held out"
        if self.too_long:
            yield f"{self.too_long} held-out examples are left out: their prompts are too long to be answered"
        if self.task is None:
            yield "no task is named: accuracy is not measured"

    def make_parts(self) -> None:
        config, task = self.config, self.task
        self.learner = SFTLearner(
            self.policy, optim=config.optim, max_steps=config.run.max_steps, processes=self.processes
        )
        held_out = () if task is None else held_out_of(config, task)
        examples = PromptLimit(config, task=task, policy=self.policy).short(held_out) if task else ()
        self.too_long = len(held_out) - len(examples)
        self.evaluator = Evaluator(
            config,
            task=task,
            examples=examples,
            codec=self.policy,
            engine=self.engine,
            folder=self.folder,
            processes=self.processes,
        )
        self.longest = min(config.sft.max_length, self.policy.context_length)
        self.held_out = to_samples(self.policy, self.demonstrations.held_out(), longest=self.longest)
        # Encode early: mistakes in the rows are reported before anything is written or measured.
        self.take(self.state.step + 1)
        size = self.demonstrations.split.size
        if config.sft.data is not None and size is not None and self.state.step == 0:
            check_chats(self.policy, self.demonstrations.take(0, size)[0])

    def take(self, step: int) -> SFTBatch:
        """Encode the next demonstrations. Replace and count those that are too long."""
        wanted, cursor = self.config.sft.batch, self.state.cursor
        samples: list[Sample] = []
        too_long = 0
        while not samples:
            demonstrations, cursor = self.demonstrations.take(cursor, wanted)
            samples = to_samples(self.policy, demonstrations, longest=self.longest)
            too_long += len(demonstrations) - len(samples)
            if too_long >= MOST_TOO_LONG:
                context = self.policy.context_length
                remedy = (
                    "use a model with a longer context"
                    if self.longest == context
                    else f"raise sft.max_length, up to the model's context of {context}"
                )
                raise ConfigError(
                    f"{too_long} demonstrations in a row have more than {self.longest} tokens: {remedy}"
                )
        return SFTBatch(samples=samples, too_long=too_long, cursor=cursor)

    def learn(self, step: int, taken: SFTBatch) -> dict[str, float]:
        """Update the policy and return the metrics of the update."""
        torch.manual_seed(derive_seed(self.config.run.seed, "update", step))
        started = time.perf_counter()
        report = self.learner.update(taken.samples)
        seconds = time.perf_counter() - started
        tokens = sum(sample.length for sample in taken.samples)
        size = self.demonstrations.split.size
        return {
            **report,
            **({} if size is None else {"sft/epoch": taken.cursor / size}),
            "sft/tokens": float(tokens),
            "sft/too_long": float(taken.too_long),
            "speed/tokens_per_second": tokens / seconds,
            "time/step": seconds,
            "memory/peak_gb": peak_memory(),
        }

    def track(self, step: int, taken: SFTBatch, report: dict[str, float]) -> None:
        """Log the step; evaluate and save a checkpoint if they are due."""
        self.end_step(step, cursor=taken.cursor, metrics=report)

    def evaluate(self, step: int) -> dict[str, float]:
        """Measure the loss on held-out demonstrations beside the accuracy."""
        measured = super().evaluate(step)
        if measured and self.policy.device.type == "cuda":
            self.engine.release()  # free the KV cache: the loss needs the memory
        every = self.config.evaluate.every
        ends = step in (0, self.config.run.max_steps)
        if not self.held_out or self.config.evaluate.skip or not (ends or (every and step % every == 0)):
            return measured
        loss = self.learner.loss(self.held_out)
        self.recorder.say(f"loss on {len(self.held_out)} held-out demonstrations: {loss:.4f}")
        return {**measured, "sft/held_out_loss": loss}


MOST_TOO_LONG = 10_000
"""Demonstrations skipped in one step before the run assumes that all are too long."""


class WorkedAnswers:
    """Worked answers to the prompts of a step, for the supervised part of its loss (`algo.sft_weight`)."""

    def __init__(self, config: Config, *, task: Task, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self.worked = of_task(task, config=config) if config.algo.sft_weight else None

    def samples(self, groups: Sequence[Group]) -> list[Sample]:
        """Return a worked answer to the prompt of each group that has one."""
        if self.worked is None:
            return []
        seed, samples = self.config.run.seed, []
        for number, group in enumerate(groups):
            rng = random.Random(f"demonstration {seed} {group.example.fingerprint}")
            demonstration = self.worked.make(group.example, rng)
            if demonstration is None:
                continue
            tokens, trained = encode(self.policy, demonstration)
            if any(trained) and len(tokens) <= self.policy.context_length:
                samples.append(supervised_sample(tokens, trained, group=number, rollout=group.rollouts[0]))
        total = sum(sum(sample.supervised) for sample in samples)
        weight = self.config.algo.sft_weight / max(1.0, total)
        return [
            replace(sample, supervised=tuple(weight * flag for flag in sample.supervised))
            for sample in samples
        ]


def supervised_sample(
    tokens: Sequence[int], supervised: Sequence[bool], *, group: int, rollout: Rollout
) -> Sample:
    """Return a sample with a cross-entropy loss only; weights of 1 on its supervised tokens.

    It joins the group of its prompt, so that the prompt is computed once, if its tokens are the same.
    """
    zeros = (0.0,) * len(tokens)
    prompt = rollout.tokens[: rollout.prompt_length]
    shared = tuple(tokens[: len(prompt)]) == prompt and not any(supervised[: len(prompt)])
    return Sample(
        tokens=tuple(tokens),
        trained=(False,) * len(tokens),
        logprobs=zeros,
        entropies=zeros,
        advantages=zeros,
        prefix=len(prompt) if shared else supervised.index(True),
        group=group if shared else -1 - group,
        member=-1,
        supervised=tuple(map(float, supervised)),
    )
