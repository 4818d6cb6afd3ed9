"""Every setting, one frozen dataclass a section, documented where it is declared: here, in `model`, in
`optim` and in `surroundings`.

A value of None means "chosen for you": `resolve` replaces it before the run starts, and the run
folder's config.yaml records what was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.config.checks import between, one_of
from groupwise.config.evolve import EvolveConfig
from groupwise.config.model import BUILT_IN, TINY, TINY_SEARCH, LoraConfig, ModelConfig
from groupwise.config.optim import OptimConfig
from groupwise.config.surroundings import EngineConfig, EvaluateConfig, RunConfig, SftConfig, TrackConfig
from groupwise.config.tools import ToolsConfig
from groupwise.errors import ConfigError
from groupwise.records import Sampling

__all__ = [
    "NO_TASK",
    "TINY",
    "AlgoConfig",
    "Config",
    "EngineConfig",
    "EvaluateConfig",
    "EvolveConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "RolloutConfig",
    "RunConfig",
    "SftConfig",
    "TaskConfig",
    "ToolsConfig",
    "TrackConfig",
]

NO_TASK = "none"
"""The task of a warm start from rows alone."""
TINY_PUZZLES = {"numbers": 3, "largest": 50}
"""Countdown of the size that it was made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """What to learn."""

    name: str = "countdown"
    """A built-in task, or the path of a Python file that defines `task`."""
    data: str | None = None
    """Examples from a file (JSON, JSONL, Parquet) or a Hugging Face dataset instead of the task's own."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What the data calls a column of the task: `{question: problem}`."""
    test_data: str | None = None
    """Held-out examples, `owner/name:subset@test` for example. None: some of `data` are kept back."""
    max_examples: int | None = None
    """Use only this many training examples."""
    held_out: int = 128
    """Examples kept for evaluation; no training example equals one of them."""
    max_prompt_tokens: int | None = None
    """Longest prompt; examples with longer ones are left out. None: what context and answer leave."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The task's own settings, such as `largest: 50`; the built-in model gets puzzles of its size."""
    reward_seconds: float = 5.0
    """Time limit for one reward call; past it the rollout is recorded as failed."""
    max_failed: float = 0.5
    """Share of failed rollouts in a step past which the run stops."""

    def __post_init__(self) -> None:
        between("task.max_examples", self.max_examples, 1)
        between("task.held_out", self.held_out, 0)
        between("task.max_prompt_tokens", self.max_prompt_tokens, 1)
        between("task.reward_seconds", self.reward_seconds, 0.001, 86400.0)
        between("task.max_failed", self.max_failed, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How answers are drawn."""

    prompts: int = 24
    """Prompts in a step."""
    group_size: int = 16
    """Answers to each prompt; advantages are relative to these."""
    max_tokens: int = 112
    """Longest answer."""
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""
    refill: int = 1
    """Rounds of fresh prompts that may replace groups without signal, in each step."""
    overlap: bool = False
    """Draw the next step's answers while this step trains: one update off-policy. With engine.kind=vllm."""
    curriculum: int = 1
    """Candidates for each prompt, of which those of medium success so far are asked. 1: all are."""

    def __post_init__(self) -> None:
        between("rollout.prompts", self.prompts, 1)
        between("rollout.group_size", self.group_size, 2)
        between("rollout.max_tokens", self.max_tokens, 1)
        between("rollout.refill", self.refill, 0)
        between("rollout.curriculum", self.curriculum, 1)
        if self.temperature <= 0:
            raise ConfigError(
                f"rollout.temperature must be positive, greedy groups have no variety; got {self.temperature}"
            )
        between("rollout.top_p", self.top_p, 1e-6, 1.0)
        between("rollout.top_k", self.top_k, 0)
        between("rollout.min_p", self.min_p, 0.0, 1.0)
        if "" in self.stop:
            raise ConfigError("rollout.stop: nothing is in every text; give strings to stop at")

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            stop=self.stop,
        )


ADVANTAGES = ("grpo", "dr_grpo", "rloo", "gdpo")
COMBINATIONS = ("sum", "uniform", "std", "pca", "l2")
LOSSES = ("grpo", "bnpo", "dapo", "dr_grpo", "gspo", "cispo")
KL_ESTIMATORS = ("k1", "k2", "k3")
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoConfig:
    """How rewards become gradients."""

    advantage: str = "grpo"
    """grpo (mean, std), dr_grpo (mean), rloo (mean of the others), gdpo (each reward alone, weighted)."""
    combine: str = "sum"
    """How a group's rewards become one: sum (weighted), uniform, std, pca, l2: see docs/algorithms.md."""
    mean_filter: bool = False
    """Train only on answers whose rewards all lie on one side of their means in the group."""
    loss: str = "dapo"
    """grpo, bnpo, dapo, dr_grpo, gspo, cispo: see docs/algorithms.md."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_two_sided: float | None = None
    """Upper bound of the ratio where the advantage is negative (None: unbounded)."""
    beta: float = 0.0
    """Weight of the KL penalty against the reference policy. 0: no reference pass at all."""
    kl: str = "k3"
    correction: str = "token_truncate"
    """Importance weights for the sampler-trainer gap: none, or {token,sequence}_{truncate,mask}."""
    correction_cap: float = 2.0
    """Largest importance weight; the masking kinds drop what lies outside [1/cap, cap]."""
    entropy_bonus: float = 0.0
    top_entropy: float = 1.0
    """Share of the tokens, those of highest entropy, that carry the policy gradient (1: all)."""
    mask_truncated: bool = False
    """Leave answers that ran out of tokens out of the loss."""
    overlong_buffer: int = 0
    """Tokens before max_tokens over which a penalty grows from 0 to `overlong_penalty`."""
    overlong_penalty: float = 1.0
    max_gap: float = 0.05
    """Largest mean |log-prob difference| between sampler and trainer; past it the run stops."""
    max_stale_gap: float = 0.5
    """The same with rollout.overlap, where an update lies between the two."""

    def __post_init__(self) -> None:
        one_of("algo.advantage", self.advantage, ADVANTAGES)
        one_of("algo.combine", self.combine, COMBINATIONS)
        one_of("algo.loss", self.loss, LOSSES)
        one_of("algo.kl", self.kl, KL_ESTIMATORS)
        one_of("algo.correction", self.correction, CORRECTIONS)
        between("algo.clip_low", self.clip_low, 0.0, 1.0)
        between("algo.clip_high", self.clip_high, 0.0)
        between("algo.clip_two_sided", self.clip_two_sided, 1.0)
        between("algo.beta", self.beta, 0.0)
        between("algo.correction_cap", self.correction_cap, 1.0)
        between("algo.top_entropy", self.top_entropy, 0.01, 1.0)
        between("algo.overlong_buffer", self.overlong_buffer, 0)
        between("algo.max_gap", self.max_gap, 0.0)
        between("algo.max_stale_gap", self.max_stale_gap, 0.0)


GSPO_WIDEST_CLIP = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    evolve: EvolveConfig = field(default_factory=EvolveConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    run: RunConfig = field(default_factory=RunConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        """Check what two sections must agree on."""
        if self.lora.r == 0 and self.model.quantization is not None:
            raise ConfigError(
                "model.quantization freezes the weights: train adapters on them (lora.r), not all of them"
            )
        if self.rollout.overlap and self.engine.kind != "vllm":
            raise ConfigError("rollout.overlap needs a generator beside the trainer: engine.kind=vllm")
        if self.rollout.overlap and self.algo.correction == "none":
            raise ConfigError("rollout.overlap draws from the policy of before: it needs an algo.correction")
        if self.engine.kind == "vllm" and self.algo.top_entropy < 1:
            raise ConfigError(
                "algo.top_entropy needs entropies, which vLLM does not tell: use engine.kind=own"
            )
        for setting, value, other, limit in (
            (
                "algo.overlong_buffer",
                self.algo.overlong_buffer,
                "rollout.max_tokens",
                self.rollout.max_tokens,
            ),
            ("optim.minibatches", self.optim.minibatches or 1, "rollout.prompts", self.rollout.prompts),
        ):
            if value > limit:
                raise ConfigError(f"{setting} must be at most {other}, which is {limit}; got {value}")

    def notices(self) -> Iterator[str]:
        """Yield a sentence for each setting that is allowed but hardly ever meant."""
        if self.algo.loss == "gspo" and self.algo.clip_low > GSPO_WIDEST_CLIP:
            yield (
                f"algo.clip_low={self.algo.clip_low:g} hardly ever clips with algo.loss=gspo, whose ratios "
                "are of whole answers: its paper takes algo.clip_low=3e-4 and algo.clip_high=4e-4"
            )

    def resolve(self) -> Config:
        """Replace every None that depends on other settings alone by the value it stands for."""
        model = self.model
        if model.name == TINY and self.task.name == "search_qa":
            model = replace(model, name=TINY_SEARCH)
        tiny = model.name in BUILT_IN
        rank = self.lora.r if self.lora.r is not None else (0 if tiny and self.run.kind != "evolve" else 16)
        rates = (5e-4, 2e-4, 2e-5) if self.run.kind == "sft" else (1e-4, 1e-5, 1e-6)
        rate = self.optim.learning_rate or rates[0 if tiny else 1 if rank else 2]
        minibatches = self.optim.minibatches or (min(2, self.rollout.prompts) if tiny else 1)
        task = self.task
        if tiny and task.name == "countdown" and task.data is None and not task.options:
            task = replace(task, options=TINY_PUZZLES)
        return replace(
            self,
            model=model,
            lora=replace(self.lora, r=rank),
            optim=replace(self.optim, learning_rate=rate, minibatches=minibatches),
            task=task,
        )
