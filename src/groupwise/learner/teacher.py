"""Teachers for on-policy distillation: models that score the policy's own tokens.

A teacher returns the log-probability of every trained token of a micro-batch, NaN where it has none to give.

    ModelTeacher    another model with the same tokenizer, in this process
    ServerTeacher   a vLLM server that returns the log-probabilities of prompts
    SelfTeacher     the policy itself, shown a right answer of the group (SDPO, arXiv 2601.20802)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from groupwise.algo.advantages import SAME
from groupwise.engine.vllm.vllm_client import ServerRefused, ServerUnavailable, VllmServers
from groupwise.errors import ConfigError, InvariantError
from groupwise.learner.micro_batch import MicroBatchInputs, pack, row_logprobs
from groupwise.model.ops.equivalence import in_mode
from groupwise.model.policy import Policy
from groupwise.records import Group, Message, Rollout, Sample, Sampling
from groupwise.tracking.run_folder import LOGGER

SELF = "self"
"""The name of the policy as its own teacher."""
SHOWN_ANSWER = "\n\nA right answer to this is:\n{answer}\n\nAnswer in your own words."
"""What is added to the prompt for the self-teacher."""


class Teacher(Protocol):
    """Scores the trained tokens of a micro-batch."""

    def logprobs(self, part: MicroBatchInputs) -> Tensor: ...


def is_server(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def sampled_like(teacher: Teacher, sampling: Sampling) -> Teacher:
    """Return the teacher under another sampling distribution; a server's is always at temperature 1."""
    if isinstance(teacher, ServerTeacher):
        return teacher
    teacher = copy(teacher)
    teacher.sampling = sampling  # type: ignore[attr-defined]
    return teacher


class ModelTeacher:
    """Another model in this process, under the distribution that the policy sampled from."""

    def __init__(self, model: Policy, sampling: Sampling, *, student: Policy, name: str) -> None:
        if model.tokenizer.get_vocab() != student.tokenizer.get_vocab():
            raise ConfigError(
                f"algo.teacher {name} has another tokenizer than the policy; choose a teacher that shares it"
            )
        self.model, self.sampling = model, sampling
        model.logits_processor, model.grammar = student.logits_processor, student.grammar

    @torch.no_grad()
    def logprobs(self, part: MicroBatchInputs) -> Tensor:
        with in_mode(self.model.model, training=False):
            return row_logprobs(self.model, part.batch, self.sampling, entropy_gradient=False)[0]


class ServerTeacher:
    """A server whose completions can echo a scored prompt, at temperature 1: `groupwise serve`, vLLM.

    It samples one token after what it scores, so the last token of a rollout that fills its context gets NaN.
    """

    def __init__(self, address: str, *, seconds: float, patience: float, together: int = 16) -> None:
        self.pool = VllmServers([address.rstrip("/")], patience=patience, say=LOGGER.warning, role="teacher")
        self.server = self.pool.all[0]
        self.seconds, self.together = seconds, together
        try:
            about = self.server.request("/v1/models", seconds=seconds)["data"][0]
        except (ServerRefused, ServerUnavailable, LookupError, TypeError) as error:
            raise InvariantError(
                f"the teacher {self.server.address} did not answer: {error}; start it first"
            ) from error
        self.model, self.context = about["id"], about.get("max_model_len")

    def logprobs(self, part: MicroBatchInputs) -> Tensor:
        with ThreadPoolExecutor(self.together) as pool:
            each = list(pool.map(self._score, part.members))
        return torch.tensor([value for own in each for value in own], device=part.batch.targets_N.device)

    def _score(self, sample: Sample) -> list[float]:
        if not sample.length:  # a demonstration
            return []
        fitting = sample.tokens if self.context is None else sample.tokens[: self.context - 1]
        unscored = [math.nan] * (len(sample.tokens) - len(fitting))
        body = {
            "model": self.model,
            "prompt": list(fitting),
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": 1,
            "echo": True,
        }
        try:
            answer = self.pool.do(
                lambda server: server.request("/v1/completions", body, seconds=self.seconds)
            )
            scores = answer["choices"][0]["logprobs"]["token_logprobs"]
            # The scores of the prompt come first, then that of a sampled token.
            pairs = zip(sample.trained, [*scores[: len(fitting)], *unscored], strict=True)
            return [float(score) for trained, score in pairs if trained]
        except (ServerRefused, LookupError, TypeError, ValueError) as error:
            raise InvariantError(
                f"the teacher {self.server.address} did not score a prompt: {error}; serve it with vLLM or "
                "groupwise serve"
            ) from error


class SelfTeacher:
    """The policy before the update, which reads a right answer of the group along with the prompt."""

    def __init__(self, policy: Policy, sampling: Sampling, *, is_right: Callable[[Rollout], bool]) -> None:
        self.policy, self.sampling, self.is_right = policy, sampling, is_right

    def hints(self, groups: Sequence[Group]) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return, by group and member, the prompt that shows a failed answer's better peer.

        The peer is the first right answer with the highest reward of those in the group; every answer with a
        lower reward counts as failed. Prompts that do not fit the context with the answer are left out.
        """
        hints: dict[tuple[int, int], tuple[int, ...]] = {}
        for number, group in enumerate(groups):
            right = filter(self.is_right, group.valid)
            best = max(right, key=lambda rollout: rollout.reward, default=None)
            failed = [r for r in group.valid if best is not None and r.reward < best.reward - SAME]
            if best is None or not failed:
                continue
            prompt = self.policy.encode(shown_answer(best))
            for rollout in failed:
                own = len(rollout.tokens) - rollout.prompt_length
                if len(prompt) + own <= self.policy.context_length:
                    hints[number, rollout.member] = prompt
        return hints

    @torch.no_grad()
    def logprobs(self, part: MicroBatchInputs) -> Tensor:
        device = part.batch.targets_N.device
        scores = [torch.full((sample.length,), float("nan"), device=device) for sample in part.members]
        shown = [number for number, sample in enumerate(part.members) if sample.hint]
        if shown:
            rows = [hinted(part.members[number], group=number) for number in shown]
            with in_mode(self.policy.model, training=False):
                batch = pack(rows, device=device)
                logprobs_N, _ = row_logprobs(self.policy, batch, self.sampling, entropy_gradient=False)
            for number, own_N in zip(
                shown, torch.split(logprobs_N, [row.length for row in rows]), strict=True
            ):
                scores[number] = own_N
        return torch.cat(scores)


def hinted(sample: Sample, *, group: int) -> Sample:
    """Return the sample with the prompt that shows a right answer."""
    own = slice(sample.prefix, None)
    zeros = (0.0,) * len(sample.hint)
    return replace(
        sample,
        tokens=(*sample.hint, *sample.tokens[own]),
        trained=(False,) * len(sample.hint) + sample.trained[own],
        logprobs=(*zeros, *sample.logprobs[own]),
        entropies=(*zeros, *sample.entropies[own]),
        advantages=(*zeros, *sample.advantages[own]),
        supervised=(),
        prefix=len(sample.hint),
        group=group,
        hint=(),
    )


def shown_answer(best: Rollout) -> str | list[Message]:
    """Return the prompt of a rollout with its answer shown at the end of the last user message."""
    added = SHOWN_ANSWER.format(answer=best.text)
    if isinstance(best.prompt, str):
        return best.prompt + added
    messages: list[Message] = [dict(message) for message in best.prompt]
    asked = max(n for n, message in enumerate(messages) if message["role"] != "assistant")
    shown: Mapping[str, Any] = {**messages[asked], "content": f"{messages[asked]['content']}{added}"}
    return [*messages[:asked], shown, *messages[asked + 1 :]]
