"""From demonstrations to trained tokens: the answers, each with its end token, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from groupwise.errors import ConfigError
from groupwise.learner.supervised import masked_sample
from groupwise.model.policy import Policy
from groupwise.model.template import knows_tools, render
from groupwise.records import Sample
from groupwise.rollout.converse import prefill_of
from groupwise.tasks.demonstration import Demonstration, written


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
    """Refuse a chat that the template cannot write: a step that came upon it would be the run's last."""
    for demonstration in demonstrations:
        if isinstance(demonstration.completion, tuple):
            deque(stretches(policy, demonstration), maxlen=0)
        elif not isinstance(demonstration.prompt, str) and policy.tokenizer.chat_template is not None:
            render(policy.tokenizer, demonstration.prompt, tools=demonstration.tools)


def encode(policy: Policy, demonstration: Demonstration) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return a demonstration's tokens, and which of them are trained.

    A prompt is encoded as generation encodes it, and each answer apart from what precedes it: the ids
    that are trained are ids that can be sampled.
    """
    if isinstance(demonstration.completion, tuple):
        return joined(policy, list(stretches(policy, demonstration)))
    if demonstration.turns:
        return encode_turns(policy, demonstration)
    prompt = policy.encode(demonstration.prompt, tools=demonstration.tools)
    sampled = demonstration.sampled
    if sampled is not None and sampled.tokens[: sampled.prompt_length] == prompt:
        return sampled.tokens, sampled.trained
    if sampled is not None and (demonstration.tools or sampled.read_more):
        # The text is of the last turn alone: training on it would teach not to call the tools.
        raise ConfigError(
            "the run's answers used tools, and its prompts are not those that this model and task give: "
            "imitate them with the run's own model and task"
        )
    answer = (*policy.encode_text(demonstration.completion, special=False), end_token(policy))
    return (*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer)


def encode_turns(policy: Policy, demonstration: Demonstration) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Lay out turns as the tokens of a rollout: the policy's own are trained, not what it reads."""
    tokens = list(policy.encode(demonstration.prompt, tools=demonstration.tools))
    trained = [False] * len(tokens)
    prefill = prefill_of(demonstration.prompt)
    for turn in demonstration.turns:
        wrote = (*policy.encode_text(turn.text, special=False), end_token(policy))
        results = [call.result for call in turn.calls]
        read = policy.encode_results(results, prefill=prefill, ended=True) if results else ()
        tokens += (*wrote, *read)
        trained += [True] * len(wrote) + [False] * len(read)
    return tuple(tokens), tuple(trained)


def stretches(policy: Policy, demonstration: Demonstration) -> Iterator[tuple[str, bool]]:
    """Yield the chat as text, in turns: what the policy is given (False), what it is to write (True).

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
    if not knows_tools(tokenizer):  # such a template would leave the calls out
        messages = [{"role": m["role"], "content": written(m)} if "tool_calls" in m else m for m in messages]
    whole = render(tokenizer, messages, tools=tools, more=False)
    ending = policy.tokenizer.eos_token or ""
    done = 0
    for index in range(len(given), len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], tools=tools)
        after = render(tokenizer, messages[: index + 1], tools=tools, more=False)
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
