"""Sharding of a policy over processes, with PyTorch FSDP2 or DeepSpeed ZeRO.

`parallel.processes.divide` applies one of them to a policy.

FSDP: each process holds a shard of every decoder layer. Torch's `fully_shard` gathers a layer just before its
forward pass, frees it afterwards, and reduce-scatters its gradient. The optimizer steps on the local shards,
which are plain tensors. Embeddings, the last norm and the output layer are replicated: the output matmul is
fused with the loss and runs outside of any module.

ZeRO: stage 1 shards the optimizer state, stage 2 also the gradients, stage 3 also the weights. DeepSpeed must
see every pass, so the learner's passes run inside a module that wraps the model. DeepSpeed averages gradients
over processes and passes, but our losses are sums that are already divided by the size of the whole batch.
Losses are therefore multiplied by the number of processes, and gradient accumulation does not rescale them.

Files hold full tensors under their usual names.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW

from groupwise.errors import CheckpointError, ConfigError
from groupwise.model.ops.checkpointing import use_torch_checkpointing

T = TypeVar("T")


class FSDPShards:
    """The sharded layers of one model."""

    def __init__(self, model: nn.Module, decoder: Any, *, device: torch.device) -> None:
        use_torch_checkpointing(model)
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in decoder.layers:
            fully_shard(layer, mesh=self.mesh)
        inside = {id(p) for layer in decoder.layers for p in layer.parameters()}
        whole = {p for p in decoder.parameters() if id(p) not in inside}
        fully_shard(decoder, mesh=self.mesh, ignored_params=whole)
        self.modules = [module for module in decoder.modules() if isinstance(module, FSDPModule)]
        for module in self.modules:
            # Losses are sums over the whole batch, so gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self.divided: dict[str, DTensor] = {
            name: p for name, p in model.named_parameters() if p.requires_grad and isinstance(p, DTensor)
        }
        self.parts = {name: nn.Parameter(p.to_local().detach()) for name, p in self.divided.items()}
        """This process's shards by name; the optimizer steps on them, in the parameters' memory."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all layers on every process inside this context. Every process must enter it."""
        for module in self.modules:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in self.modules:
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()

    def take_gradients(self) -> None:
        """Move the gradient shards to the local shards."""
        for name, parameter in self.divided.items():
            gradient = parameter.grad
            self.parts[name].grad = gradient.to_local() if isinstance(gradient, DTensor) else None
            parameter.grad = None

    def gathered(self, name: str, part: Tensor) -> Tensor:
        """Return the full tensor on the CPU, given this process's shard; sharded like this parameter."""
        like = self.divided[name]
        spread = DTensor.from_local(
            part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )
        return spread.full_tensor().cpu()

    def gathered_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the full state dict on the CPU."""
        return {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
            for name, tensor in model.state_dict().items()
        }

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """Return this process's shard of a full tensor: the inverse of `gathered`."""
        like = self.divided[name]
        spread = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        return spread.to_local().clone()

    def norm(self, whole: list[Tensor]) -> Tensor:
        """Return the global gradient norm over all shards and the replicated gradients `whole`."""
        gradients = [part.grad for part in self.parts.values() if part.grad is not None]
        device = (gradients or whole)[0].device
        square = torch.zeros((), device=device)
        for gradient in gradients:
            square += gradient.float().square().sum()
        dist.all_reduce(square)
        for gradient in whole:
            square += gradient.float().square().sum()
        return square.sqrt()


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
"""Key in files of the float32 master copy of a half-precision weight, beside its moments."""
KEPT_WHOLE = 100_000
"""Parameters with at most so many elements (norms, biases) are gathered once per step, not per pass."""


class ZeroForward(nn.Module):
    """Module passed to DeepSpeed: its forward pass runs any computation with the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class ZeroEngine:
    """DeepSpeed's engine around one model; the model is unchanged until `start`."""

    engine: Any = None
    optimizer: AdamW
    names: tuple[str, ...]
    """Names of the trained parameters."""
    half: bool
    """Whether they are in half precision; the optimizer then keeps float32 master copies."""

    def __init__(self, model: nn.Module, head: nn.Module, *, stage: int) -> None:
        if find_spec("deepspeed") is None:
            raise ConfigError(
                f"run.parallel=zero{stage} requires DeepSpeed: pip install 'groupwise[deepspeed]'"
            )
        use_torch_checkpointing(model)
        self.model, self.head, self.stage = model, head, stage

    def start(self, optimizer: AdamW, *, max_grad_norm: float, offload: bool) -> None:
        """Initialize DeepSpeed; the optimizer then steps on this process's shard."""
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
                "zero_force_ds_cpu_optimizer": False,  # torch's AdamW also works and needs no compiler
            },
        )
        if self.stage == 3:
            # The output matmul is fused with the loss and runs outside of the layer's own module.
            for parameter in self.head.parameters():
                deepspeed.zero.register_external_parameter(passes, parameter)

    def computing(self, compute: Callable[[], T]) -> T:
        """Run a forward pass. Every process must call this."""
        result: T = self.engine(compute)
        return result

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * dist.get_world_size())

    def step(self) -> float:
        """Clip the summed gradient, step, and return the gradient norm before clipping."""
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        return norm if norm >= 0 else float("nan")  # DeepSpeed returns -1 for a non-finite gradient

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all weights on every process inside this context. Every process must enter it."""
        if self.engine is None or self.stage < 3:
            yield
            return
        from deepspeed.runtime.zero import unwrap_model_for_generation

        with unwrap_model_for_generation(self.engine):
            yield

    def gathered_state(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Return the full state dict on the CPU of rank 0. None: weights are not sharded."""
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
        """Return on rank 0 what `optimizer_tensors` returns for an unsharded optimizer."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        group = {**self.optimizer.param_groups[0], "params": list(self.names)}
        tensors: dict[str, Tensor] = {}
        # The state is empty before the first step; all parameters have the same step count.
        for state in list(self.optimizer.state.values())[:1]:
            for name in self.names:
                parameter = self.model.get_parameter(name)
                full = {"step": state["step"]}
                full |= {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
                if self.half:
                    full[MASTER] = safe_get_full_fp32_param(parameter)
                if dist.get_rank() == 0:
                    tensors |= {f"{name}.{key}": value.to("cpu", copy=True) for key, value in full.items()}
        return tensors, {"groups": [group]}

    def load_optimizer_state(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Restore the state from `optimizer_state`, or that of an unsharded optimizer."""
        if tuple(name for group in settings["groups"] for name in group["params"]) != self.names:
            raise CheckpointError(
                "the checkpoint's optimizer state is for other parameters than this model trains; resume "
                "with the run's own model and lora settings"
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
                    self._restore(self.model.get_parameter(name), key, tensors[f"{name}.{key}"])

    def _restore(self, parameter: Any, key: str, whole: Tensor) -> None:
        """Store this process's shard of one of the optimizer's tensors."""
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
    """Import DeepSpeed for the policy's device and attach it to the existing process group."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # DeepSpeed uses deprecated torch functions, and torch warns at every pass.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed.*is deprecated", category=FutureWarning)
    import deepspeed

    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # otherwise it compiles its own communication backend
    deepspeed.init_distributed(verbose=False)
    return deepspeed


def without_masters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return optimizer tensors without master copies, for an optimizer that steps on the weights directly."""
    return {key: tensor for key, tensor in tensors.items() if not key.endswith(f".{MASTER}")}
