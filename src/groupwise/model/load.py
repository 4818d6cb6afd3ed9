"""From a name to a policy: the built-in model, a Hugging Face name or a folder, with or without adapters."""

from __future__ import annotations

import ctypes
import logging
import sys
import warnings
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
    quantization_of,
    settings_for,
    unpack_in_passes,
)
from groupwise.model.attention import hf_interface
from groupwise.model.attention.compatibility import check_attention
from groupwise.model.device import device_of, return_freed_memory
from groupwise.model.ops.checkpointing import recompute_layers
from groupwise.model.ops.lora_linear import adapt_in_place
from groupwise.model.ops.rmsnorm import use_fused_rmsnorm
from groupwise.model.ops.rotary import use_fused_rotary
from groupwise.model.ops.swiglu import use_fused_swiglu
from groupwise.model.policy import Policy
from groupwise.model.resolve import check_sizes, first_line, model_folder, unloadable


def load_policy(
    model: ModelConfig, lora: LoraConfig, *, trained: Path | None = None, reference: bool = False
) -> Policy:
    """Load the policy; `trained` is a checkpoint's folder to go on from, `reference` adds a frozen copy.

    The frozen copy is always the model that `model.name` names, so a resumed run keeps its anchor.
    """
    keep_quiet()
    device = device_of(model.device)
    dtype = getattr(torch, model.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if device.type == "cpu":
        keep_freed_memory()
    source = model_folder(model.name)
    tokenizer = load_tokenizer(source)
    whole = trained if trained is not None and not lora.r else source
    policy_model = causal_model(whole, dtype, device, quantization=model.quantization)
    check_attention(policy_model, name=model.name)
    use_fused_ops(policy_model)
    if lora.r:
        if model.name not in (*BUILT_IN, SMOLLM2) and not Path(model.name).expanduser().is_dir():
            policy_model.name_or_path = model.name  # the adapter's files name their base as the user did
        policy_model = with_adapter(policy_model, lora, trained)
        adapt_in_place(policy_model)
    frozen = None
    if reference and not lora.r:
        frozen = causal_model(source, dtype, device).requires_grad_(False).eval()
        frozen.set_attn_implementation(hf_interface.NAME)
        use_fused_ops(frozen)
    policy = Policy(policy_model, tokenizer, reference=frozen)
    if model.gradient_checkpointing:
        recompute_layers(policy)
    return policy


def load_for_generation(model: ModelConfig, *, rank: int, trained: Path | None) -> Policy:
    """Load a policy that is only to answer: a whole model, or adapters of some rank on one."""
    policy = load_policy(replace(model, gradient_checkpointing=False), LoraConfig(r=rank), trained=trained)
    policy.model.requires_grad_(False)
    return policy


def use_fused_ops(model: Any) -> None:
    """Where a module is of a kind we know, its training passes take less time and memory."""
    use_fused_rmsnorm(model)
    use_fused_rotary(model)
    use_fused_swiglu(model)


def keep_quiet() -> None:
    """Stop transformers from drawing progress bars and notices over the live display.

    Nothing is lost: what it would warn of while loading, `causal_model` refuses. DeepSpeed, where it is
    installed, is imported whether it is used or not, sets its own level then, and tells that there is no GPU.
    """
    from transformers.utils import logging as hugging_face

    hugging_face.set_verbosity_error()  # type: ignore[no-untyped-call]
    hugging_face.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("DeepSpeed").addFilter(only_errors)
    # Of its own making: PEFT names experts by two names, and has no use for one of them.
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
    """Load a model whole, or raise: `quantization` makes its weights smaller, if they are not so on disk.

    Without a `dtype` they keep the one they have there. They are read from safetensors, or, `pickled`, from
    pickles that may hold tensors and nothing else.
    """
    from transformers import AutoModelForCausalLM

    check_sizes(folder)
    options: dict[str, Any] = {}
    stored = quantization_of(folder)
    if quantization and stored and quantization != stored:
        raise ConfigError(
            f"the weights in {folder} are {stored} already: leave model.quantization={quantization} out, "
            "or name the model that they were made of"
        )
    if stored or quantization:
        check_installed()
        options["device_map"] = {"": device}  # quantized weights cannot be moved afterwards
    if quantization and not stored:
        options["quantization_config"] = settings_for(quantization, dtype)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
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
            f"the pickled weights in {folder} hold more than tensors, or are damaged: not read"
        ) from error
    except unloadable() as error:
        raise ConfigError(f"cannot load the model in {folder}: {first_line(error)}") from error
    model, report = loaded
    lacking = sorted(report["missing_keys"])
    if lacking:
        raise ConfigError(
            f"the weights in {folder} lack {len(lacking)} of the model's tensors, such as {lacking[0]}"
        )
    unpack_in_passes(model)
    _make_savable(model)
    if not options:
        model.to(device)
    if device.type == "cpu":
        _let_go_of_the_file(model)
    return model


def _make_savable(model: Any) -> None:
    """Mend settings of generation that transformers reads and would refuse to write.

    Many a published folder has a temperature without saying that tokens are drawn.
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
def _let_go_of_the_file(model: Any) -> None:
    """Copy what was not quantized out of the mapped file, else held whole; give freed memory back.

    Where weights begin in a file depends on its header, and on some CPUs products round differently for it:
    a resumed run reads them from another file than the run that it goes on with.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.clone()
    return_freed_memory()


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except unloadable() as error:
        raise ConfigError(f"cannot load the tokenizer in {folder}: {first_line(error)}") from error


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory instead of handing it back to the kernel.

    A step frees and takes the same hundreds of megabytes many times over; page faults on them
    would cost as much as the arithmetic.
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
