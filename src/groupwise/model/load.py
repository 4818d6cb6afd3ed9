"""Load a policy by model name, with or without LoRA adapters, quantization and a frozen reference."""

from __future__ import annotations

import ctypes
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from groupwise.config.schema import BUILT_IN, SMOLLM2, LoraConfig, ModelConfig
from groupwise.errors import ConfigError
from groupwise.model.adapters.lora import with_adapter
from groupwise.model.adapters.quantization import (
    check_installed,
    dequantize_in_forward,
    quantization_of,
    settings_for,
)
from groupwise.model.attention import hf_interface
from groupwise.model.attention.compatibility import check_attention
from groupwise.model.device import device_of, explain_out_of_memory, raise_device_error, return_freed_memory
from groupwise.model.general_forward import text_decoder
from groupwise.model.ops.checkpointing import recompute_layers
from groupwise.model.ops.fused_modules import use_fused_rmsnorm, use_fused_swiglu
from groupwise.model.ops.lora_linear import use_fast_linears, use_fused_lora
from groupwise.model.ops.rotary import use_fused_rotary
from groupwise.model.policy import Policy
from groupwise.model.resolve import (
    auto_class,
    check_config,
    check_sizes,
    first_line,
    model_folder,
    text_part_notice,
    unloadable,
)
from groupwise.model.tokenizer import TEMPLATE_ARGS
from groupwise.rewards.llm_judge import RewardModel


@explain_out_of_memory(
    "loading the model", "use a smaller model, model.dtype=bfloat16 or model.quantization=nf4"
)
def load_policy(
    model: ModelConfig, lora: LoraConfig, *, trained: Path | None = None, reference: bool = False
) -> Policy:
    """Load the policy. `trained`: a checkpoint folder to resume from. `reference`: add a frozen copy.

    The frozen copy is always the model `model.name`, so a resumed run keeps its reference.
    """
    keep_quiet()
    device = device_of(model.device)
    dtype = getattr(torch, model.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if device.type == "cpu":
        keep_freed_memory()
    source = model_folder(model.name)
    tokenizer = load_tokenizer(source, template_args=model.chat_template_args)
    whole = trained if trained is not None and not lora.r else source
    policy_model = causal_model(whole, dtype, device, quantization=model.quantization)
    general = check_attention(policy_model, name=model.name)
    use_fused_ops(policy_model, packed=general is None)
    if lora.r:
        if model.name not in (*BUILT_IN, SMOLLM2) and not Path(model.name).expanduser().is_dir():
            policy_model.name_or_path = model.name  # adapter files then name the base as the user did
        policy_model = with_adapter(policy_model, lora, trained)
        use_fused_lora(policy_model)
    frozen = None
    if reference and not lora.r:
        frozen = causal_model(source, dtype, device).requires_grad_(False).eval()
        if general is None:
            frozen.set_attn_implementation(hf_interface.NAME)
        use_fused_ops(frozen, packed=general is None)
    policy = Policy(policy_model, tokenizer, reference=frozen, general=general)
    policy.text_part = text_part_notice(check_config(source, name=model.name))
    if model.gradient_checkpointing:
        recompute_layers(policy)
    return policy


def load_for_generation(model: ModelConfig, *, rank: int, trained: Path | None) -> Policy:
    """Load a policy for generation only: a full model, or a model with a LoRA adapter of the given rank."""
    policy = load_policy(replace(model, gradient_checkpointing=False), LoraConfig(r=rank), trained=trained)
    policy.model.requires_grad_(False)
    return policy


def use_fused_ops(model: Any, *, packed: bool = True) -> None:
    """Replace the forward passes of known modules by fused ones that take less time and memory.

    `packed`: whether the model computes packed attention.
    """
    use_fast_linears(model)
    use_fused_rmsnorm(model)
    if packed:
        use_fused_rotary(model)
    use_fused_swiglu(model)


def keep_quiet() -> None:
    """Silence transformers' progress bars and warnings, which would overwrite the live display.

    `causal_model` raises for everything that transformers would warn about while loading. If DeepSpeed is
    installed, transformers imports it, and it logs that there is no GPU.
    """
    from transformers.utils import logging as hugging_face

    hugging_face.set_verbosity_error()  # type: ignore[no-untyped-call]
    hugging_face.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("DeepSpeed").addFilter(only_errors)
    # PEFT itself causes this warning: it lists experts under two names and uses only one.
    warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")


def only_errors(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def causal_model(
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    quantization: str | None = None,
    pickled: bool = False,
) -> Any:
    """Load a complete model or raise ConfigError. `quantization`: quantize it if it is not quantized on disk.

    `dtype` None keeps the dtype on disk. Weights are read from safetensors or, with `pickled`, from pickles
    that may contain tensors only.
    """
    check_sizes(folder)
    options: dict[str, Any] = {}
    stored = quantization_of(folder)
    config = check_config(folder, name=str(folder))
    if quantization and stored and quantization != stored:
        raise ConfigError(
            f"the weights in {folder} are already quantized to {stored}; remove "
            f"model.quantization={quantization} or use the original model"
        )
    if stored or quantization:
        check_installed()
        options["device_map"] = {"": device}  # quantized weights cannot be moved afterwards
    if quantization and not stored:
        options["quantization_config"] = settings_for(quantization, dtype)
    try:
        loaded: Any = auto_class(config).from_pretrained(
            str(folder),
            dtype=dtype or "auto",
            use_safetensors=not pickled,
            weights_only=True,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            **options,
        )
    except UnpicklingError as error:
        raise ConfigError(
            f"the pickled weights in {folder} contain more than tensors or are damaged; they were not loaded"
        ) from error
    except unloadable() as error:
        raise_device_error(error)
        raise ConfigError(f"cannot load the model in {folder}: {first_line(error)}") from error
    model, report = loaded
    lacking = sorted(report["missing_keys"])
    if lacking:
        raise ConfigError(
            f"the weights in {folder} lack {len(lacking)} of the model's tensors, such as {lacking[0]}; "
            "download or save the model again"
        )
    freeze_other_modalities(model)
    dequantize_in_forward(model)
    _make_savable(model)
    if not options:
        model.to(device)
    if device.type == "cpu":
        _detach_from_file(model)
    return model


def freeze_other_modalities(model: Any) -> None:
    """Freeze what a text-only pass does not compute: the vision part of a vision-language model."""
    if model.config.get_text_config() is model.config:
        return
    text = {id(p) for part in (text_decoder(model), model.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in text:
            parameter.requires_grad_(False)


def _make_savable(model: Any) -> None:
    """Fix a generation config that transformers loads but refuses to save.

    Many published models set a temperature without do_sample.
    """
    settings = model.generation_config
    if _is_valid(settings):
        return
    settings.do_sample = True
    if not _is_valid(settings):
        model.generation_config = type(settings)(eos_token_id=settings.eos_token_id)


def _is_valid(settings: Any) -> bool:
    try:
        settings.validate(strict=True)
    except ValueError:
        return False
    return True


@torch.no_grad()
def _detach_from_file(model: Any) -> None:
    """Copy floating-point weights out of the memory-mapped file, and return freed memory to the system.

    This releases the file. It also makes resumed runs exact: the alignment of mapped weights depends on the
    file's header, and on some CPUs matmuls round differently with another alignment.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.clone()
    return_freed_memory()


def load_tokenizer(folder: Path, *, template_args: Mapping[str, Any] | None = None) -> Any:
    """Load a tokenizer. `template_args`: arguments for every rendering by its chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except unloadable() as error:
        raise ConfigError(f"cannot load the tokenizer in {folder}: {first_line(error)}") from error
    setattr(tokenizer, TEMPLATE_ARGS, dict(template_args or {}))
    return tokenizer


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory instead of returning it to the kernel.

    A step frees and allocates the same hundreds of megabytes many times; page faults would cost as
    much as the arithmetic.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_top_pad, 64 << 20)


def load_reward_models(rewards: Mapping[str, Any], device: torch.device) -> None:
    """Load the reward models among a task's rewards onto the device of the policy."""
    for reward in rewards.values():
        if isinstance(reward, RewardModel) and reward.scorer is None:
            reward.scorer = SequenceScorer(reward, device)


class SequenceScorer:
    """A sequence-classification model with one output, over padded batches of similar length."""

    def __init__(self, reward: RewardModel, device: torch.device) -> None:
        from transformers import AutoModelForSequenceClassification

        keep_quiet()
        self.reward = reward
        folder = model_folder(reward.name)
        self.tokenizer = load_tokenizer(folder, template_args={})
        try:
            self.model: Any = AutoModelForSequenceClassification.from_pretrained(
                str(folder),
                dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
                local_files_only=True,
                trust_remote_code=False,
            )
        except unloadable() as error:
            raise ConfigError(f"cannot load the reward model {reward.name}: {first_line(error)}") from error
        if self.model.config.num_labels != 1:
            raise ConfigError(
                f"the reward model {reward.name} has {self.model.config.num_labels} outputs; use one with 1"
            )
        self.model.to(device).eval().requires_grad_(False)
        use_fast_linears(self.model)

    @torch.no_grad()
    def __call__(self, conversations: Sequence[tuple[Any, Any]]) -> list[float]:
        rows = [self.tokens(*one) for one in conversations]
        scores = [0.0] * len(rows)
        pad = self.padding(rows)
        for batch in self.batches(rows):
            longest = max(len(rows[index]) for index in batch)
            ids = torch.full((len(batch), longest), pad)
            mask = torch.zeros_like(ids)
            for line, index in enumerate(batch):
                ids[line, : len(rows[index])] = torch.tensor(rows[index])
                mask[line, : len(rows[index])] = 1
            device = self.model.device
            logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            for index, value in zip(batch, logits[:, 0].float().tolist(), strict=True):
                scores[index] = value
        return scores

    def tokens(self, prompt: Any, completion: Any) -> list[int]:
        """Encode a conversation, by the reward model's own chat template if it has one."""
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        else:
            messages = [*prompt, *completion]
        if self.tokenizer.chat_template:
            ids = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        else:
            ids = self.tokenizer("\n".join(str(one["content"]) for one in messages))["input_ids"]
        longest = getattr(self.model.config, "max_position_embeddings", None) or self.reward.max_tokens
        return list(ids)[-min(longest, self.reward.max_tokens) :]

    def padding(self, rows: Sequence[Sequence[int]]) -> int:
        """Return the padding id. Models find their last token by it, so it must not occur in the rows."""
        pad = self.tokenizer.pad_token_id
        used = {token for row in rows for token in row}
        if pad is None or pad in used:
            pad = next(token for token in range(len(used) + 1) if token not in used)
        self.model.config.pad_token_id = pad
        return int(pad)

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield the indices of rows of similar length whose padded size is at most `batch_tokens`."""
        batch: list[int] = []
        for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
            if batch and (len(batch) + 1) * len(rows[index]) > self.reward.batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch
