"""The settings around the algorithm: engine, tools, agent, evaluate, sft, evolve, run, track.

The docstring of each field is its user documentation: `groupwise config` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.config.coerce import between, finite, is_function_name, one_of, one_of_or_function
from groupwise.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The generation engine."""

    kind: str = "own"
    """own (in this process, sharing the policy's weights), vllm (on the servers below), or a function that
    makes your own engine as module:function or FILE.py:function."""
    servers: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """URLs of vLLM servers started with `groupwise serve-rollouts`."""
    exchange: str | None = None
    """Folder for weight sync, shared by trainer and servers. None: inside the run folder."""
    requests: int = 64
    """Maximum groups in flight on the servers."""
    request_seconds: float = 600.0
    """Timeout of one request to a server."""
    patience: float = 900.0
    """Stop the run after this many seconds without a response from any server."""
    max_sequences: int = 512
    """Maximum sequences in one decode batch."""
    block_size: int = 16
    """Tokens per KV cache block."""
    kv_tokens: int | None = None
    """KV cache size in tokens. None: enough for `max_sequences` sequences of maximum length."""
    speculative: bool = True
    """Draft tokens from what followed the same context before, and check several in one step, where few
    sequences run. Samples the same tokens, up to rounding of the logits. Own engine on a GPU only, and not
    with mixtures of experts."""
    quantization: str | None = None
    """fp8: a run generates with weights and activations in 8-bit floating point. The log-probabilities are
    then further from the trainer's: `algo.correction` corrects for it, `algo.max_gap` bounds it. Own engine,
    NVIDIA GPUs from compute capability 9.0 on, bfloat16 models whose layers can be fused (Llama, Qwen,
    Mistral …). The model that is saved keeps its dtype."""
    kv_cache_dtype: str | None = None
    """fp8: the same for the KV cache, which then takes half the memory, under the same conditions. None: the
    dtype of the model."""
    unpack: bool | None = None
    """Generate with a dequantized copy of quantized weights: faster, more memory. None: if the copy fits
    into half of the free memory."""

    @property
    def fp8(self) -> tuple[str, ...]:
        """The settings that ask for FP8, for messages."""
        named = {"engine.quantization": self.quantization, "engine.kv_cache_dtype": self.kv_cache_dtype}
        return tuple(f"{setting}=fp8" for setting, value in named.items() if value == "fp8")

    def check_fp8(self, *, supported: bool, bfloat16: bool) -> None:
        """Refuse FP8 where it does not run: whether the device computes in it, and the model's dtype."""
        asked = " and ".join(self.fp8)
        if asked and not supported:
            raise ConfigError(
                "FP8 requires Triton and an NVIDIA GPU of compute capability 9.0 or later, such as an H100; "
                f"in a new run, leave out {asked}"
            )
        if asked and not bfloat16:
            raise ConfigError(f"FP8 requires model.dtype=bfloat16; set it, or leave out {asked}")

    def key_bytes(self, head_size: int, size: int) -> float:
        """Return the bytes of a number in the KV cache; `size`: those of the model's dtype."""
        return 1 + 4 / head_size if self.kv_cache_dtype else size  # a head in FP8 has a scale in float32

    def without_fp8(self) -> EngineConfig:
        """Return the settings to generate with a trained model as it is saved."""
        return replace(self, quantization=None, kv_cache_dtype=None)

    def __post_init__(self) -> None:
        one_of_or_function("engine.kind", self.kind, ("own", "vllm"))
        if not self.servers:
            raise ConfigError("engine.servers needs at least one URL")
        between("engine.requests", self.requests, 1)
        between("engine.request_seconds", self.request_seconds, 0.1)
        between("engine.patience", self.patience, 0.0)
        between("engine.max_sequences", self.max_sequences, 1)
        between("engine.block_size", self.block_size, 1)
        between("engine.kv_tokens", self.kv_tokens, 1)
        if self.quantization is not None:
            one_of("engine.quantization", self.quantization, ("fp8",))
        if self.kv_cache_dtype is not None:
            one_of("engine.kv_cache_dtype", self.kv_cache_dtype, ("fp8",))
        if self.fp8 and self.kind != "own":
            asked = " and ".join(self.fp8)
            raise ConfigError(
                f"FP8 requires groupwise's own engine; set engine.kind=own, or leave out {asked}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsConfig:
    """Multi-turn rollouts of tasks with tools or an environment. Other tasks have a single turn."""

    max_turns: int = 4
    """Maximum turns of the policy per rollout; `rollout.max_tokens` limits each turn."""
    max_calls: int = 8
    """Maximum tool calls per rollout; further calls return an error to the policy."""
    max_tokens: int = 640
    """Maximum tokens after the prompt, with tool results and replies. A turn starts only if it fits."""
    seconds: float = 10.0
    """Time limit of one tool call, or of one reply of an environment."""
    result_characters: int = 4000
    """Maximum length of a tool result or a reply; longer ones are truncated."""
    overlap: bool | None = None
    """Run tools while generation continues. None: on a GPU, or if a tool is async. Set it to false for
    bitwise reproducible runs."""

    def __post_init__(self) -> None:
        between("tools.max_turns", self.max_turns, 1)
        between("tools.max_calls", self.max_calls, 0)
        between("tools.max_tokens", self.max_tokens, 1)
        between("tools.seconds", self.seconds, 0.001)
        between("tools.result_characters", self.result_characters, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Rollouts of a task with an agent: a program that calls the policy through an OpenAI client."""

    seconds: float = 600.0
    """Time limit of one rollout, with the time that its model calls take. Longer ones fail."""
    max_calls: int = 64
    """Maximum model calls per rollout; further calls get an error."""
    concurrency: int = 64
    """Agents that run at the same time."""
    overlap: bool | None = None
    """Generate while other agents compute. False: wait until every running agent waits for the policy, which
    makes runs bitwise reproducible. None: on a GPU."""

    def __post_init__(self) -> None:
        between("agent.seconds", self.seconds, 0.001)
        between("agent.max_calls", self.max_calls, 1)
        between("agent.concurrency", self.concurrency, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Evaluation of held-out accuracy before, during and after training."""

    every: int = 12
    """Steps between evaluations. 0: only before and after training."""
    samples: int = 8
    """Completions sampled per held-out prompt (avg@k, pass@k), at the training temperature."""
    during: int = 96
    """Held-out examples used during training; the evaluations before and after use all of them."""
    skip: bool = False
    """Skip all evaluations."""
    data_dir: str | None = None
    """Folder with the data files for `groupwise eval --benchmark`. None: load them from the Hugging Face
    Hub."""

    def __post_init__(self) -> None:
        between("evaluate.every", self.every, 0)
        between("evaluate.samples", self.samples, 1)
        between("evaluate.during", self.during, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Supervised fine-tuning (`groupwise sft`), by default on the worked solutions of the task."""

    data: str | None = None
    """Rows {prompt, completion} or {messages}: a file (JSON, JSONL, Parquet) or a Hugging Face dataset."""
    from_run: str | None = None
    """Folder of a run whose best completions become demonstrations."""
    min_reward: float | None = None
    """Minimum reward of a completion from `from_run`. None: the highest reward in that run."""
    per_prompt: int = 4
    """Maximum completions per prompt from `from_run`."""
    batch: int = 32
    """Demonstrations per step."""
    passes: int | None = None
    """Epochs over the demonstrations (`--epochs`); sets run.max_steps."""
    max_length: int = 2048
    """Maximum length of a demonstration in tokens; longer ones are skipped."""

    def __post_init__(self) -> None:
        if self.data is not None and self.from_run is not None:
            raise ConfigError("sft.data and sft.from_run are mutually exclusive; set only one of them")
        between("sft.per_prompt", self.per_prompt, 1)
        between("sft.batch", self.batch, 1)
        between("sft.passes", self.passes, 1)
        between("sft.max_length", self.max_length, 2)


KINDS = ("grpo", "sft", "evolve")
PARALLEL = ("ddp", "fsdp", "zero1", "zero2", "zero3", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The run and its folder."""

    kind: str = "grpo"
    """grpo (`groupwise train`), sft (`groupwise sft`) or evolve (`groupwise evolve`). Set by the command."""
    max_steps: int = 36
    """Number of training steps. If unset, 36 for the built-in models and 100 for all others."""
    num_epochs: int | None = None
    """Epochs over the training examples; sets max_steps to one step for each rollout.prompts examples. For a
    task with a finite number of examples."""
    seed: int = 0
    """Random seed."""
    output_dir: str = "runs"
    """Parent folder of all runs."""
    name: str | None = None
    """Name of the run's folder in output_dir. None: built from task, model and time."""
    save_every: int = 10
    """Steps between checkpoints. One is also saved at the end, on Ctrl-C and by `keep_best`."""
    parallel: str | None = None
    """Multi-GPU strategy: ddp (replicated policy, each rank trains part of the batch), fsdp (layers sharded
    too), zero1, zero2, zero3 (DeepSpeed) or context (context parallel: sequences are split, for long
    completions). None: the accelerate configuration, or ddp."""
    keep_last: int = 2
    """Number of most recent checkpoints to keep."""
    keep_best: bool = True
    """Also save and keep the checkpoint with the best held-out accuracy."""
    callbacks: tuple[str, ...] = ()
    """Callbacks, each as module:Class or FILE.py:Class; see docs/extending.md."""
    deterministic: bool = False
    """Use only GPU kernels that give the same bits every time: a resumed run then ends exactly as one that
    was never stopped. An update takes about as long. On a CPU this always holds."""

    def __post_init__(self) -> None:
        one_of("run.kind", self.kind, KINDS)
        if self.parallel is not None:
            one_of("run.parallel", self.parallel, PARALLEL)
        between("run.max_steps", self.max_steps, 1)
        between("run.num_epochs", self.num_epochs, 1)
        between("run.save_every", self.save_every, 1)
        between("run.keep_last", self.keep_last, 1)
        for name in self.callbacks:
            if not is_function_name(name):
                raise ConfigError(f"run.callbacks must be module:Class or FILE.py:Class; got {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackConfig:
    """Experiment trackers and the files that record a run."""

    trackers: tuple[str, ...] | None = None
    """trackio, wandb, tensorboard, mlflow. None: trackio if it is installed."""
    project: str = "groupwise"
    """Project name in the trackers."""
    rollouts_every: int = 1
    """Save rollouts as a Parquet file every this many steps."""
    report: bool = True
    """Write report.html and plots at the end of the run."""

    def __post_init__(self) -> None:
        for name in self.trackers or ():
            one_of("track.trackers", name, ("trackio", "wandb", "tensorboard", "mlflow"))
        between("track.rollouts_every", self.rollouts_every, 1)


METHODS = ("halving", "tournament", "pbt", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveConfig:
    """Population-based search on one base model (`groupwise evolve`)."""

    method: str = "halving"
    """halving (successive halving), tournament (with elitism), pbt, or random (no replacement)."""
    population: int = 4
    """Number of members."""
    every: int = 12
    """Steps between selections. Every member is evaluated before each selection."""
    tokens: int | None = None
    """Stop after all members together have sampled this many tokens, in training and evaluation."""
    target: float | None = None
    """Stop when the best member reaches this accuracy."""
    vary: Mapping[str, Any] = field(default_factory=dict)
    """Settings that vary between members, with bounds: `{optim.learning_rate: [1e-6, 1e-4], weights.format:
    [0, 1]}`."""
    spread: bool = True
    """Sample initial values from these bounds for every member but the first. false: all start equal."""
    certain: bool = True
    """Replace a member only by a significantly better one (95 %, paired over the same prompts)."""
    tournament: int = 2
    """Tournament size: members sampled per tournament."""
    elitism: bool = True
    """Keep the best member unchanged."""
    mutate: float = 0.857
    """Probability that a surviving member gets a new value for one setting (6 in 7)."""
    smaller: float = 0.8
    """Mutation multiplies a value by `smaller` or `larger`, chosen at random."""
    larger: float = 1.2
    share: float = 0.25
    """pbt: fraction of the population that is replaced by copies of the best members."""

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
                raise ConfigError(f"evolve.vary: {name} must be [low, high]; got {bounds!r}")
            for bound in bounds:
                finite(f"evolve.vary: a bound of {name}", bound)
            if not bounds[0] <= bounds[1]:
                raise ConfigError(
                    f"evolve.vary: the lower bound of {name}, {bounds[0]}, is above its upper bound, "
                    f"{bounds[1]}; swap them"
                )
        between("evolve.smaller", self.smaller, 1e-6, 1.0)
        between("evolve.larger", self.larger, 1.0)
