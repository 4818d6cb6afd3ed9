"""Merge an adapter into its model: write a plain Hugging Face folder and verify its logits.

Axes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import InvariantError
from groupwise.files import sign_weights
from groupwise.model.adapters.lora import base_of, effective_weight, is_adapted, load_adapter
from groupwise.model.adapters.quantization import is_quantized, is_quantized_model
from groupwise.model.device import device_of
from groupwise.model.load import causal_model, keep_quiet, load_tokenizer
from groupwise.model.resolve import adapter_base, check_output, model_folder, new_folder

LIMIT = 1e-4
"""Largest allowed logit difference in float64; rounding the merged weights to float32 causes less."""
RELATIVE_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Limits in lower precision, relative to the largest logit: there the order of sums matters."""
MAX_FLOAT64_PARAMETERS = 1_000_000_000
"""Largest model, in parameters, that is compared in float64."""

PROMPTS = (
    "What is the capital of France?",
    "Using each number in this list only once (3, 4, 5), create an equation that equals 17.",
    "A farmer has 12 cows and buys 5 more. How many cows are there? Think step by step.",
    "def add(a, b):\n    return a + b\n\nExplain this code.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Result of a merge."""

    folder: Path
    layers: int
    """Number of merged linear layers."""
    difference: float
    """Largest |logit − logit| between the model with adapters and the merged model on disk."""
    effect: float
    """Largest |logit − logit| between the model with and without adapters."""
    tokens: int
    """Tokens in the comparison."""
    precision: str
    """Dtype in which the logits were compared."""
    rounded: tuple[float, float] | None
    """If that was float64: the same difference in float32, and for scale the difference between float32 and
    float64 logits of the model with adapters."""
    files: tuple[str, ...]


def merge(
    adapter: Path,
    output: Path,
    *,
    base: str | None = None,
    quantization: str | None = None,
    dtype: str = "float32",
    device: str | None = None,
    shard_size: str = "4GB",
    overwrite: bool = False,
) -> Merged:
    """Write base + adapter to `output`, load the result, and compare its logits with the original.

    If the adapter was trained on a quantized base, quantize the base first: the adapter fits those weights.
    The new folder is renamed to `output` only if the comparison succeeds.
    """
    keep_quiet()
    check_output(output, overwrite=overwrite)
    source = model_folder(base or adapter_base(adapter))
    where = device_of(device)
    chosen: torch.dtype = getattr(torch, dtype)
    tokenizer = load_tokenizer(adapter if (adapter / "tokenizer.json").is_file() else source)
    model = causal_model(source, chosen, where, quantization=quantization)
    adapted = load_adapter(model, adapter).eval()
    texts_T = _prompt_tokens(tokenizer, adapted.config.get_text_config().vocab_size, device=where)
    compared, expected = _expected(adapted, texts_T, chosen)
    own = _logits(adapted, texts_T, chosen) if compared != chosen else []
    with adapted.disable_adapter():
        without = _logits(adapted, texts_T, compared)
    quantized = is_quantized_model(adapted)
    layers, merged = fold(adapted, chosen)
    with new_folder(output) as unfinished:
        # A model that was loaded quantized cannot be converted back to its original format.
        merged.save_pretrained(unfinished, max_shard_size=shard_size, save_original_format=not quantized)
        tokenizer.save_pretrained(unfinished)
        sign_weights(unfinished)
        written = causal_model(unfinished, chosen, where)
        difference = _largest(_logits(written, texts_T, compared), expected)
        plain = _largest(_logits(written, texts_T, chosen), own) if own else 0.0
        _check(difference, limit=_limit(expected, chosen, compared))
    return Merged(
        folder=output,
        layers=layers,
        difference=difference,
        effect=_largest(without, expected),
        tokens=sum(len(tokens_T) for tokens_T in texts_T),
        precision=str(compared).removeprefix("torch."),
        rounded=(plain, _largest(own, expected)) if own else None,
        files=tuple(sorted(path.name for path in output.glob("*.safetensors"))),
    )


def _check(difference: float, *, limit: float) -> None:
    if not difference <= limit:
        raise InvariantError(
            f"a logit of the merged model differs by {difference:.1e} from the model with its adapter, more "
            f"than rounding explains ({limit:.1e}); nothing was written"
        )


def fold(adapted: Any, dtype: torch.dtype) -> tuple[int, Any]:
    """Replace each adapted layer by a plain linear layer with the merged, dequantized weight."""
    layers = {name: module for name, module in adapted.named_modules() if is_adapted(module)}
    if not all(
        type(base_of(module)) is torch.nn.Linear or is_quantized(base_of(module))
        for module in layers.values()
    ):
        return len(layers), adapted.merge_and_unload()  # PEFT handles experts and Conv1D
    weights = {name: effective_weight(module).to(dtype) for name, module in layers.items()}
    model = adapted.get_base_model()
    for name, module in layers.items():
        base = base_of(module)
        linear = torch.nn.Linear(base.in_features, base.out_features, bias=base.bias is not None)
        linear.weight = torch.nn.Parameter(weights[name], requires_grad=False)
        linear.bias = base.bias
        _put(adapted, name, linear)
    for name, module in list(adapted.named_modules()):
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            (active,) = module.active_adapters
            _put(adapted, name, module.modules_to_save[active])
    _plain_linears(model, dtype)
    for attribute in ("quantization_method", "hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return len(layers), model


def _plain_linears(model: Any, dtype: torch.dtype) -> None:
    """Dequantize the remaining quantized layers: those without an adapter."""
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and is_quantized(module):
            linear = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight = torch.nn.Parameter(effective_weight(module).to(dtype), requires_grad=False)
            linear.bias = module.bias
            _put(model, name, linear)


def _put(root: Any, name: str, module: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(root.get_submodule(parent), last, module)


def _prompt_tokens(tokenizer: Any, vocabulary: int, *, device: torch.device) -> list[Tensor]:
    """Return the tokens of realistic prompts, rendered by the chat template."""
    texts = list(PROMPTS)
    if tokenizer.chat_template is not None:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [torch.tensor(tokens, device=device) % vocabulary for tokens in encoded]


def _expected(model: Any, texts_T: Sequence[Tensor], dtype: torch.dtype) -> tuple[torch.dtype, list[Tensor]]:
    """Return the dtype to compare in, and the logits in it.

    In float32 the order of sums alone changes a logit by 1e-4. Use float64 if the model is small enough and
    supports it; experts do not.
    """
    small = sum(p.numel() for p in model.parameters()) <= MAX_FLOAT64_PARAMETERS
    if dtype == torch.float32 and small and not is_quantized_model(model):
        with suppress(RuntimeError):
            return torch.float64, _logits(model, texts_T, torch.float64)
    return dtype, _logits(model, texts_T, dtype)


def _limit(logits_TV: Sequence[Tensor], dtype: torch.dtype, compared: torch.dtype) -> float:
    if compared == torch.float64:
        return LIMIT
    return RELATIVE_LIMITS[dtype] * max(1.0, max(float(x_TV.abs().max()) for x_TV in logits_TV))


@torch.no_grad()
def _logits(model: Any, texts_T: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the logits_TV of each text computed in `dtype`; restore the model afterwards."""
    before = model.dtype
    if dtype != before:
        model.to(dtype)
    try:
        return [model(tokens_T[None]).logits[0].double() for tokens_T in texts_T]
    finally:
        if dtype != before:
            model.to(before)  # lossless: float64 represents every float32


def _largest(ones_TV: Sequence[Tensor], others_TV: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ones_TV, others_TV, strict=True))
