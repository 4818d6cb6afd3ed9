"""The sections around the learning: the generator, evaluation, the run and its folder, tracking."""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.config.coerce import between, one_of
from groupwise.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The generator."""

    kind: str = "own"
    """own (in this process, with the policy's own weights) or vllm (on the servers below)."""
    servers: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """Addresses of vLLM servers that `groupwise serve-rollouts` started."""
    exchange: str | None = None
    """Folder that trainer and servers share, for new weights. None: in the run's folder."""
    requests: int = 64
    """Groups asked of the servers at once."""
    request_seconds: float = 600.0
    """How long one request to a server may take before it counts as failed."""
    patience: float = 900.0
    """Seconds without an answer from any server after which the run stops."""
    max_sequences: int = 512
    """Sequences decoded at once."""
    block_size: int = 16
    """Tokens in one block of the KV cache."""
    kv_tokens: int | None = None
    """Size of the KV cache in tokens. None: room for `max_sequences` of the longest kind."""
    unpack: bool | None = None
    """Unpack quantized weights into a copy: fast. None: when that fits into half of the free memory."""

    def __post_init__(self) -> None:
        one_of("engine.kind", self.kind, ("own", "vllm"))
        if not self.servers:
            raise ConfigError("engine.servers needs at least one address")
        between("engine.requests", self.requests, 1)
        between("engine.request_seconds", self.request_seconds, 0.1)
        between("engine.patience", self.patience, 0.0)
        between("engine.max_sequences", self.max_sequences, 1)
        between("engine.block_size", self.block_size, 1)
        between("engine.kv_tokens", self.kv_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Held-out accuracy, before, during and after."""

    every: int = 12
    """Steps between evaluations; 0: only before and after. Turned off whole by `skip`."""
    samples: int = 8
    """Sampled answers to each held-out prompt (avg@k, pass@k), at the training temperature."""
    during: int = 96
    """Held-out examples in an evaluation during the run; before and after use all."""
    skip: bool = False
    data_dir: str | None = None
    """Folder with the files of `groupwise eval --benchmark`. None: they come from the Hugging Face hub."""

    def __post_init__(self) -> None:
        between("evaluate.every", self.every, 0)
        between("evaluate.samples", self.samples, 1)
        between("evaluate.during", self.during, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Warm start (`groupwise sft`): what to imitate. Without `data` and `from_run`: the task's answers."""

    data: str | None = None
    """Rows {prompt, completion} or {messages}: a file (JSON, JSONL, Parquet) or a Hugging Face dataset."""
    from_run: str | None = None
    """The folder of a run whose best answers to imitate."""
    min_reward: float | None = None
    """What an answer of `from_run` must have earned. None: the highest reward of the run."""
    per_prompt: int = 4
    """Most answers to one prompt of `from_run`."""
    batch: int = 32
    """Demonstrations in a step."""
    passes: int | None = None
    """Passes over the demonstrations (`--epochs`); sets run.max_steps."""
    max_length: int = 2048
    """Longest demonstration in tokens; longer ones are left out."""

    def __post_init__(self) -> None:
        if self.data is not None and self.from_run is not None:
            raise ConfigError("sft.data and sft.from_run both say what to imitate; give one of them")
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
    """grpo (`groupwise train`), sft (`groupwise sft`) or evolve (`groupwise evolve`); the command sets it."""
    max_steps: int = 36
    seed: int = 0
    output_dir: str = "runs"
    name: str | None = None
    """Folder under output_dir. None: task, model and time."""
    save_every: int = 10
    """Steps between checkpoints (one is also written at the end, on Ctrl-C and by `keep_best`)."""
    parallel: str | None = None
    """How several processes share the update: ddp (each has the policy and some of the answers), fsdp (and a
    part of every layer), zero1, zero2, zero3 (DeepSpeed) or context (a part of every answer: long ones).
    None: as accelerate says, or ddp."""
    keep_last: int = 2
    keep_best: bool = True
    """Also write and keep the checkpoint of the step with the best held-out accuracy."""

    def __post_init__(self) -> None:
        one_of("run.kind", self.kind, KINDS)
        if self.parallel is not None:
            one_of("run.parallel", self.parallel, PARALLEL)
        between("run.max_steps", self.max_steps, 1)
        between("run.save_every", self.save_every, 1)
        between("run.keep_last", self.keep_last, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackConfig:
    """Where metrics go besides the run folder."""

    trackers: tuple[str, ...] | None = None
    """trackio, wandb, tensorboard. None: trackio when it is installed."""
    project: str = "groupwise"
    rollouts_every: int = 1
    """Steps between Parquet files of rollouts."""
    report: bool = True
    """Write report.html and plots when the run ends."""

    def __post_init__(self) -> None:
        for name in self.trackers or ():
            one_of("track.trackers", name, ("trackio", "wandb", "tensorboard"))
        between("track.rollouts_every", self.rollouts_every, 1)
