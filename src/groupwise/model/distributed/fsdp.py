"""Sharding with FSDP2: each process holds a shard of every decoder layer.

Torch's `fully_shard` gathers a layer just before its forward pass, frees it afterwards, and reduce-scatters
its gradient. The optimizer steps on the local shards, which are plain tensors. Embeddings, the last norm and
the output layer are replicated: the output matmul is fused with the loss and runs outside of any module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from groupwise.model.ops.checkpointing import use_torch_checkpointing


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
