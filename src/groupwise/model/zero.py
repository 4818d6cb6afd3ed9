"""A policy trained through DeepSpeed: ZeRO divides the optimizer's state (1), the gradient too (2), all weights (3).

DeepSpeed wants to see every pass, so the learner's passes run inside of a module of which the model is a part.
It averages gradients over processes and divides by the passes of an update; our losses are sums that are divided
once by the count of the whole batch. So each loss is multiplied by the number of processes, one pass counts as
an update's all, and the step says when the update is over. What is saved is whole and named as without DeepSpeed.
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

T = TypeVar("T")

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
"""Name, beside the moments, of a weight in float32 that the model has in half precision."""
KEPT_WHOLE = 100_000
"""ZeRO-3 does not divide weights of fewer numbers: norms and biases."""


class Passes(nn.Module):
    """The model as DeepSpeed is given it: any computation with its parts is a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class Zero:
    """DeepSpeed's engine around one model; there is none before the optimizer is made."""

    def __init__(self, model: nn.Module, head: nn.Module, *, stage: int) -> None:
        if find_spec("deepspeed") is None:
            raise ConfigError("run.parallel=zero… takes a package: pip install 'groupwise[deepspeed]'")
        self.model, self.head, self.stage = model, head, stage
        self.engine: Any = None
        self.optimizer: AdamW

    def start(self, optimizer: AdamW, *, max_grad_norm: float, offload: bool) -> None:
        """Divide what this stage divides. The optimizer's parameters become parts of ours, laid end to end."""
        weight = next(self.model.parameters())
        os.environ.setdefault("DS_ACCELERATOR", weight.device.type)
        # It calls torch's collectives by names that torch is about to change, at every pass.
        warnings.filterwarnings("ignore", message=r".*torch\.distributed.* is deprecated", category=FutureWarning)
        import deepspeed

        if weight.device.type == "cpu":
            deepspeed.ops.__compatible_ops__.clear()  # else it compiles a way of its own for processes to talk
        self.names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.half = optimizer.param_groups[0]["params"][0].dtype != torch.float32
        self.optimizer = optimizer
        passes = Passes(self.model)
        divided = {
            "stage": self.stage,
            "stage3_param_persistence_threshold": KEPT_WHOLE,
            "offload_optimizer": {"device": "cpu", "pin_memory": weight.is_cuda} if offload else None,
        }
        deepspeed.init_distributed(verbose=False)
        self.engine, *_ = deepspeed.initialize(
            model=passes,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "managed_gradient_accumulation": False,
                "gradient_clipping": max_grad_norm,
                "bf16": {"enabled": self.half},
                "zero_optimization": {k: v for k, v in divided.items() if v is not None},
                "zero_force_ds_cpu_optimizer": False,  # torch's own steps there as well, and is not compiled
            },
        )
        if self.stage == 3:
            # Our output layer reads these outside of their module.
            for parameter in self.head.parameters():
                deepspeed.zero.register_external_parameter(passes, parameter)

    def computing(self, compute: Callable[[], T]) -> T:
        """Do a forward pass as DeepSpeed sees it."""
        found: T = self.engine(compute)
        return found

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * dist.get_world_size())

    def step(self) -> float:
        """Clip the sum of everyone's gradients and step; returns its norm before clipping."""
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every process holds all weights while the block lasts; all must come by here together."""
        if self.stage < 3 or self.engine is None:
            yield
            return
        import deepspeed

        hooks = self.engine.optimizer.parameter_offload
        hooks._remove_module_hooks()  # they would divide each weight again after its first use
        hooks.forward_hooks, hooks.backward_hooks = [], []
        try:
            with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
                yield
        finally:
            hooks.setup_zero_stage3_hooks()

    def gathered_state(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Return everything that the model's files hold, whole, on the CPU. None: each process has it."""
        if self.stage < 3 or self.engine is None:
            return None
        import deepspeed

        copies: dict[int, Tensor] = {}
        state = model.state_dict(keep_vars=True)
        for tensor in state.values():
            if id(tensor) not in copies:
                with deepspeed.zero.GatheredParameters([tensor]):
                    copies[id(tensor)] = tensor.detach().cpu().clone()
        return {name: copies[id(tensor)] for name, tensor in state.items()}

    def optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what `optimizer_tensors` returns of an optimizer that is not divided."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        group = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        settings = {"groups": [{**group, "params": self.names}]}
        states = list(self.optimizer.state.values())
        if not states:
            return {}, settings
        tensors: dict[str, Tensor] = {}
        for name in self.names:
            parameter = self.model.get_parameter(name)
            tensors[f"{name}.step"] = states[0]["step"].cpu().clone()
            for key in MOMENTS:
                tensors[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).cpu().clone()
            if self.half:
                tensors[f"{name}.{MASTER}"] = safe_get_full_fp32_param(parameter).cpu().clone()
        return tensors, settings

    def load_optimizer_state(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Put back what `optimizer_state` returned, or what an optimizer that was not divided left."""
        if [name for group in settings["groups"] for name in group["params"]] != self.names:
            raise CheckpointError("the checkpoint's optimizer belongs to other parameters than this model trains")
        if not tensors:
            return
        zero = self.engine.optimizer
        parts = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        count = tensors[f"{self.names[0]}.step"]
        for part in parts:
            moments = {key: torch.zeros_like(part) for key in MOMENTS}
            self.optimizer.state[part] = {"step": count.to(part.device, torch.float32, copy=True), **moments}
        if self.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()
        for name in self.names:
            parameter = self.model.get_parameter(name)
            for key in MOMENTS:
                self._put_back(parameter, tensors[f"{name}.{key}"], key)
            if self.half and f"{name}.{MASTER}" in tensors:
                self._put_back(parameter, tensors[f"{name}.{MASTER}"], None)

    def _put_back(self, parameter: nn.Parameter, whole: Tensor, key: str | None) -> None:
        """Keep this process's part of one of the optimizer's tensors; key None is the weight in float32."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        if self.stage == 3:
            size = parameter.ds_tensor.numel()
            padded = torch.zeros(size * dist.get_world_size(), dtype=torch.float32, device=whole.device)
            padded[: whole.numel()] = whole.flatten()
            own = padded[size * dist.get_rank() :][:size]
            if key is None:
                safe_set_local_fp32_param(parameter, own)
            else:
                safe_set_local_optimizer_state(parameter, own, key)
        elif key is None:
            safe_set_full_fp32_param(parameter, whole)
        else:
            safe_set_full_optimizer_state(parameter, whole, key)


def without_masters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An optimizer's tensors as one without DeepSpeed has them: it steps on the weights themselves."""
    return {key: tensor for key, tensor in tensors.items() if not key.endswith(f".{MASTER}")}
