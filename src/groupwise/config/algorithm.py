"""The section `algo`: how rewards become advantages, and advantages a loss (docs/algorithms.md).

The docstring of each field is its user documentation: `groupwise config` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.config.coerce import between, one_of, one_of_or_function
from groupwise.errors import ConfigError

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "gdpo", "maxrl", "turn", "batch_std")
COMBINATIONS = ("sum", "uniform", "std", "pca", "l2")
LOSSES = ("grpo", "bnpo", "dapo", "dr_grpo", "gspo", "cispo", "dppo_tv", "dppo_kl", "sapo")
NORMALIZATIONS = ("sequences", "max_tokens", "tokens", "minibatch_tokens")
KL_ESTIMATORS = ("k1", "k2", "k3")
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoConfig:
    """Advantage estimation and the policy loss."""

    advantage: str = "grpo"
    """Baseline and scale: grpo (group mean, std), dr_grpo (mean), rloo (leave-one-out mean), gdpo (each
    reward normalized separately, then weighted), maxrl (mean, mean), turn (each turn's return, as
    grpo), batch_std (mean, std of the batch), or your own function as module:function or FILE.py:function."""
    combine: str = "sum"
    """How several rewards are combined: sum (weighted), uniform, std, pca, l2; see docs/algorithms.md."""
    mean_filter: bool = False
    """Train only on completions whose rewards are all above, or all below, their group means."""
    loss: str = "dapo"
    """grpo, bnpo, dapo, dr_grpo, gspo, cispo, dppo_tv, dppo_kl, sapo (see docs/algorithms.md), or your own
    function as module:function or FILE.py:function."""
    normalize: str | None = None
    """What the loss is a mean over: sequences (then tokens), max_tokens, tokens or minibatch_tokens. None: as
    the loss was published; tokens for a function of your own."""
    clip_low: float = 0.2
    """Lower clipping range: the ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.28
    """Upper clipping range."""
    clip_two_sided: float | None = None
    """Upper bound of the ratio for negative advantages (dual clip). None: unbounded."""
    divergence_limit: float | None = None
    """Trust region of dppo_tv and dppo_kl: the largest divergence of a token. None: 0.15 and 0.05."""
    tau_positive: float = 1.0
    """sapo: how fast the gate closes on tokens with positive advantage."""
    tau_negative: float = 1.05
    """sapo: the same with negative advantage."""
    off_policy_mask: float | None = None
    """Drop completions with negative advantage whose mean log(sampler / policy) exceeds this. None: off."""
    beta: float = 0.0
    """Coefficient of the KL penalty against the reference policy. 0: no reference forward pass."""
    kl: str = "k3"
    """KL estimator: k1, k2 or k3."""
    correction: str = "token_truncate"
    """Importance sampling correction for the sampler-trainer mismatch: none, or
    {token,sequence}_{truncate,mask}."""
    correction_cap: float = 2.0
    """Maximum importance weight. The mask variants drop weights outside [1/cap, cap]."""
    entropy_bonus: float = 0.0
    """Coefficient of the entropy bonus."""
    target_entropy: float | None = None
    """Adapt the coefficient of the entropy bonus so that the mean token entropy stays at this or above.
    None: the coefficient is fixed."""
    entropy_step: float = 0.005
    """How much the adaptive coefficient changes per step."""
    teacher: str | None = None
    """On-policy distillation: a model with the same tokenizer (ID, folder or run), the URL of a vLLM server,
    or `self`: the policy shown a right answer of the group. None: no teacher."""
    distill: float = 1.0
    """Coefficient of the KL divergence from the teacher."""
    echo: float = 0.0
    """Coefficient of the cross-entropy on tool results and an environment's replies (ECHO). 0: off."""
    sft_weight: float = 0.0
    """Coefficient of the cross-entropy on a worked answer to each prompt of the step. 0: off."""
    top_entropy: float = 1.0
    """Fraction of tokens, those with the highest entropy, that contribute to the policy gradient. 1: all."""
    mask_truncated: bool = False
    """Exclude completions truncated at max_tokens from the loss."""
    overlong_buffer: int = 0
    """Soft overlong penalty: it grows linearly from 0 to `overlong_penalty` over this many tokens before
    max_tokens. 0: off."""
    overlong_penalty: float = 1.0
    """Penalty of a completion of max_tokens."""
    max_gap: float = 0.05
    """Stop the run if the mean |log-prob difference| between sampler and trainer exceeds this."""
    max_stale_gap: float = 0.5
    """The same limit with rollout.overlap, where the sampler is one update behind."""

    def __post_init__(self) -> None:
        one_of_or_function("algo.advantage", self.advantage, ADVANTAGES)
        one_of("algo.combine", self.combine, COMBINATIONS)
        one_of_or_function("algo.loss", self.loss, LOSSES)
        if self.normalize is not None:
            one_of("algo.normalize", self.normalize, NORMALIZATIONS)
        one_of("algo.kl", self.kl, KL_ESTIMATORS)
        one_of("algo.correction", self.correction, CORRECTIONS)
        between("algo.clip_low", self.clip_low, 0.0, 1.0)
        between("algo.clip_high", self.clip_high, 0.0)
        between("algo.clip_two_sided", self.clip_two_sided, 1.0)
        between("algo.beta", self.beta, 0.0)
        between("algo.correction_cap", self.correction_cap, 1.0)
        between("algo.divergence_limit", self.divergence_limit, 0.0)
        between("algo.tau_positive", self.tau_positive, 1e-6)
        between("algo.tau_negative", self.tau_negative, 1e-6)
        between("algo.off_policy_mask", self.off_policy_mask, 0.0)
        between("algo.target_entropy", self.target_entropy, 0.0)
        between("algo.entropy_step", self.entropy_step, 0.0)
        between("algo.distill", self.distill, 0.0)
        between("algo.echo", self.echo, 0.0)
        between("algo.sft_weight", self.sft_weight, 0.0)
        if self.target_entropy is not None and self.entropy_bonus:
            raise ConfigError("algo.target_entropy adapts the entropy bonus; leave algo.entropy_bonus at 0")
        between("algo.top_entropy", self.top_entropy, 0.01, 1.0)
        between("algo.overlong_buffer", self.overlong_buffer, 0)
        between("algo.max_gap", self.max_gap, 0.0)
        between("algo.max_stale_gap", self.max_stale_gap, 0.0)

    def check_combination(self) -> None:
        """Refuse a combination of rewards that the advantage ignores. Runs that have one still resume."""
        if self.combine != "sum" and self.advantage in ("turn", "gdpo"):
            raise ConfigError(
                f"algo.advantage={self.advantage} requires algo.combine=sum, because it weighs rewards itself"
            )
