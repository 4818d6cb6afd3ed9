"""Checks that run in every step. A failed check stops the run, because continuing would train on a bug."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from groupwise.errors import InvariantError
from groupwise.records import Branch, Completion, Rollout, Sample


def check_token_exact(rollout: Rollout, completion: Completion, *, end_tokens: frozenset[int]) -> None:
    """Check that the trained tokens are exactly the sampled tokens, end token included."""
    check_stream_exact(rollout, [completion], end_tokens=end_tokens)


def check_stream_exact(
    rollout: Rollout | Branch, completions: Sequence[Completion], *, end_tokens: frozenset[int]
) -> None:
    """Check the same for a multi-turn rollout, where tokens between the turns are not trained."""
    chosen = tuple(token for token, trained in zip(rollout.tokens, rollout.trained, strict=True) if trained)
    sampled = tuple(token for completion in completions for token in completion.tokens)
    if chosen != sampled:
        raise InvariantError(
            f"the {len(chosen)} tokens marked for training differ from the {len(sampled)} sampled "
            f"tokens: a completion was re-encoded, or its mask is shifted"
        )
    if any(rollout.trained[: rollout.prompt_length]):
        raise InvariantError("a prompt token is marked for training")
    for completion in completions:
        if completion.finish == "end" and completion.tokens[-1] not in end_tokens:
            raise InvariantError("a finished completion does not end with an end token")


def check_targets(samples: Iterable[Sample], targets: list[int]) -> None:
    """Check that a micro-batch trains exactly the trained tokens of its samples."""
    expected = [t for s in samples for t, trained in zip(s.tokens, s.trained, strict=True) if trained]
    if targets != expected:
        raise InvariantError(
            "the training targets of a packed micro-batch differ from the tokens of its samples"
        )


def check_disjoint(training: Iterable[str], held_out: Iterable[str]) -> None:
    """Check that no training example is also held out; both are given by fingerprint."""
    shared = set(training) & set(held_out)
    if shared:
        raise InvariantError(
            f"{len(shared)} training examples are also held out: accuracy would measure memorization"
        )


def check_gap(gap: float, *, limit: float) -> None:
    """Check that sampler and trainer agree on the log-probabilities of the sampled tokens, up to rounding."""
    if not gap <= limit:
        raise InvariantError(
            f"sampler and trainer log-probs differ by {gap:.4f} nats per token (algo.max_gap is {limit:g}): "
            "check positions, attention mask, temperature, dtype and weight sync; rollouts in FP8 "
            "(engine.quantization, engine.kv_cache_dtype) widen it"
        )


def check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise InvariantError(f"{name} is {value}: lower optim.learning_rate, or inspect the last rollouts")


def check_undisturbed(before: object, after: object) -> None:
    """Check that an evaluation did not change the training state."""
    if before != after:
        raise InvariantError("evaluation changed the training state (weights, random state or data cursor)")
