"""Our LoRA passes against PEFT's own."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from groupwise.model import device
from groupwise.model.ops.lora_linear import project, use_fast_linears, use_fused_lora

RANK, SCALE = 3, 4 / 3


class Block(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7, bias=bias)
        self.down = nn.Linear(7, 2, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def adapted(*, bias: bool = True, dropout: float = 0.0) -> Any:
    """A block under LoRA whose B is not zero, so that the adapters matter."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=4, lora_dropout=dropout, target_modules=["up", "down"])
    model = peft.get_peft_model(Block(bias=bias), config)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).sin().sum().backward()
    assert x.grad is not None
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"x": x.grad, **trained}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 5), (1, 6, 5), (2, 3, 5), (1, 0, 5)])
@pytest.mark.parametrize("onednn", [True, False])
def test_output_and_every_gradient_are_those_of_peft(
    bias: bool, shape: tuple[int, ...], onednn: bool, monkeypatch
) -> None:
    model, x = adapted(bias=bias), torch.randn(shape)
    theirs, their_gradients = model(x), gradients(model, x)
    monkeypatch.setattr(device, "has_faster_onednn", lambda: onednn)
    monkeypatch.setattr(device, "SMALL_MATRIX", 1)
    use_fast_linears(model)
    use_fused_lora(model)
    ours, our_gradients = model(x), gradients(model, x)
    torch.testing.assert_close(ours, theirs)
    assert our_gradients.keys() == their_gradients.keys()
    assert len(our_gradients) == 5
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], msg=name)


def test_the_low_rank_product_is_scaled_and_added() -> None:
    model = adapted()
    use_fused_lora(model)
    layer, x = model.base_model.model.up, torch.randn(1, 5)
    delta = SCALE * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    by_hand = x @ (layer.base_layer.weight + delta).T + layer.base_layer.bias
    torch.testing.assert_close(layer(x), by_hand)


def test_with_adapters_off_the_base_answers() -> None:
    model, x = adapted(), torch.randn(2, 5)
    use_fused_lora(model)
    with model.disable_adapter():
        off = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(off, Block(bias=True)(x))
    assert not torch.allclose(off, model(x))


def test_a_layer_with_dropout_keeps_the_pass_that_knows_it() -> None:
    model, x = adapted(dropout=0.5).train(), torch.randn(64, 5)
    use_fused_lora(model)
    assert not torch.equal(model(x), model(x))


def test_adapters_keep_their_own_precision_and_the_products_are_in_the_models() -> None:
    model, exact, x = adapted(), adapted(), torch.randn(64, 5)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.double()
    use_fused_lora(model)
    assert model(x.double()).dtype == torch.float64
    ours, theirs = gradients(model, x.double()), gradients(exact, x)
    for name in theirs:
        assert ours[name].dtype == (torch.float64 if name == "x" else torch.float32)
        torch.testing.assert_close(ours[name].float(), theirs[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_layer_stored_the_other_way_round_keeps_the_pass_that_knows_it() -> None:
    from transformers.pytorch_utils import Conv1D

    block = nn.Sequential(Conv1D(7, 5))
    model = peft.get_peft_model(block, peft.LoraConfig(r=2, target_modules=["0"], fan_in_fan_out=True))  # type: ignore[arg-type]
    x = torch.randn(3, 5)
    theirs = model(x)
    use_fused_lora(model)
    torch.testing.assert_close(model(x), theirs)


class Attention(nn.Module):
    """Three layers with one input, of several widths, of which the last has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(5, 7), nn.Linear(5, 2), nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(project(x, (self.q, self.k, self.v))), -1)


@pytest.mark.parametrize("adapters", [["q", "k", "v"], ["q", "v"], []], ids=["all", "some", "none"])
@pytest.mark.parametrize("shape", [(4, 5), (1, 6, 5), (1, 0, 5)])
def test_layers_with_one_input_give_what_each_gives(adapters: list[str], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model: Any = Attention()
    if adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=adapters))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
    layers = [module for name, module in model.named_modules() if name.rpartition(".")[2] in ("q", "k", "v")]
    x = torch.randn(shape)
    calls: list[nn.Module] = []
    hooks = [layer.register_forward_hook(lambda layer, *_: calls.append(layer)) for layer in layers]
    apart, gradients_apart = model(x), gradients(model, x)
    assert calls == layers * 2, "whoever watches a layer sees its passes"
    for hook in hooks:
        hook.remove()
    use_fused_lora(model)
    together, gradients_together = model(x), gradients(model, x)
    torch.testing.assert_close(together, apart)
    assert gradients_together.keys() == gradients_apart.keys()
    assert len(gradients_apart) == 1 + (2 * len(adapters) or 5)
    for name, gradient in gradients_together.items():
        torch.testing.assert_close(gradient, gradients_apart[name], rtol=1e-4, atol=1e-4, msg=name)


def test_of_layers_with_one_input_only_those_in_use_need_a_gradient() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 5)
    model.k.requires_grad_(False)
    project(x, (model.q, model.k, model.v))[0].sum().backward()
    assert model.q.weight.grad is not None
    torch.testing.assert_close(model.q.weight.grad, x.sum(0).expand(7, 5))
    assert model.k.weight.grad is None
    assert model.v.weight.grad is not None
    assert model.v.weight.grad.abs().sum() == 0
