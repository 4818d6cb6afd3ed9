"""What must hold in every step. A broken promise stops the run: training on would be training on a bug."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from groupwise.errors import InvariantError
from groupwise.records import Completion, Rollout, Sample


def check_token_exact(rollout: Rollout, completion: Completion, *, end_tokens: frozenset[int]) -> None:
    """The ids to train are the ids that were sampled; the mask covers all of them, the end token included."""
    check_stream_exact(rollout, [completion], end_tokens=end_tokens)


def check_stream_exact(
    rollout: Rollout, completions: Sequence[Completion], *, end_tokens: frozenset[int]
) -> None:
    """The same for a stream of several turns: what lies between them was read, and is not trained."""
    chosen = tuple(token for token, trained in zip(rollout.tokens, rollout.trained, strict=True) if trained)
    sampled = tuple(token for completion in completions for token in completion.tokens)
    if chosen != sampled:
        raise InvariantError(
            f"the {len(chosen)} tokens marked for training are not the {len(sampled)} that were "
            f"sampled: a completion was re-encoded or its mask is shifted"
        )
    if any(rollout.trained[: rollout.prompt_length]):
        raise InvariantError("a prompt token is marked for training")
    for completion in completions:
        if completion.finish == "end" and completion.tokens[-1] not in end_tokens:
            raise InvariantError("a completion that ended does not train its end token")


def check_targets(samples: Iterable[Sample], targets: list[int]) -> None:
    """What a micro-batch trains is what its samples say."""
    expected = [t for s in samples for t, trained in zip(s.tokens, s.trained, strict=True) if trained]
    if targets != expected:
        raise InvariantError("a packed micro-batch trains other tokens than its samples hold")


def check_disjoint(training: Iterable[str], held_out: Iterable[str]) -> None:
    """No training example is also held out; both are given by fingerprint."""
    shared = set(training) & set(held_out)
    if shared:
        raise InvariantError(f"{len(shared)} training examples are also held out: accuracy would be memory")


def check_gap(gap: float, *, limit: float) -> None:
    """Sampler and trainer give the sampled tokens the same log-probabilities, but for rounding."""
    if not gap <= limit:
        raise InvariantError(
            f"sampler and trainer disagree by {gap:.4f} nats a token (algo.max_gap is {limit:g}): look at "
            f"positions, attention mask, temperature and dtype, or at weights that generation did not see"
        )


def check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise InvariantError(f"{name} is {value}: lower optim.learning_rate, or look at the last rollouts")


def check_undisturbed(before: object, after: object) -> None:
    """Evaluation leaves the training state as it found it."""
    if before != after:
        raise InvariantError("evaluation changed the training state (weights, random state or data cursor)")
