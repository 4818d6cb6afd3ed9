"""The gated SiLU that keeps less, against the modules it stands in for."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, LlamaConfig, Qwen2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from groupwise.model.ops.checkpointing import outputs_unused
from groupwise.model.ops.fused_modules import use_fused_swiglu
from groupwise.model.ops.lora_linear import use_fused_lora

SIZES = {"hidden_size": 6, "intermediate_size": 10, "num_attention_heads": 2, "num_key_value_heads": 2}
TOKENS = 5


def block(kind: str, *, short: bool = True) -> Any:
    """A layer's gates and products, with shorter passes as when a policy is loaded, or as it comes."""
    torch.manual_seed(0)
    made = Qwen2MLP(Qwen2Config(**SIZES)) if kind == "Qwen" else None
    module: Any = made or LlamaMLP(LlamaConfig(**SIZES, mlp_bias=kind == "biases"))
    if short:
        use_fused_swiglu(module)
        assert "forward" in vars(module)
    if kind == "a frozen product":
        module.down_proj.requires_grad_(False)
    if kind in ("adapters", "adapters, switched off", "adapters with dropout", "some adapters"):
        names = ["gate_proj", "up_proj"] + ["down_proj"] * (kind != "some adapters")
        dropout = 0.5 if kind == "adapters with dropout" else 0.0
        settings = peft.LoraConfig(r=3, lora_alpha=4, lora_dropout=dropout, target_modules=names)
        module = peft.get_peft_model(module, settings)
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
        if short:
            use_fused_lora(module)
    return module.double()  # a sine makes much of the rounding of large numbers


def run(module: Any, x: Tensor, *, keep: bool = False) -> dict[str, Tensor]:
    """The output and the gradients of the input and of every trained weight."""
    torch.manual_seed(1)  # for dropout
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    y.sin().sum().backward(retain_graph=keep)
    if keep:
        y.cos().sum().backward()
    assert x.grad is not None
    trained = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **trained}


KINDS = [
    "every weight",
    "Qwen",
    "biases",
    "a frozen product",
    "adapters",
    "some adapters",
    "adapters with dropout",
]


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_the_module(kind: str) -> None:
    x = 3 * torch.randn(1, TOKENS, 6, dtype=torch.double)
    theirs, ours = run(block(kind, short=False), x), run(block(kind), x)
    assert ours.keys() == theirs.keys()
    assert len(ours) >= 4
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], msg=name)


def test_adapters_that_are_switched_off_are_not_there() -> None:
    theirs, ours = block("adapters", short=False), block("adapters")
    x = 3 * torch.randn(1, TOKENS, 6, dtype=torch.double)
    with theirs.disable_adapter(), ours.disable_adapter():
        torch.testing.assert_close(ours(x), theirs(x))
        base = ours(x)
    assert not torch.allclose(ours(x), base)


@pytest.mark.parametrize("kind", ["every weight", "adapters", "some adapters"])
def test_gate_and_factor_are_kept_and_nothing_else_of_their_width(kind: str) -> None:
    module = block(kind)
    weights = {p.data_ptr() for p in module.parameters()}
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        if (
            tensor.shape[-1] == 10
            and tensor.data_ptr() not in weights
            and len(tensor.flatten(0, -2)) == TOKENS
        ):
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = module(torch.randn(1, TOKENS, 6, dtype=torch.double, requires_grad=True))
    assert len(kept) == 2
    y.sum().backward()


TILED = ["every weight", "biases", "a frozen product", "adapters", "some adapters"]


@pytest.mark.parametrize("kind", TILED)
def test_where_nothing_is_kept_the_inner_width_is_there_for_some_tokens_at_a_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = block(kind), 3 * torch.randn(1, TOKENS, 6, dtype=torch.double)
    whole = run(module, x)
    monkeypatch.setattr("groupwise.model.device.TILE", 2)
    with torch.no_grad():
        torch.testing.assert_close(module(x), whole["y"])
    y = module(x)
    module.zero_grad()
    x = x.clone().requires_grad_()
    with outputs_unused():
        nothing = module(x)
    assert nothing.isnan().all()
    nothing.backward(y.detach().cos())
    assert x.grad is not None
    found = {"x": x.grad, **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}
    assert found.keys() == whole.keys() - {"y"}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, whole[name], msg=name)


class Rows(TorchDispatchMode):
    """The most rows of the inner width that any operation made."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.shape[1:] == (10,):
            self.most = max(self.most, len(found))
        return found


def test_no_more_of_the_inner_width_is_made_at_a_time_than_about_a_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("groupwise.model.device.TILE", 8)
    module, x = block("every weight"), torch.randn(1, 33, 6, dtype=torch.double, requires_grad=True)
    module.requires_grad_(False)
    with Rows() as forward, torch.no_grad():
        module(x)
    with Rows() as backward, outputs_unused():
        module(x).sum().backward()
    with Rows() as kept:
        module(x).sum().backward()
    assert (forward.most, backward.most, kept.most) == (9, 9, 33)  # 33 in four nearly alike


def test_whoever_watches_the_product_sees_it() -> None:
    module = block("every weight")
    seen: list[tuple[int, ...]] = []
    module.down_proj.register_forward_hook(lambda _, inputs, __: seen.append(tuple(inputs[0].shape)))
    run(module, torch.randn(1, TOKENS, 6, dtype=torch.double))
    assert seen == [(1, TOKENS, 10)]


@pytest.mark.parametrize("kind", ["adapters", "adapters with dropout"])
def test_a_second_backward_pass_is_refused(kind: str) -> None:
    module = block(kind)
    with pytest.raises(AssertionError, match="the backward pass can run only once"):
        run(module, torch.randn(1, TOKENS, 6, dtype=torch.double), keep=True)


def test_a_gate_of_another_function_is_left_alone() -> None:
    module = Gemma2MLP(Gemma2Config(**SIZES))
    use_fused_swiglu(module)
    assert "forward" not in vars(module)
