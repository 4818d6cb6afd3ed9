"""Estimate the peak memory of each part of a step, and the time of a step, before anything is loaded.

A step has two phases. While generating, the policy is there with copies of its weights and the KV cache;
while updating, with gradients and what a pass leaves behind. On a GPU the generator gives its memory back in
between where the update would otherwise be short of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from groupwise.config import Config
from groupwise.engine.prefill import PREFILL_TOKENS
from groupwise.learner.learner import GPU_LOGITS_BYTES
from groupwise.learner.micro_batch import pass_tokens
from groupwise.model.device import kept_numbers, tile_count, total_memory
from groupwise.model.ops.logprobs import CHUNK_LOGITS
from groupwise.training.resources.model_shape import ModelShape
from groupwise.training.step_metrics import resident_bytes

BYTES = {"float32": 4, "bfloat16": 2}
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in nf4: 4 bits, an 8-bit scale for every 64 weights, a scale for every 256 scales."""
FILLED = 0.95
"""Share of the memory that may be used; the rest allows for fragmentation."""
PROMPT_TOKENS = 256
"""Assumed prompt length if the task is unknown."""
SMALL_PASS = 1024
"""Tokens per pass that `remedies` yields; smaller passes save little more."""
SEQUENCES = "engine.max_sequences"
MANY_SEQUENCES, FEW_SEQUENCES = 128, 32
"""Fewest answers at once that `remedies` yields before and after quantization: 32 generate slowly."""
FIRST_USE = 70_000_000
"""Memory that libraries allocate on first use on a CPU, measured with an empty model."""
CUDA_CONTEXT = 0
"""Not included: the CUDA context, about 0.5 GB, which torch.cuda.max_memory_allocated does not count."""
CHUNKS_LEFT = 12
"""Chunks of logits whose memory the CPU heap does not reuse because of fragmentation, measured."""
SCORE_BYTES = 24
"""Bytes per score of attention while it is differentiated: six float32 values, measured."""
GPU_CHUNK_LOGITS = 1 << 26
"""Logits that `model.fused_logprobs`, which only a GPU can import, holds at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """The device of a run."""

    kind: str
    """cpu, cuda or mps."""
    total: int
    """Bytes of memory of the device."""
    program: int
    """Bytes used before any model is loaded: libraries on a CPU, the context on a GPU."""

    @classmethod
    def of(cls, device: torch.device) -> DeviceSpec:
        """Return the memory of a device of this machine."""
        program = resident_bytes() + FIRST_USE if device.type == "cpu" else CUDA_CONTEXT
        return cls(kind=device.type, total=total_memory(device), program=program)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One use of memory, in either phase or both."""

    name: str
    bytes: float
    generating: bool = True
    updating: bool = True
    stays: bool = True
    """Kept from step to step unless other parts need the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """All parts and their totals."""

    parts: tuple[MemoryPart, ...]
    place: DeviceSpec

    @property
    def generating(self) -> float:
        return sum(part.bytes for part in self.parts if part.generating)

    @property
    def updating(self) -> float:
        return sum(part.bytes for part in self.parts if part.updating)

    @property
    def peak(self) -> float:
        return max(self.generating, self.updating)

    @property
    def fits(self) -> bool:
        return self.peak <= FILLED * self.place.total


def preflight(config: Config, shape: ModelShape, place: DeviceSpec, *, prompt_tokens: int) -> MemoryEstimate:
    """Predict the memory of a resolved configuration. Answers are assumed to have the maximum length."""
    assert config.lora.r is not None, "the config is resolved before it is looked at"
    size = BYTES[config.model.dtype or ("bfloat16" if place.kind == "cuda" else "float32")]
    weights = weight_bytes(shape, size)
    always = [
        MemoryPart(name="program", bytes=place.program),
        MemoryPart(name="weights", bytes=weights),
        *trained_parts(config, shape, size),
    ]
    generator = list(generating_parts(config, shape, size, place, prompt_tokens=prompt_tokens, taken=weights))
    updating = list(updating_parts(config, shape, size, place, prompt_tokens=prompt_tokens))
    held = sum(part.bytes for part in (*always, *generator) if part.stays)
    if place.kind == "cpu" or held + most_bytes(config, shape, size, place) <= FILLED * place.total:
        generator = [replace(part, updating=part.stays) for part in generator]
    parts = (*always, *generator, *updating)
    return MemoryEstimate(parts=tuple(part for part in parts if part.bytes), place=place)


def most_bytes(config: Config, shape: ModelShape, size: int, place: DeviceSpec) -> float:
    """Return the learner's upper bound on an update; the engine keeps its memory if that much is free."""
    recomputed = bool(config.model.gradient_checkpointing)
    each = kept_numbers(shape.width, shape.inner, shape.layers, recomputed=recomputed) * size
    passing = pass_budget(config, shape, size, place) * each
    return passing + GPU_LOGITS_BYTES + 16 * shape.trained_size(config.lora)


def weight_bytes(shape: ModelShape, size: int) -> float:
    if shape.quantization is None:
        return shape.parameters * size
    each = NF4_BYTES if shape.quantization == "nf4" else 1.0
    return shape.linear_size * each + (shape.parameters - shape.linear_size) * size


def trained_parts(config: Config, shape: ModelShape, size: int) -> Iterator[MemoryPart]:
    """Return the bytes kept per trained parameter. Adapters and their optimizer are float32."""
    if config.lora.r:
        yield MemoryPart(name="adapters", bytes=4 * shape.adapter_size(config.lora))
        yield MemoryPart(name="saved modules", bytes=shape.saved_size(config.lora) * size)
    elif config.algo.beta:
        yield MemoryPart(name="reference", bytes=shape.parameters * size)
    in_eight_bits = 1.02 * shape.trained_size(config.lora)
    moment = in_eight_bits if config.optim.kind == "adamw8bit" else trained_bytes(config, shape, size)
    yield MemoryPart(name="optimizer", bytes=0 if config.optim.offload else 2 * moment)


def trained_bytes(config: Config, shape: ModelShape, size: int) -> int:
    """Return the bytes of all trained parameters; fully trained modules have the model's dtype."""
    if not config.lora.r:
        return shape.trained_size(config.lora) * size
    return 4 * shape.adapter_size(config.lora) + size * shape.saved_size(config.lora)


def full_size(shape: ModelShape, size: int) -> int:
    """Return the bytes of weights, gradients and optimizer if every weight is trained."""
    return 4 * size * shape.parameters


def generating_parts(
    config: Config, shape: ModelShape, size: int, place: DeviceSpec, *, prompt_tokens: int, taken: float
) -> Iterator[MemoryPart]:
    """Yield the engine's weight copies, KV cache and passes."""
    rollout, on_cpu = config.rollout, place.kind == "cpu"
    sequences = min(rollout.prompts * rollout.group_size, config.engine.max_sequences)
    groups = min(rollout.prompts, -(-sequences // rollout.group_size))
    block = config.engine.block_size
    answer, prompt = (-(-tokens // block) * block for tokens in (rollout.max_tokens, prompt_tokens))
    tokens = sequences * answer + groups * prompt
    if config.engine.kv_tokens is not None:
        tokens = min(tokens, config.engine.kv_tokens)
    copies = copied(config, shape) * size
    if shape.quantization and not unpacks(config, copies, place.total - taken):
        copies = 0
    elif config.engine.quantization:
        copies = shape.linear_size
    yield MemoryPart(name="weight copies", bytes=copies, updating=False)
    each = 2 * shape.layers * shape.key_width * config.engine.key_bytes(shape.head_size, size)
    yield MemoryPart(name="KV cache", bytes=tokens * each, updating=False)
    # One layer of a pass over all sequences: keys, values and activations.
    gathered = 2 * (sequences * answer + groups * prompt) * shape.key_width if on_cpu else 0
    width = 6 * shape.width + 3 * shape.inner
    prefill = min(PREFILL_TOKENS, groups * prompt) * width
    if on_cpu:
        logits = (4 * sequences + groups) * shape.vocabulary * 4
    else:
        logits = (2 * sequences + groups) * shape.vocabulary * size
    passing = max(gathered + sequences * width, prefill) * size + logits
    # An adapter is merged and FP8 converted in float32: the matrix, the update and the sum.
    if not on_cpu and copies and (config.lora.r or config.engine.quantization):
        passing = max(passing, 12 * max(linear.size for linear in shape.linears))
    if holds_scores(shape, size, place):
        passing = max(passing, min(PREFILL_TOKENS, groups * prompt) * prompt * shape.heads * SCORE_BYTES)
    yield MemoryPart(name="generating passes", bytes=passing, updating=False, stays=False)


def unpacks(config: Config, copies: float, free: float) -> bool:
    """Whether generation unpacks quantized weights, by the policy's rule."""
    return copies <= free / 2 if config.engine.unpack is None else config.engine.unpack


def copied(config: Config, shape: ModelShape) -> int:
    """Return the number of weights that generation copies: stacked, merged with adapters or unpacked."""
    if config.lora.r or shape.quantization:
        return shape.linear_size
    stacked = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return sum(linear.size for linear in shape.linears if linear.name.endswith(stacked))


def holds_scores(shape: ModelShape, size: int, place: DeviceSpec) -> bool:
    """Whether attention holds its scores: the flash kernels compute no soft cap, and on a GPU no float32."""
    return shape.capped or (place.kind != "cpu" and size == 4)


def score_count(config: Config, shape: ModelShape, *, tokens: float, prompt_tokens: int) -> float:
    """Return the most scores of attention that a layer holds in a pass of `tokens`.

    Those within prompts, within answers, and of answers to prompts are computed one after the other.
    """
    if config.run.kind == "sft":
        return shape.heads * tokens * config.sft.max_length
    answer, group = config.rollout.max_tokens, config.rollout.group_size
    answers = tokens / (answer + prompt_tokens / group)
    return shape.heads * answers * max(answer**2, answer * prompt_tokens, prompt_tokens**2 / group)


def updating_parts(
    config: Config, shape: ModelShape, size: int, place: DeviceSpec, *, prompt_tokens: int
) -> Iterator[MemoryPart]:
    tokens = fullest_pass(config, shape, size, place, prompt_tokens=prompt_tokens)
    activations = tokens * activation_numbers(config, shape) * size
    yield MemoryPart(name="activations", bytes=activations, generating=False)
    if holds_scores(shape, size, place):
        scores = score_count(config, shape, tokens=tokens, prompt_tokens=prompt_tokens)
        yield MemoryPart(name="attention scores", bytes=SCORE_BYTES * scores, generating=False)
    gradients = float(trained_bytes(config, shape, size))
    step = config.rollout.prompts * (prompt_tokens + config.rollout.group_size * config.rollout.max_tokens)
    if place.kind != "cpu" and step <= tokens * (config.optim.minibatches or 1):
        # In a single pass, activations are freed as fast as gradients are allocated.
        gradients = max(0.0, gradients - activations)
    yield MemoryPart(name="gradients", bytes=gradients, generating=False)
    # While a layer is differentiated, the gradients of its activations exist as well.
    layer = inner = 0
    inner_tokens: float = tokens
    if config.model.gradient_checkpointing:
        inner = shape.inner_kept * shape.inner
        layer = layer_numbers(shape) - inner
        # With dropout, torch recomputes the layers, and PEFT's own forward pass is not tiled.
        tiled = shape.tiled and not (config.lora.dropout or config.lora.dora)
        inner_tokens = tokens / tile_count(tokens) if tiled else tokens
    if place.kind == "cpu":
        passing = (tokens * (layer + 4 * shape.width) + inner_tokens * (inner + 3 * shape.inner)) * size
        yield MemoryPart(name="backward pass", bytes=passing, generating=False)
        chunks = min(tokens * shape.vocabulary / CHUNK_LOGITS, CHUNKS_LEFT)
        yield MemoryPart(name="logits", bytes=chunks * 4 * CHUNK_LOGITS, generating=False)
        return
    passing = (tokens * (layer + 3 * shape.width) + inner_tokens * (inner + shape.inner)) * size
    chunk = min(tokens * shape.vocabulary, GPU_CHUNK_LOGITS)
    logits = chunk * (4 + size) + 3 * tokens * shape.width * size
    if shape.trains_head(config.lora):
        logits += shape.head_params * (4 + size)  # the output layer's gradient, accumulated in float32
    # The two peaks do not coincide: take the larger.
    name = "logits" if logits > passing else "backward pass"
    yield MemoryPart(name=name, bytes=max(logits, passing), generating=False)


def pass_budget(config: Config, shape: ModelShape, size: int, place: DeviceSpec) -> int:
    """Return the tokens per pass, as the learner chooses them."""
    recomputed = bool(config.model.gradient_checkpointing)
    each = kept_numbers(shape.width, shape.inner, shape.layers, recomputed=recomputed) * size
    return config.optim.micro_batch_tokens or pass_tokens(
        gpu_memory=None if place.kind == "cpu" else place.total, token_bytes=each, recomputes=recomputed
    )


def fullest_pass(
    config: Config, shape: ModelShape, size: int, place: DeviceSpec, *, prompt_tokens: int
) -> int:
    """Return the tokens of the largest pass as `learner.micro_batch` packs it."""
    budget = pass_budget(config, shape, size, place)
    if config.run.kind == "sft":
        return max(budget, config.sft.max_length)
    rollout = config.rollout
    most = tokens = 0
    for member in range(rollout.prompts * rollout.group_size):
        first = member % rollout.group_size == 0
        added = rollout.max_tokens + (prompt_tokens if first else 0)
        if tokens and tokens + added > budget:
            tokens, added = 0, rollout.max_tokens + prompt_tokens
        tokens += added
        most = max(most, tokens)
    return most


def layer_numbers(shape: ModelShape) -> int:
    """Return the activations that a layer keeps for each token, counted in the decoders of Llama and Qwen.

    What enters either norm and what leaves it, queries and what they attend to, keys and values, and
    vectors of the gate.
    """
    attention = 2 * shape.heads * shape.head_size + 2 * shape.key_width
    return 4 * shape.width + attention + shape.inner_kept * shape.inner


def activation_numbers(config: Config, shape: ModelShape) -> int:
    """Return the activations that a whole pass keeps for each token."""
    ends = 2 * shape.width
    if config.model.gradient_checkpointing:
        return shape.layers * shape.width + ends
    low = (config.lora.r or 0) * len(shape.adapted(config.lora)) if config.lora.r else 0
    return shape.layers * layer_numbers(shape) + low + ends


@dataclass(frozen=True, slots=True)
class Remedy:
    """A setting that reduces the memory of a run."""

    setting: str
    """By full name."""
    value: Any
    effect: str

    def on(self, config: Config, shape: ModelShape) -> tuple[Config, ModelShape]:
        """Return the configuration with this setting, and the shape of its model."""
        section, _, key = self.setting.partition(".")
        changed = replace(getattr(config, section), **{key: self.value})
        if self.setting == "model.quantization":
            shape = replace(shape, quantization=self.value)
        return replace(config, **{section: changed}), shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run with the settings that it needs to fit."""

    remedies: Mapping[Remedy, float] = field(default_factory=dict)
    """With the peak in bytes without each of them."""
    config: Config
    shape: ModelShape
    recomputing: str
    """Whether gradient checkpointing is on, and why."""
    estimate: MemoryEstimate


def remedies(now: Plan) -> Iterator[Remedy]:
    """Yield settings that reduce what does not fit, the least costly first."""
    config, place = now.config, now.estimate.place
    updating, generating = (
        x > FILLED * place.total for x in (now.estimate.updating, now.estimate.generating)
    )
    if updating and not config.model.gradient_checkpointing:
        yield Remedy("model.gradient_checkpointing", True, "activations of one layer at a time, slower")
    if updating and (config.optim.micro_batch_tokens or SMALL_PASS + 1) > SMALL_PASS:
        yield Remedy("optim.micro_batch_tokens", SMALL_PASS, "smaller passes, the same gradient")
    if updating and not config.optim.offload and not config.lora.r and place.kind != "cpu":
        yield Remedy("optim.offload", True, "the optimizer's state in main memory, slower")
    if updating and not config.lora.r:
        yield Remedy("lora.r", 16, "gradients and optimizer for adapters alone")
    answers = config.rollout.prompts * config.rollout.group_size
    fewer = Remedy(SEQUENCES, min(answers, config.engine.max_sequences) // 2, "fewer answers at once, slower")
    if generating and fewer.value >= MANY_SEQUENCES:
        yield fewer
    if config.lora.r and now.shape.quantization is None:
        yield Remedy("model.quantization", "nf4", "the frozen weights in four bits, slower")
    if generating and fewer.value >= FEW_SEQUENCES:
        yield fewer


def plan(config: Config, shape: ModelShape, place: DeviceSpec, *, prompt_tokens: int) -> Plan:
    """Apply remedies in order until the run fits, and leave out those that turn out not to be needed."""
    chosen: dict[str, Remedy] = {}

    def planned(these: Iterable[Remedy]) -> Plan:
        changed, with_shape = config, shape
        for remedy in these:
            changed, with_shape = remedy.on(changed, with_shape)
        changed, recomputing = choose_recomputing(
            changed, with_shape, place, free=place.total, prompt_tokens=prompt_tokens
        )
        estimate = preflight(changed, with_shape, place, prompt_tokens=prompt_tokens)
        return Plan(config=changed, shape=with_shape, recomputing=recomputing, estimate=estimate)

    def without(*settings: str) -> MemoryEstimate:
        return planned(remedy for name, remedy in chosen.items() if name not in settings).estimate

    while not (now := planned(chosen.values())).estimate.fits:
        if (remedy := next(remedies(now), None)) is None:
            break
        chosen[remedy.setting] = remedy
    needs = {"lora.r": ("lora.r", "model.quantization")}  # quantized weights are frozen
    if now.estimate.fits:
        for setting in tuple(chosen):
            if setting in chosen and without(*needs.get(setting, (setting,))).fits:
                for name in needs.get(setting, (setting,)):
                    chosen.pop(name, None)
        while (limit := chosen.get(SEQUENCES)) is not None:  # as many as fit
            more = {**chosen, SEQUENCES: replace(limit, value=2 * limit.value)}
            if not planned(more.values()).estimate.fits:
                break
            chosen = more
    peaks = {one: without(*needs.get(name, (name,))).peak for name, one in chosen.items()}
    return replace(planned(chosen.values()), remedies=peaks)


def choose_recomputing(
    config: Config, shape: ModelShape, place: DeviceSpec, *, free: int, prompt_tokens: int = PROMPT_TOKENS
) -> tuple[Config, str]:
    """Choose model.gradient_checkpointing if it is not set, and explain why: on if activations do not fit.

    `free`: bytes that the run may take. Generating is not looked at: it keeps no activations.
    """
    if config.model.gradient_checkpointing is not None:
        state = "on" if config.model.gradient_checkpointing else "off"
        return config, f"gradient checkpointing is {state}, as the settings say"
    kept = replace(config, model=replace(config.model, gradient_checkpointing=False))
    needed = preflight(kept, shape, place, prompt_tokens=prompt_tokens).updating
    sizes = f"about {needed / 1e9:.1f} GB of the {free / 1e9:.1f} GB that are free"
    if needed <= FILLED * free:
        return kept, f"gradient checkpointing is off: without it an update takes {sizes}"
    again = replace(config, model=replace(config.model, gradient_checkpointing=True))
    return again, f"gradient checkpointing is on: without it an update would take {sizes}"


SHARE = {"cpu": 0.45, "cuda": 0.4}
"""Share of the rate of one large product that whole passes reach."""
STEP_SECONDS = {"cpu": 0.002, "cuda": 0.0005}
"""Overhead of a decoding step in seconds, besides its arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """The speed of a device."""

    kind: str
    flops: float
    """Floating-point operations per second in one large product."""
    bandwidth: float
    """Bytes read per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted seconds of one step."""

    rollout: float
    update: float

    @property
    def step(self) -> float:
        return self.rollout + self.update


def measure_machine(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Time one product and one copy; takes about a second."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = seconds_of(lambda: a @ b, device)
    whole = torch.empty((1 << 26) if device.type == "cpu" else (1 << 30), dtype=torch.int8, device=device)
    copy = seconds_of(whole.clone, device)
    return DeviceRates(kind=device.type, flops=2 * size**3 / product, bandwidth=2 * whole.numel() / copy)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of several timings."""
    best = float("inf")
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def pace(
    config: Config, shape: ModelShape, machine: DeviceRates, *, prompt_tokens: int, answer_tokens: float
) -> StepTime:
    """Predict a step in which answers have `answer_tokens` on average."""
    rollout = config.rollout
    answers = rollout.prompts * rollout.group_size
    rate = machine.flops * SHARE[machine.kind]
    size = BYTES[config.model.dtype or ("float32" if machine.kind == "cpu" else "bfloat16")]
    active = shape.linear_size + shape.head_params
    at_once = min(answers, config.engine.max_sequences)
    steps = -(-answers // at_once) * answer_tokens
    cache = at_once * (prompt_tokens + answer_tokens) * 2 * shape.layers * shape.key_width * size
    reading = (active * size + cache) / machine.bandwidth
    decoding = steps * (max(2 * active * at_once / rate, reading) + STEP_SECONDS[machine.kind])
    prefill = 2 * shape.linear_size * rollout.prompts * prompt_tokens / rate
    # Forward and backward; frozen weights need no gradient. The output layer runs in both passes.
    passes = (4 if config.lora.r else 6) + (2 if config.model.gradient_checkpointing else 0)
    trained = answers * answer_tokens
    tokens = trained + rollout.prompts * prompt_tokens
    reference = 2 if config.algo.beta else 0
    update = ((passes + reference) * shape.linear_size * tokens + passes * shape.head_params * trained) / rate
    return StepTime(rollout=decoding + prefill, update=update)
