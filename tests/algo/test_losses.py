"""The policy losses: hand-worked values, gradients against naive formulas, and sums that add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.algo.losses import (
    MEAN_OVER,
    SURROGATES,
    LossSettings,
    Tokens,
    averages,
    merge,
    policy_loss,
    token_weights,
)
from groupwise.config import schema

CLIPPED = ["grpo", "bnpo", "dapo", "dr_grpo"]
LENGTHS = [3, 1, 4, 2]


def settings(kind: str, **changes: Any) -> LossSettings:
    plain = LossSettings(
        kind=kind,
        clip_low=0.2,
        clip_high=0.3,
        clip_two_sided=None,
        beta=0.0,
        kl="k3",
        correction="none",
        correction_cap=2.0,
        entropy_bonus=0.0,
    )
    return replace(plain, **changes)


def tokens(ratios: list[float], advantages: list[float], sequences: list[int] | None = None) -> Tokens:
    """Tokens of weight 1 and old log-prob -1, that have moved by these ratios."""
    old_N = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    return Tokens(
        logprobs_N=(old_N + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        old_N=old_N,
        sampled_N=old_N,
        reference_N=None,
        entropy_N=None,
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        weights_N=torch.ones_like(old_N),
        sequence_N=torch.tensor(sequences or [0] * len(ratios)),
    )


def random_tokens(*, weights: list[float], seed: int = 0) -> Tokens:
    """Sequences of LENGTHS, with everything different everywhere."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    old_N = noise(1.0).abs().neg()
    lengths = torch.tensor(LENGTHS)
    return Tokens(
        logprobs_N=(old_N + noise(0.4)).requires_grad_(),
        old_N=old_N,
        sampled_N=old_N + noise(0.4),
        reference_N=old_N + noise(0.4),
        entropy_N=noise(1.0).abs().requires_grad_(),
        advantages_N=torch.tensor([1.0, -0.5, 0.7, -1.2], dtype=torch.float64).repeat_interleave(lengths),
        weights_N=torch.tensor(weights, dtype=torch.float64).repeat_interleave(lengths),
        sequence_N=torch.arange(len(LENGTHS)).repeat_interleave(lengths),
    )


def loss_and_gradient(found: Tokens, how: LossSettings) -> tuple[float, Tensor]:
    loss, _ = policy_loss(found, how)
    return loss.item(), torch.autograd.grad(loss, found.logprobs_N)[0]


def test_every_loss_of_the_settings_exists():
    assert set(SURROGATES) == set(MEAN_OVER) == set(schema.LOSSES)


@pytest.mark.parametrize("kind", CLIPPED)
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, +2.0, -2.0, -2.0),  # on-policy: the plain policy gradient
        (1.0, -2.0, +2.0, +2.0),
        (1.2, +2.0, -2.4, -2.4),  # moved, inside the clip
        (1.5, +2.0, -2.6, 0.0),  # rewarded token moved too far: held at 1 + clip_high
        (0.5, +2.0, -1.0, -1.0),  # rewarded token moved the wrong way: not held
        (0.5, -2.0, +1.6, 0.0),  # punished token pushed down enough: held at 1 - clip_low
        (1.5, -2.0, +3.0, +3.0),  # punished token moved the wrong way: not held
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_losses_match_the_hand_worked_value(kind, ratio, advantage, loss, gradient):
    value, gradient_N = loss_and_gradient(tokens([ratio], [advantage]), settings(kind))
    assert value == pytest.approx(loss)
    assert gradient_N.item() == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (5.0, -1.0, 3.0, 0.0),  # a punished token that shot up: held at the bound
        (2.5, -1.0, 2.5, 2.5),
        (0.5, -1.0, 0.8, 0.0),
        (5.0, +1.0, -1.3, 0.0),  # rewarded tokens do not notice the bound
    ],
)
def test_the_two_sided_bound_holds_punished_tokens(ratio, advantage, loss, gradient):
    value, gradient_N = loss_and_gradient(tokens([ratio], [advantage]), settings("dapo", clip_two_sided=3.0))
    assert value == pytest.approx(loss)
    assert gradient_N.item() == pytest.approx(gradient)


def test_the_clipped_loss_equals_the_minimum_of_ppo():
    found = random_tokens(weights=[1.0, 2.0, 3.0, 4.0])
    value, gradient_N = loss_and_gradient(found, settings("grpo"))
    ratio_N = (found.logprobs_N - found.old_N).exp()
    objective_N = torch.minimum(ratio_N * found.advantages_N, ratio_N.clamp(0.8, 1.3) * found.advantages_N)
    naive = -(found.weights_N * objective_N).sum()
    assert value == pytest.approx(naive.item())
    torch.testing.assert_close(gradient_N, torch.autograd.grad(naive, found.logprobs_N)[0])


def test_gspo_clips_the_geometric_mean_of_the_ratios():
    # sequence 0: sqrt(0.8 * 1.8) = 1.2, inside; sequence 1: sqrt(1 * 4) = 2, held at 1.3
    found = tokens([0.8, 1.8, 1.0, 4.0], [1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1])
    value, gradient_N = loss_and_gradient(found, settings("gspo"))
    assert value == pytest.approx(-(1.2 + 1.2 + 1.3 + 1.3))
    assert gradient_N.tolist() == pytest.approx([-1.2, -1.2, 0.0, 0.0])


def test_gspo_has_the_gradient_of_the_sequence_form():
    (weights,) = token_weights("gspo", [LENGTHS], sequences=4, tokens=10, max_tokens=8)
    found = random_tokens(weights=weights)
    value, gradient_N = loss_and_gradient(found, settings("gspo", clip_low=0.1, clip_high=0.1))
    naive = torch.zeros((), dtype=torch.float64)
    for sequence in range(len(LENGTHS)):
        own_N = found.sequence_N == sequence
        ratio = (found.logprobs_N - found.old_N)[own_N].mean().exp()
        advantage = found.advantages_N[own_N][0]
        naive = naive - torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage) / len(LENGTHS)
    assert value == pytest.approx(naive.item())
    torch.testing.assert_close(gradient_N, torch.autograd.grad(naive, found.logprobs_N)[0])
    assert gradient_N.count_nonzero() < sum(LENGTHS), "some sequence should be clipped"


def test_gspo_takes_advantages_that_differ_within_a_sequence():
    found = tokens([1.0, 1.0], [2.0, -3.0])
    _, gradient_N = loss_and_gradient(found, settings("gspo"))
    assert gradient_N.tolist() == pytest.approx([-2.0, 3.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [
        (1.0, 2.0, 1.0),
        (1.2, -2.0, 1.2),
        (9.0, 2.0, 1.3),  # capped, and still learning
        (9.0, -2.0, 1.3),
        (0.1, 2.0, 0.1),  # no lower bound
        (0.1, -2.0, 0.1),
    ],
)
def test_cispo_caps_the_weight_and_keeps_the_gradient(ratio, advantage, weight):
    found = tokens([ratio], [advantage])
    value, gradient_N = loss_and_gradient(found, settings("cispo"))
    assert gradient_N.item() == pytest.approx(-weight * advantage)
    assert value == pytest.approx(-weight * advantage * found.logprobs_N.item())


@pytest.mark.parametrize("kind", sorted(SURROGATES))
def test_every_loss_is_the_plain_policy_gradient_on_policy(kind):
    found = tokens([1.0, 1.0, 1.0], [1.0, -2.0, 0.5], [0, 0, 1])
    _, gradient_N = loss_and_gradient(found, settings(kind))
    torch.testing.assert_close(gradient_N, -found.advantages_N)


@pytest.mark.parametrize("kind", sorted(SURROGATES))
def test_the_correction_weighs_the_policy_term_alone(kind):
    plain = tokens([1.0], [2.0])
    moved = replace(
        plain,
        sampled_N=plain.old_N - torch.tensor([1.5]).log(),  # the trainer finds it 1.5 times as likely
        reference_N=plain.old_N - 0.5,
        entropy_N=torch.tensor([0.7], dtype=torch.float64),
    )
    how = settings(kind, correction="token_truncate", beta=0.1, kl="k2", entropy_bonus=0.2)
    value, gradient_N = loss_and_gradient(moved, how)
    policy = loss_and_gradient(plain, settings(kind))[0]
    assert value == pytest.approx(1.5 * policy + 0.1 * 0.5**2 / 2 - 0.2 * 0.7)
    assert gradient_N.item() == pytest.approx(1.5 * -2.0 + 0.1 * 0.5)


def test_the_entropy_bonus_pushes_entropy_up():
    found = replace(tokens([1.0], [0.0]), entropy_N=torch.tensor([0.7], dtype=torch.float64).requires_grad_())
    loss, _ = policy_loss(found, settings("dapo", entropy_bonus=0.2))
    assert found.entropy_N is not None
    assert torch.autograd.grad(loss, found.entropy_N)[0].item() == pytest.approx(-0.2)


EVERYTHING: dict[str, Any] = {
    "beta": 0.1,
    "correction": "sequence_truncate",
    "entropy_bonus": 0.1,
    "clip_two_sided": 1.6,
}


def part(whole: Tokens, sequences: list[int]) -> Tokens:
    """The tokens of some sequences, numbered anew."""
    chosen_N = torch.isin(whole.sequence_N, torch.tensor(sequences))

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[chosen_N]

    renumbered_N = torch.unique(whole.sequence_N[chosen_N], return_inverse=True)[1]
    names = [name for name in Tokens.__dataclass_fields__ if name != "sequence_N"]
    return Tokens(**{name: cut(getattr(whole, name)) for name in names}, sequence_N=renumbered_N)


@pytest.mark.parametrize("kind", sorted(SURROGATES))
@pytest.mark.parametrize("split", [[[0], [1], [2], [3]], [[0, 3], [1, 2]], [[2, 0, 1], [3]]])
def test_losses_gradients_and_metrics_add_up_over_any_micro_batches(kind, split):
    (weights,) = token_weights(kind, [LENGTHS], sequences=6, tokens=17, max_tokens=8)
    whole = random_tokens(weights=weights)
    how = settings(kind, **EVERYTHING)
    loss, metrics = policy_loss(whole, how)
    parts = [policy_loss(part(whole, sequences), how) for sequences in split]
    total = torch.stack([value for value, _ in parts]).sum()
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(
        torch.autograd.grad(total, whole.logprobs_N)[0], torch.autograd.grad(loss, whole.logprobs_N)[0]
    )
    merged = averages(merge(found for _, found in parts))
    assert merged == pytest.approx(averages(metrics))


@pytest.mark.parametrize("kind", sorted(SURROGATES))
def test_leaving_out_zero_advantages_changes_no_gradient(kind):
    (weights,) = token_weights(kind, [LENGTHS], sequences=4, tokens=10, max_tokens=8)
    whole = random_tokens(weights=weights)
    silent_N = whole.sequence_N == 1
    whole = replace(whole, advantages_N=whole.advantages_N.masked_fill(silent_N, 0.0))
    (fewer,) = token_weights(kind, [[3, 4, 2]], sequences=4, tokens=10, max_tokens=8)
    assert fewer == pytest.approx([weights[0], weights[2], weights[3]])
    complete, _ = policy_loss(whole, settings(kind))
    reduced, _ = policy_loss(part(whole, [0, 2, 3]), settings(kind))
    torch.testing.assert_close(
        torch.autograd.grad(reduced, whole.logprobs_N)[0], torch.autograd.grad(complete, whole.logprobs_N)[0]
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [[1 / 10, 1 / 5], [1 / 15]]),  # 2 / (5 sequences * length)
        ("gspo", [[1 / 10, 1 / 5], [1 / 15]]),
        ("dr_grpo", [[1 / 20, 1 / 20], [1 / 20]]),  # 2 / (5 * 8)
        ("dapo", [[1 / 12, 1 / 12], [1 / 12]]),  # 2 / 24
        ("cispo", [[1 / 12, 1 / 12], [1 / 12]]),
        ("bnpo", [[1 / 12, 1 / 12], [1 / 12]]),  # 12 of 24 tokens computed; each mini-batch has 6
    ],
)
def test_weights_match_the_hand_worked_values(kind, expected):
    found = token_weights(kind, [[4, 2], [6]], sequences=5, tokens=24, max_tokens=8)
    assert [pytest.approx(row) for row in expected] == found


@pytest.mark.parametrize("kind", ["grpo", "gspo", "bnpo", "dapo", "cispo"])
def test_weights_of_a_complete_batch_sum_to_one_per_optimizer_step(kind):
    minibatches = [[4, 2], [1, 5]]
    weights = token_weights(kind, minibatches, sequences=4, tokens=12, max_tokens=8)
    for row, lengths in zip(weights, minibatches, strict=True):
        assert sum(weight * length for weight, length in zip(row, lengths, strict=True)) == pytest.approx(1)


def test_only_bnpo_weighs_a_token_by_the_mini_batch_it_lands_in():
    def spread(kind: str) -> float:
        (first,), (second,) = token_weights(kind, [[4], [1]], sequences=2, tokens=5, max_tokens=8)
        return second / first

    assert spread("dapo") == pytest.approx(1)
    assert spread("bnpo") == pytest.approx(4)


def test_a_sequence_without_trained_tokens_is_refused():
    with pytest.raises(AssertionError, match="without trained tokens"):
        token_weights("grpo", [[2, 0]], sequences=2, tokens=2, max_tokens=8)


def test_a_batch_smaller_than_its_part_is_refused():
    with pytest.raises(AssertionError, match="fewer tokens"):
        token_weights("grpo", [[2, 2]], sequences=2, tokens=3, max_tokens=8)


def test_the_diagnostics_match_the_hand_worked_values():
    found = tokens([1.5, 0.5, 1.0, 0.5], [1.0, -1.0, 1.0, 1.0])
    found = replace(found, sampled_N=found.old_N + torch.tensor([0.1, -0.3, 0.0, 0.0]))
    _, metrics = policy_loss(found, settings("dapo"))
    means = averages(metrics)
    assert means["policy/ratio"] == pytest.approx(3.5 / 4)
    assert (means["policy/clip_high"], means["policy/clip_low"]) == (0.25, 0.25)
    assert means["policy/gap"] == pytest.approx(0.1)
    assert means["policy/gap_max"] == pytest.approx(0.3)
    # KL(sampler || trainer) by k3: exp(-d) - 1 + d of 0.1 and -0.3
    assert means["policy/gap_kl"] == pytest.approx((0.004837 + 0.049859) / 4, rel=1e-4)
    # KL(old || now) by k3: ratio - 1 - log(ratio)
    assert means["policy/kl_old"] == pytest.approx((0.5 - 0.405465 + 2 * (-0.5 + 0.693147)) / 4, rel=1e-5)
    assert not any(value.requires_grad for value in metrics.values())


def test_merged_metrics_add_and_keep_extremes():
    first = {
        "policy/tokens": torch.tensor(3),
        "policy/gap": torch.tensor(0.6),
        "policy/gap_max": torch.tensor(0.4),
    }
    second = {
        "policy/tokens": torch.tensor(1),
        "policy/gap": torch.tensor(0.2),
        "policy/gap_max": torch.tensor(0.2),
    }
    assert averages(merge([first, second])) == pytest.approx({"policy/gap": 0.2, "policy/gap_max": 0.4})
    assert averages(merge([])) == {}


def test_tokens_of_different_lengths_are_refused():
    with pytest.raises(AssertionError, match="share one shape"):
        replace(tokens([1.0, 1.0], [1.0, 1.0]), advantages_N=torch.zeros(3))


def test_a_kl_penalty_without_reference_is_refused():
    with pytest.raises(AssertionError, match="reference"):
        policy_loss(tokens([1.0], [1.0]), settings("dapo", beta=0.1))


def moved(now: list[float], sampled: list[float], advantages: list[float], sequences: Any = None) -> Tokens:
    """Tokens with these probabilities now and when they were sampled, from the trainer's old policy."""
    sampled_N = torch.tensor(sampled, dtype=torch.float64).log()
    return replace(
        tokens([1.0] * len(now), advantages, sequences),
        logprobs_N=torch.tensor(now, dtype=torch.float64).log().requires_grad_(),
        old_N=sampled_N,
        sampled_N=sampled_N,
    )


@pytest.mark.parametrize(
    ("now", "sampled", "advantage", "gradient"),
    [
        # |p - q| up to 0.15 stays inside; a ratio of 10 on a rare token does not leave the region.
        (0.01, 0.001, +1.0, -10.0),
        (0.50, 0.40, +1.0, -1.25),
        (0.60, 0.40, +1.0, 0.0),  # rewarded and raised by 0.2: outside
        (0.20, 0.40, +1.0, -0.5),  # rewarded and lowered: may come back
        (0.20, 0.40, -1.0, 0.0),  # punished and lowered by 0.2: outside
        (0.60, 0.40, -1.0, +1.5),  # punished and raised: may come back
    ],
)
def test_dppo_masks_by_the_change_of_probability_in_the_direction_of_the_advantage(
    now, sampled, advantage, gradient
):
    _, gradient_N = loss_and_gradient(moved([now], [sampled], [advantage]), settings("dppo_tv"))
    assert gradient_N.item() == pytest.approx(gradient)


def test_dppo_with_kl_masks_by_the_divergence_of_two_outcomes():
    # KL(0.4 || 0.5) = 0.4 ln 0.8 + 0.6 ln 1.2 = 0.0201; KL(0.4 || 0.6) = 0.4 ln 2/3 + 0.6 ln 1.5 = 0.0811
    found = moved([0.5, 0.6], [0.4, 0.4], [1.0, 1.0])
    _, gradient_N = loss_and_gradient(found, settings("dppo_kl"))
    assert gradient_N.tolist() == pytest.approx([-1.25, 0.0])
    _, gradient_N = loss_and_gradient(found, settings("dppo_kl", divergence_limit=0.02))
    assert gradient_N.tolist() == pytest.approx([0.0, 0.0])
    _, gradient_N = loss_and_gradient(found, settings("dppo_kl", divergence_limit=0.1))
    assert gradient_N.tolist() == pytest.approx([-1.25, -1.5])


def test_dppo_is_defined_for_tokens_that_were_certain():
    found = moved([1.0, 1e-30], [1.0, 1.0], [1.0, -1.0])
    for kind in ("dppo_tv", "dppo_kl"):
        _, gradient_N = loss_and_gradient(found, settings(kind))
        assert gradient_N.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, +2.0, -4.0, -2.0),  # 4 sigmoid(0) = 2; the slope at 1 is that of the plain policy gradient
        (2.0, +1.0, -2.924234, -1.572895),  # 4 s(1) = 4 * 0.731059; 4 s (1 - s) * ratio = 4 * 0.196612 * 2
        (1.0, -1.0, +1.904762, +1.0),  # 4 / 1.05 * 0.5
        (2.0, -1.0, +2.822136, +1.534892),  # s = sigmoid(1.05) = 0.740775: 4 / 1.05 s; 4 s (1 - s) * 2
    ],
)
def test_sapo_gates_softly_and_faster_where_the_advantage_is_negative(ratio, advantage, loss, gradient):
    value, gradient_N = loss_and_gradient(tokens([ratio], [advantage]), settings("sapo"))
    assert value == pytest.approx(loss, abs=2e-4)
    assert gradient_N.item() == pytest.approx(gradient, abs=2e-3)


def test_punished_sequences_that_the_policy_has_left_are_dropped():
    # Mean of log(sampled / now): ln 2 in the first sequence, 0 in the second, ln 2 in the third.
    found = moved(
        [0.2, 0.2, 0.5, 0.2, 0.1, 0.1],
        [0.4, 0.4, 0.5, 0.2, 0.2, 0.2],
        [-1, -1, -1, -1, 1, 1],
        [0, 0, 1, 1, 2, 2],
    )
    _, gradient_N = loss_and_gradient(found, settings("dapo", clip_low=1.0, off_policy_mask=0.5))
    assert gradient_N.tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0, -0.5, -0.5])
    _, metrics = policy_loss(found, settings("dapo", clip_low=1.0, off_policy_mask=0.5))
    assert metrics["policy/off_policy"] == 2
    _, gradient_N = loss_and_gradient(found, settings("dapo", clip_low=1.0, off_policy_mask=0.7))
    assert gradient_N.tolist() == pytest.approx([0.5, 0.5, 1.0, 1.0, -0.5, -0.5])


@pytest.mark.parametrize("normalize", ["sequences", "max_tokens", "tokens", "minibatch_tokens"])
def test_any_loss_can_be_a_mean_over_something_else(normalize):
    by = {"sequences": "grpo", "max_tokens": "dr_grpo", "tokens": "dapo", "minibatch_tokens": "bnpo"}
    sizes = {"sequences": 4, "tokens": 12, "max_tokens": 8}
    published = token_weights(by[normalize], [[3, 1], [4, 2]], **sizes)
    assert token_weights("cispo", [[3, 1], [4, 2]], normalize=normalize, **sizes) == published
    assert token_weights("my_module:loss", [[3, 1], [4, 2]], **sizes) == token_weights(
        "dapo", [[3, 1], [4, 2]], **sizes
    )


def test_a_loss_of_a_user_may_use_the_former_names_of_the_fields():
    few = tokens([1.0], [1.0])
    assert few.logprobs_T is few.logprobs_N  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        few.unknown_T  # type: ignore[attr-defined]  # noqa: B018
