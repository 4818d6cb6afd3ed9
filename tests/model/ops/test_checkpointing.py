"""Layers computed again in the backward pass: the same gradient, and nothing kept but their inputs."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from groupwise.config.schema import LoraConfig
from groupwise.model import device
from groupwise.model.adapters.lora import with_adapter
from groupwise.model.attention.compatibility import check_attention
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.load import keep_quiet, use_fused_ops
from groupwise.model.ops.checkpointing import needs_outputs, recompute_in_backward, recompute_layers
from groupwise.model.ops.lora_linear import use_fused_lora
from groupwise.model.policy import Policy
from tests.support.small_models import SIZES, small_model, tiny_tokenizer

TOKENS = 20
SHAPE = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=8),
    "gemma": transformers.GemmaConfig(**SHAPE, head_dim=8),
    "gemma3": transformers.Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=256),
    "mistral": transformers.MistralConfig(**SHAPE, head_dim=8),
    "phi": transformers.PhiConfig(**SHAPE, resid_pdrop=0.0, embd_pdrop=0.0),
    "phi3": transformers.Phi3Config(**SHAPE),
    "gpt2": transformers.GPT2Config(
        vocab_size=272, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=4),
    "olmo2": transformers.Olmo2Config(**SHAPE),
    "qwen2moe": transformers.Qwen2MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}


def policy_for(config: Any, *, lora: int = 0) -> Policy:
    keep_quiet()
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    check_attention(model, name="small")
    use_fused_ops(model)
    if lora:
        model = with_adapter(model, LoraConfig(r=lora, alpha=8), None)
        use_fused_lora(model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.2)
    return Policy(model.train(), tiny_tokenizer())


def gradients(policy: Policy, *, seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)  # for dropout
    policy.model.zero_grad()
    tokens_T = torch.arange(3, 3 + TOKENS)
    layout = PackedLayout.build([(8, (7, 5))], device=tokens_T.device)
    policy.hidden(tokens_T, torch.arange(TOKENS), layout).sin().sum().backward()
    return {name: p.grad.clone() for name, p in policy.trainable().items() if p.grad is not None}


@pytest.mark.parametrize("lora", [0, 4], ids=["every weight", "adapters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_what_it_is_without(family: str, lora: int) -> None:
    policy = policy_for(FAMILIES[family], lora=lora)
    kept = gradients(policy)
    recompute_layers(policy)
    again = gradients(policy)
    assert again.keys() == kept.keys()
    assert len(kept) > 10
    assert all(gradient.abs().sum() > 0 for name, gradient in kept.items() if "layers.0" in name)
    for name, gradient in again.items():
        assert torch.equal(gradient, kept[name]), name


def saved_by_layers(policy: Policy) -> tuple[int, int]:
    """Tokens' vectors that a forward pass keeps for the backward pass, and how often layers are computed."""
    kept: dict[int, int] = {}
    passes = 0

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    layers = policy.decoder.layers
    hooks = [layer.register_forward_hook(count) for layer in layers]  # type: ignore[union-attr]
    tokens_T = torch.arange(3, 3 + TOKENS)
    layout = PackedLayout.build([(TOKENS, ())], device=tokens_T.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_TM = policy.hidden(tokens_T, torch.arange(TOKENS), layout)
    hidden_TM.sum().backward()
    for hook in hooks:
        hook.remove()
    return sum(kept.values()) // (TOKENS * 32), passes


@pytest.mark.parametrize("family", ["llama", "granite", "olmo2", "qwen2moe"])
def test_a_product_is_not_computed_again_where_nobody_reads_it(family: str, monkeypatch) -> None:
    """A norm follows it in olmo2; in qwen2moe, a gate's gradient asks for what is let through."""
    monkeypatch.setattr(device, "has_faster_onednn", lambda: False)  # torch counts its own products only
    known = FAMILIES | {"granite": transformers.GraniteConfig(**SHAPE)}
    policy = policy_for(known[family])
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    is_read = needs_outputs(policy)
    work: list[int] = []
    for whole in (True, False):
        for layer in policy.decoder.layers:  # type: ignore[union-attr]
            layer._gradient_checkpointing_func = partial(recompute_in_backward, whole=whole or is_read)
        with FlopCounterMode(display=False) as counter:
            gradients(policy)
        work.append(counter.get_total_flops())
    assert is_read == (family in ("olmo2", "qwen2moe"))
    one_product = 2 * TOKENS * SHAPE["intermediate_size"] * SHAPE["hidden_size"]
    assert work[0] - work[1] == (0 if is_read else SHAPE["num_hidden_layers"] * one_product)


def test_a_layer_that_shows_nothing_is_computed_whole() -> None:
    """Who watches a product has it called: it is computed in the trial, and might not be afterwards."""
    policy = policy_for(FAMILIES["olmo2"])
    kept = gradients(policy)
    hooks = [
        layer.mlp.down_proj.register_forward_hook(lambda *_: None)
        for layer in policy.decoder.layers  # type: ignore[union-attr]
    ]
    recompute_layers(policy)
    for hook in hooks:
        hook.remove()
    for name, gradient in gradients(policy).items():
        assert torch.equal(gradient, kept[name]), name


def test_trying_layers_leaves_no_gradient_and_no_mode() -> None:
    policy = policy_for(FAMILIES["llama"], lora=4)
    policy.model.eval()
    recompute_layers(policy)
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert not any(module.training for module in policy.model.modules())


def test_a_result_computed_again_is_gone_before_the_gradients_are() -> None:
    results: list[weakref.ref[Tensor]] = []
    gone: list[bool] = []

    def layer(x: Tensor) -> Tensor:
        squared = x**2
        if squared.requires_grad:
            squared.register_hook(lambda grad: gone.append(results[-1]() is None))
        y = squared + x
        results.append(weakref.ref(y))
        return y

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    recompute_in_backward(layer, x).sum().backward()
    assert gone == [True]
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 5.0]


def test_a_layer_keeps_its_input_alone_and_is_computed_twice() -> None:
    policy = policy_for(FAMILIES["llama"], lora=4)
    kept, passes = saved_by_layers(policy)
    assert kept > 20
    assert passes == 2
    recompute_layers(policy)
    kept, passes = saved_by_layers(policy)
    assert kept == 3  # the inputs of two layers and of the last norm
    assert passes == 4


NOISY = {
    "a module": transformers.GPT2Config(vocab_size=272, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5),
    "a function": transformers.Starcoder2Config(**SHAPE, residual_dropout=0.5),
    "routers of experts": transformers.MixtralConfig(**SHAPE, num_local_experts=4, router_jitter_noise=0.2),
    "experts drawn by lot": transformers.PhimoeConfig(**SHAPE, num_local_experts=4, router_jitter_noise=0.2),
}


@pytest.mark.parametrize("config", NOISY.values(), ids=NOISY)
def test_noise_in_a_layer_is_the_same_when_it_is_computed_again(config: Any) -> None:
    policy = policy_for(config)
    kept = gradients(policy)
    assert policy.noisy
    other = gradients(policy, seed=2)
    assert any(not torch.equal(gradient, kept[name]) for name, gradient in other.items())
    recompute_layers(policy)
    for name, gradient in gradients(policy).items():
        assert torch.equal(gradient, kept[name]), name


@pytest.mark.parametrize("way", ["by position", "by name", "in a tuple", "in a dict", "all by name"])
def test_whatever_else_a_layer_is_given_gets_its_gradient(way: str) -> None:
    x, other = (torch.randn(3, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (0, 1))

    def layer(hidden: Tensor, more: Any) -> Tensor:
        more = more[0] if isinstance(more, tuple | dict) else more
        return hidden.sin() * more.exp()

    if way == "by position":
        result = recompute_in_backward(layer, x, other)
    elif way == "all by name":
        result = recompute_in_backward(partial(layer, hidden=x, more=other))
    else:
        more = {"by name": other, "in a tuple": (other,), "in a dict": {0: other}}[way]
        result = recompute_in_backward(partial(layer, more=more), x)
    result.sum().backward()
    torch.testing.assert_close(x.grad, (x.cos() * other.exp()).detach())
    torch.testing.assert_close(other.grad, (x.sin() * other.exp()).detach())


def test_results_in_a_tuple_keep_their_places() -> None:
    x = torch.tensor([0.5, 2.0], requires_grad=True)

    def layer(hidden: Tensor, extra: None) -> tuple[Tensor, None, Tensor]:
        return hidden**2, extra, hidden * 3

    square, nothing, triple = recompute_in_backward(layer, x, None)
    assert nothing is None
    (square * triple).sum().backward()  # 3x³
    torch.testing.assert_close(x.grad, torch.tensor([2.25, 36.0]))


def test_a_layer_may_leave_another_one_tensors_in_a_dict() -> None:
    """As the later layers of Gemma 3n use the keys and values of earlier ones."""
    x = torch.tensor([0.5, 2.0], requires_grad=True)
    shared: dict[str, Tensor] = {}

    def writes(hidden: Tensor, shared: dict[str, Tensor]) -> Tensor:
        shared["square"] = hidden**2
        return hidden * 3

    def reads(hidden: Tensor, shared: dict[str, Tensor]) -> Tensor:
        return hidden * shared["square"]

    recompute_in_backward(
        partial(reads, shared=shared), recompute_in_backward(partial(writes, shared=shared), x)
    ).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([2.25, 36.0]))  # of 3x³


def test_results_that_would_get_no_gradient_are_refused() -> None:
    with pytest.raises(AssertionError, match="layer outputs must be tensors"):
        recompute_in_backward(lambda hidden: [hidden * 2], torch.ones(2, requires_grad=True))


def test_looking_for_noise_leaves_no_trace() -> None:
    policy = policy_for(NOISY["a module"])
    policy.model.eval()
    policy.decoder.h[0].train()  # type: ignore[index]
    modes = [module.training for module in policy.model.modules()]
    state = torch.get_rng_state()
    assert policy.noisy
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in policy.model.modules()] == modes


def test_nothing_is_kept_where_no_gradient_is_asked_for() -> None:
    policy = policy_for(FAMILIES["llama"], lora=4)
    recompute_layers(policy)
    tokens_T = torch.arange(3, 3 + TOKENS)
    layout = PackedLayout.build([(TOKENS, ())], device=tokens_T.device)
    with torch.no_grad():
        assert not policy.hidden(tokens_T, torch.arange(TOKENS), layout).requires_grad


def test_a_model_without_adapters_trains_its_embeddings_too() -> None:
    policy = Policy(small_model().train(), tiny_tokenizer())
    check_attention(policy.model, name="small")
    recompute_layers(policy)
    found = gradients(policy)
    assert found["model.embed_tokens.weight"].abs().sum() > 0


def test_attention_of_ours_drops_nothing_whatever_its_share() -> None:
    policy = policy_for(transformers.LlamaConfig(**SHAPE, attention_dropout=0.5))
    assert not policy.noisy
    once, again = gradients(policy, seed=1), gradients(policy, seed=2)
    assert all(torch.equal(gradient, again[name]) for name, gradient in once.items())
