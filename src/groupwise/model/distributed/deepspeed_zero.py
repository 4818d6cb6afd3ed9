"""A policy trained through DeepSpeed (ZeRO): each process keeps a part of what training takes.

Stage 1 divides the optimizer's state, 2 the gradient too, 3 all weights too. DeepSpeed wants to see
every pass: the learner's passes run inside of a module that holds the model. It averages gradients over
processes and over the passes of an update, while our losses are sums, divided once by the count of the whole
batch; so losses are multiplied by the number of processes, each pass counts whole, and the step says when an
update is over. What goes into files is whole and has the names it would have without DeepSpeed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from groupwise.errors import CheckpointError, ConfigError
from groupwise.model.ops.checkpointing import leave_to_torch

T = TypeVar("T")

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
"""What files call, beside a weight's moments, the float32 copy of a weight in half precision."""
KEPT_WHOLE = 100_000
"""Weights of so few numbers are gathered once a step, not for each pass: norms and biases."""


class ZeroForward(nn.Module):
    """The model as DeepSpeed is given it: any computation with its parts is a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class ZeroEngine:
    """DeepSpeed's engine around one model; until `start` the model is as it was."""

    engine: Any = None
    optimizer: AdamW
    names: tuple[str, ...]
    """Of the trained parameters."""
    half: bool
    """Whether they are in half precision, of which the optimizer then keeps copies in float32."""

    def __init__(self, model: nn.Module, head: nn.Module, *, stage: int) -> None:
        if find_spec("deepspeed") is None:
            raise ConfigError(f"run.parallel=zero{stage} takes a package: pip install 'groupwise[deepspeed]'")
        leave_to_torch(model)
        self.model, self.head, self.stage = model, head, stage

    def start(self, optimizer: AdamW, *, max_grad_norm: float, offload: bool) -> None:
        """Divide what this stage divides; the optimizer then steps on this process's part."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.names = tuple(trained)
        self.half = any(p.dtype != torch.float32 for p in trained.values())
        self.optimizer = optimizer
        device = next(iter(trained.values())).device
        deepspeed = quiet_deepspeed(device)
        passes = ZeroForward(self.model)
        divided: dict[str, Any] = {
            "stage": self.stage,
            "stage3_param_persistence_threshold": KEPT_WHOLE,
        }
        if offload:
            divided["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
        self.engine, *_ = deepspeed.initialize(
            model=passes,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "managed_gradient_accumulation": False,
                "gradient_clipping": max_grad_norm,
                "bf16": {"enabled": self.half},
                "zero_optimization": divided,
                "zero_force_ds_cpu_optimizer": False,  # torch's steps there too, and needs no compiler
            },
        )
        if self.stage == 3:
            # The product with the output layer is fused with the loss, outside of the layer's own module.
            for parameter in self.head.parameters():
                deepspeed.zero.register_external_parameter(passes, parameter)

    def computing(self, compute: Callable[[], T]) -> T:
        """Do a forward pass; all processes do it together."""
        found: T = self.engine(compute)
        return found

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * dist.get_world_size())

    def step(self) -> float:
        """Clip the sum of everyone's gradients and step; returns its norm before clipping."""
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        return norm if norm >= 0 else float("nan")  # DeepSpeed says -1 of a gradient that is not finite

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every process holds all weights while the block lasts; all must come by here together."""
        if self.engine is None or self.stage < 3:
            yield
            return
        from deepspeed.runtime.zero import unwrap_model_for_generation

        with unwrap_model_for_generation(self.engine):
            yield

    def gathered_state(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Give the first process, whole and on the CPU, what the model's files hold. None: all have it."""
        if self.engine is None or self.stage < 3:
            return None
        from deepspeed.runtime.zero import GatheredParameters

        state = model.state_dict(keep_vars=True)
        copies: dict[int, Tensor] = {}  # one for all names of a tied weight
        for tensor in state.values():
            with GatheredParameters([tensor]):
                if dist.get_rank() == 0 and id(tensor) not in copies:
                    copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
        return {name: copies[id(tensor)] for name, tensor in state.items() if id(tensor) in copies}

    def optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Give the first process what `optimizer_tensors` returns of an optimizer that is not divided."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        group = {**self.optimizer.param_groups[0], "params": list(self.names)}
        tensors: dict[str, Tensor] = {}
        for state in list(self.optimizer.state.values())[:1]:  # none before the first step; all count alike
            for name in self.names:
                parameter = self.model.get_parameter(name)
                found = {"step": state["step"]}
                found |= {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
                if self.half:
                    found[MASTER] = safe_get_full_fp32_param(parameter)
                if dist.get_rank() == 0:
                    tensors |= {f"{name}.{key}": value.to("cpu", copy=True) for key, value in found.items()}
        return tensors, {"groups": [group]}

    def load_optimizer_state(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Put back what `optimizer_state` gave, or what an optimizer that is not divided left."""
        if tuple(name for group in settings["groups"] for name in group["params"]) != self.names:
            raise CheckpointError(
                "the checkpoint's optimizer belongs to other parameters than this model trains"
            )
        if not tensors:
            return
        zero = self.engine.optimizer
        parts = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        count = next(tensor for key, tensor in tensors.items() if key.endswith(".step"))
        for part in parts:
            moments = {key: torch.zeros_like(part) for key in MOMENTS}
            self.optimizer.state[part] = {"step": count.to(part.device, torch.float32, copy=True), **moments}
        if self.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()
        for name in self.names:
            for key in (*MOMENTS, MASTER) if self.half else MOMENTS:
                if f"{name}.{key}" in tensors:
                    self._put_back(self.model.get_parameter(name), key, tensors[f"{name}.{key}"])

    def _put_back(self, parameter: Any, key: str, whole: Tensor) -> None:
        """Keep this process's part of one of the optimizer's tensors."""
        from deepspeed import utils

        if self.stage < 3:
            own, setter = whole, utils.safe_set_full_optimizer_state
            master = utils.safe_set_full_fp32_param
        else:
            size, rank = parameter.ds_tensor.numel(), dist.get_rank()
            padded = torch.zeros(size * dist.get_world_size())
            padded[: whole.numel()] = whole.flatten()
            own, setter = padded[size * rank : size * (rank + 1)], utils.safe_set_local_optimizer_state
            master = utils.safe_set_local_fp32_param
        if key == MASTER:
            master(parameter, own)
        else:
            setter(parameter, own, key)


def quiet_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for the device that the policy is on, and let it talk over the processes there are."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # It calls torch by names that torch is about to change, and torch says so at every pass.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed.*is deprecated", category=FutureWarning)
    import deepspeed

    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # else it compiles a way of its own for processes to talk
    deepspeed.init_distributed(verbose=False)
    return deepspeed


def without_masters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An optimizer's tensors as one without DeepSpeed has them: it steps on the weights themselves."""
    return {key: tensor for key, tensor in tensors.items() if not key.endswith(f".{MASTER}")}
