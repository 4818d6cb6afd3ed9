"""Choose how a model is computed, by comparing numbers instead of listing supported models.

A group of two members is computed as one packed row and compared with the model's own passes over each. Equal
logits mean the fast path. Otherwise the model keeps its own attention and cache: the general path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import ConfigError
from groupwise.model.attention import hf_interface
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.device import raise_device_error
from groupwise.model.general_forward import GeneralPath, copied_rows, text_decoder
from groupwise.model.ops.equivalence import RecordingLayout, float32_excerpt, in_mode
from groupwise.model.policy import Policy
from groupwise.model.resolve import first_line

PROMPT, ANSWER = 10, 7
SHORT_WINDOW = 6
"""Sliding windows are this short in the comparison: windows as long as in use would not show."""
LIMIT = 1e-3
"""Largest allowed difference in float32, relative to the largest logit."""
ROUNDING = 0.2
"""The same where only half precision can be computed, which rounds."""
FAILURES = (ValueError, TypeError, AttributeError, AssertionError, RuntimeError, LookupError)


def check_attention(model: Any, *, name: str) -> GeneralPath | None:
    """Switch the model to packed attention if its outputs stay the same; otherwise return why not.

    The comparison is in float32, on an excerpt if the model is in half precision. In half precision,
    rounding alone can change the logits of a correct model by half of their size.
    """
    hf_interface.register()
    own = model.config._attn_implementation
    exact, limit = _float32(model)
    tokens_T = torch.arange(PROMPT + 2 * ANSWER, device=model.get_output_embeddings().weight.device)
    tokens_T = tokens_T % len(exact.get_output_embeddings().weight)
    with torch.no_grad(), in_mode(exact, training=False):
        try:
            with _short_windows(exact):
                reason = _difference_to_packed(model, exact, tokens_T, limit, own=own)
            if reason == DIFFERS:  # the context stays inside windows that attention does not know
                reason = _difference_to_packed(model, exact, tokens_T, limit, own=own)
        except FAILURES as error:
            raise_device_error(error)
            reason = f"does not support packed attention ({first_line(error)})"
        if reason is None:
            return None
        for each in (model, exact):
            each.set_attn_implementation(own)
        _check_logits(exact, tokens_T, limit, name=name)
        return GeneralPath(reason=reason, caches=_caches(exact, tokens_T, limit))


def _float32(model: Any) -> tuple[Any, float]:
    """Return the model, or a float32 excerpt of it, and the largest allowed difference."""
    if all(not p.is_floating_point() or p.dtype == torch.float32 for p in model.parameters()):
        return model, LIMIT
    try:
        excerpt = float32_excerpt(model, tokens=PROMPT + 2 * ANSWER)
        excerpt(torch.zeros(1, 1, dtype=torch.int64, device=model.get_output_embeddings().weight.device))
    except FAILURES as error:
        raise_device_error(error)
        return model, ROUNDING
    return excerpt, LIMIT


DIFFERS = "computes something that packed attention does not"


def _difference_to_packed(model: Any, exact: Any, tokens_T: Tensor, limit: float, *, own: str) -> str | None:
    """Switch both models to packed attention; return how it differs from their own, None if it does not."""
    if obstacle := unpackable_reason(model.config.get_text_config()):
        return obstacle
    exact.set_attn_implementation(own)
    reference_TV = _unpacked_logits(exact, tokens_T)
    for each in (model, exact):
        each.set_attn_implementation(hf_interface.NAME)
    policy = Policy(exact, tokenizer=_NoTokenizer())
    layout = RecordingLayout(PackedLayout.build([(PROMPT, (ANSWER, ANSWER))], device=tokens_T.device))
    positions_T = torch.arange(len(tokens_T), device=tokens_T.device)
    positions_T[PROMPT + ANSWER :] -= ANSWER
    try:
        hidden_TM = policy.hidden(tokens_T, positions_T, layout)
    except AttributeError as error:
        if "'layout'" not in str(error):
            raise
        for each in (model, exact) if model is not exact else (model,):
            hf_interface.pass_layout_on(text_decoder(each))
        hidden_TM = policy.hidden(tokens_T, positions_T, layout)
    calls = [call.layer for call in layout.calls]
    if not calls:
        return "has attention that transformers cannot replace, or none"
    if calls != list(range(policy.layers)):
        return f"calls replaceable attention {len(calls)} times in {policy.layers} layers, not once in each"
    if len({call.heads for call in layout.calls}) > 1:
        return "has layers with different numbers of query heads"
    if not _difference(policy.logits(hidden_TM), reference_TV) < limit:
        return DIFFERS
    return None


PACKED_LAYERS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
SPARSE = ("index_topk", "index_topk_blocks", "compress_rates")
"""Settings of attention that skips keys beyond a length, which short rows do not show."""


def unpackable_reason(config: Any) -> str | None:
    """Return why packed attention cannot compute the layers of this config; None if the config allows it."""
    kinds = set(getattr(config, "layer_types", None) or ()) - PACKED_LAYERS
    if kinds:
        return f"has layers of kind {', '.join(sorted(kinds))}"
    if any(getattr(config, name, None) for name in SPARSE):
        return "has sparse attention"
    return None


def _check_logits(exact: Any, tokens_T: Tensor, limit: float, *, name: str) -> None:
    """Raise ConfigError if the logits are not those of the output layer: the trainer computes these."""
    try:
        policy = Policy(exact, tokenizer=_NoTokenizer(), general=GeneralPath(reason="", caches=False))
        reference_TV = _unpacked_logits(exact, tokens_T)
        layout = PackedLayout.build([(PROMPT, (ANSWER, ANSWER))], device=tokens_T.device)
        hidden_TM = policy.hidden(tokens_T, tokens_T, layout)
        difference = _difference(policy.logits(hidden_TM), reference_TV)
        alone_1LM, _ = policy.own_hidden(tokens_T[None, :PROMPT], cache=False)
        difference = max(difference, _difference(alone_1LM[0], hidden_TM[:PROMPT]))
    except FAILURES as error:
        raise_device_error(error)
        raise ConfigError(
            f"the model {name!r} is not supported: {first_line(error)}; choose another model"
        ) from error
    if not difference < limit:
        raise ConfigError(
            f"the model {name!r} is not supported: its logits are not those of its output layer, or depend "
            f"on later tokens (relative logit difference {difference:.1e}); choose another model"
        )


def _caches(exact: Any, tokens_T: Tensor, limit: float) -> bool:
    """Whether generation with the model's cache computes what a pass over the whole sequence computes."""
    policy = Policy(exact, tokenizer=_NoTokenizer(), general=GeneralPath(reason="", caches=True))
    try:
        whole_1TM, _ = policy.own_hidden(tokens_T[None], cache=False)
        # A prompt of one token is shorter than the state of a convolution.
        computed = (_stepwise(policy, tokens_T, prompt=prompt) for prompt in (PROMPT, 1))
        return all(_difference(hidden_TM, whole_1TM[0]) < limit for hidden_TM in computed)
    except FAILURES as error:
        raise_device_error(error)
        return False


def _stepwise(policy: Policy, tokens_T: Tensor, *, prompt: int) -> Tensor:
    """Return the hidden states_TM of the prompt, then of one token at a time, in the second of two rows."""
    first_1LM, cache = policy.own_hidden(tokens_T[None, :prompt], cache=None)
    cache = copied_rows(cache, torch.zeros(2, dtype=torch.int64, device=tokens_T.device))
    steps = [first_1LM[0]]
    for at in range(prompt, len(tokens_T)):
        next_21M, cache = policy.own_hidden(tokens_T[None, at : at + 1].expand(2, 1), cache=cache)
        steps.append(next_21M[1])
    return torch.cat(steps)


def _difference(computed: Tensor, reference: Tensor) -> float:
    return float((computed.float() - reference.float()).abs().max() / reference.float().abs().max())


@contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Make the sliding windows of a model's config and modules short inside this context."""
    holders = [model.config.get_text_config(), *model.modules()]
    long = [
        (holder, window)
        for holder in holders
        if isinstance(window := getattr(holder, "sliding_window", None), int) and window > SHORT_WINDOW
    ]
    try:
        for holder, _ in long:
            holder.sliding_window = SHORT_WINDOW
        yield
    finally:
        for holder, window in long:
            holder.sliding_window = window


def _unpacked_logits(model: Any, tokens_T: Tensor) -> Tensor:
    """Return the logits of the packed row from one pass of the model per member, each with its prompt."""
    first_T, second_T = tokens_T[: PROMPT + ANSWER], tokens_T[PROMPT + ANSWER :]
    first_TV = model(first_T[None], use_cache=False).logits[0]
    second_TV = model(torch.cat([tokens_T[:PROMPT], second_T])[None], use_cache=False).logits[0, PROMPT:]
    return torch.cat([first_TV, second_TV]).float()


class _NoTokenizer:
    eos_token_id = None
