"""The processes of a run, as started by `torchrun` or `accelerate launch`, and their collectives.

Every process runs the same loop on the same state. Results of distributed work are gathered by all, so all
processes make the same decisions. An error in one process stops all of them, and the leader reports it.
The end of the module reads the parallel layout from the config or from accelerate's environment, and
distributes an update: balanced shares of samples, sharding, and gradient sums.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from groupwise.config import Config
from groupwise.config.schema import RunConfig
from groupwise.errors import ConfigError, GroupwiseError, InvariantError, RemoteRankError
from groupwise.model.ops.equivalence import draws_noise
from groupwise.model.policy import Policy
from groupwise.model.sharding import FSDPShards, ZeroEngine
from groupwise.records import Sample

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")

BUCKET = 1 << 25
"""Elements per all-reduce."""
PATIENCE = timedelta(hours=2)
"""Timeout of collectives: rollouts and evaluations of one process may take much longer than of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The process group of a run, and this process's rank in it."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    """Rank on this machine: the index of this process's GPU."""
    group: Any = None
    """The torch process group; None: the default group."""

    def aside(self) -> Processes:
        """Return the same processes with a group of their own, for a thread beside the training thread."""
        if self.count == 1:
            return self
        import torch.distributed as dist

        return replace(self, group=dist.new_group(backend="gloo", timeout=PATIENCE))

    @property
    def leader(self) -> bool:
        """Whether this process writes files, logs to trackers and prints."""
        return self.rank == 0

    @property
    def share(self) -> slice:
        """The part of a common list that this process works on."""
        return slice(self.rank, None, self.count)

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in rank order."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        values: list[T] = [value] * self.count
        with connected():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def joined(self, own: Sequence[T]) -> list[T]:
        """Return the whole list from each process's `share` of it."""
        parts = self.gather(list(own))
        longest = max(len(part) for part in parts)
        return [part[i] for i in range(longest) for part in parts if i < len(part)]

    def any(self, value: bool) -> bool:
        return any(self.gather(value))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Fail in all processes if the block fails in one.

        Every process must enter this context. The error of the lowest rank is raised on the leader; other
        ranks raise RemoteRankError, so only the leader reports it.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.count == 1:
                raise
            own = error
        if self.count == 1:
            return
        outcome = [None if own is None else (portable(own), self.rank)]
        failures = [failure for part in self.gather(outcome) for failure in part if failure is not None]
        if failures:
            first, rank = failures[0]
            if self.leader:
                raise (own if own is not None else with_rank(first, rank)) from own
            raise RemoteRankError(str(first), code=exit_code(first)) from own

    def lead(self, work: Callable[[], T]) -> T | None:
        """Run `work` on the leader only; other processes wait for it, or fail with it."""
        result = None
        with self.together():
            if self.leader:
                result = work()
        return result

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in a few large all-reduces."""
        if self.count == 1:
            return
        for bucket in buckets(tensors):
            sum_bucket(bucket, group=self.group)


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split tensors into lists of bounded size, each of one dtype and device."""
    held: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        bucket = held.setdefault(kind, [])
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET:
            yield held.pop(kind)
            held[kind] = bucket = []
        bucket.append(tensor)
    yield from (bucket for bucket in held.values() if bucket)


def sum_bucket(tensors: Sequence[Tensor], *, group: Any) -> None:
    import torch
    import torch.distributed as dist

    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    with connected():
        dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


@contextmanager
def joined_processes() -> Iterator[Processes]:
    """Join the process group given by the launcher's environment variables, and leave it at the end."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    import torch
    import torch.distributed as dist

    # Otherwise transformers would see accelerate's FSDP and load empty weights on all ranks but the first.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    if cuda:
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local_rank} has no GPU of its own: this machine has "
                f"{torch.cuda.device_count()}; start at most one process per GPU"
            )
        torch.cuda.set_device(local_rank)
    owns_group = not dist.is_initialized()
    if owns_group:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
    try:
        yield Processes(rank=rank, count=count, local_rank=local_rank)
    except (ConfigError, InvariantError) as error:
        error.add_note(f"in process {rank}")  # errors outside of `together` do not name the rank
        raise
    finally:
        if owns_group:
            dist.destroy_process_group()


@contextmanager
def connected() -> Iterator[None]:
    """Turn a failed collective into an InvariantError that points to the other process's message."""
    try:
        yield
    except RuntimeError as error:
        raise InvariantError(
            f"another process of this run has stopped ({str(error).splitlines()[0]}); see that process's "
            "own error message"
        ) from error


def portable(error: Exception) -> Exception:
    """Return the error if it can be pickled, else a RuntimeError with its message."""
    try:
        copied: Exception = pickle.loads(pickle.dumps(error))
        return copied
    except Exception:  # a user's error may fail to pickle in any way; its message must still get through
        return RuntimeError(f"{type(error).__name__}: {error}")


def with_rank(error: Exception, rank: int) -> Exception:
    """Return the error with the rank prepended to its message."""
    kind = type(error) if isinstance(error, GroupwiseError) else RuntimeError
    return kind(f"in process {rank}: {error}")


def exit_code(error: Exception) -> int:
    return 2 if isinstance(error, ConfigError) else 3 if isinstance(error, InvariantError) else 1


DIVIDING = ("fsdp", "zero1", "zero2", "zero3")
"""Parallel layouts that shard the policy or its optimizer state."""


def layout_of(run: RunConfig) -> str:
    """Return how several processes share the update: ddp, fsdp, zero1, zero2, zero3 or context."""
    if run.parallel is not None:
        return run.parallel
    if accelerate_env("USE_DEEPSPEED", "false") == "true":
        return f"zero{zero_stage()}"
    return "fsdp" if accelerate_env("USE_FSDP", "false") == "true" else "ddp"


def as_launched(config: Config) -> Config:
    """Apply accelerate's DeepSpeed optimizer offload to the config; reject unsupported settings."""
    if config.run.parallel is not None or not layout_of(config.run).startswith("zero"):
        return config
    if accelerate_env("DEEPSPEED_CONFIG_FILE") != "none":
        raise ConfigError(
            "deepspeed_config_file is not supported; set zero_stage in accelerate's config and the rest in "
            "groupwise's settings"
        )
    # DeepSpeed offloads parameters in stage 3 only, and ignores the setting in the others.
    if accelerate_env("DEEPSPEED_OFFLOAD_PARAM_DEVICE") != "none" and zero_stage() == 3:
        raise ConfigError(
            "offload_param_device must be none with zero_stage 3: only the optimizer state can be offloaded"
        )
    device = accelerate_env("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE")
    if device not in ("none", "cpu"):
        raise ConfigError(f"offload_optimizer_device must be none or cpu; got {device}")
    return config if device == "none" else replace(config, optim=replace(config.optim, offload=True))


def zero_stage() -> int:
    stage = accelerate_env("DEEPSPEED_ZERO_STAGE", "2")
    if stage not in ("1", "2", "3"):
        raise ConfigError(f"accelerate's zero_stage must be 1, 2 or 3; got {stage}")
    return int(stage)


def accelerate_env(name: str, default: str = "none") -> str:
    return os.environ.get(f"ACCELERATE_{name}", default).lower()


def shares_of_samples(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """Return the indices of the samples of each of `count` processes, in order.

    Groups are assigned greedily, largest first, each to the process with the fewest tokens. A group larger
    than a fair share is divided, and every process with a part of it computes its prompt.

    Example: groups of 6, 3 and 3 tokens for two processes -> the first group; the other two
    """
    if count == 1:
        return [list(range(len(samples)))]
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    fair = sum(cost(samples, members) for members in groups.values()) / count
    pieces = [piece for members in groups.values() for piece in divided(samples, members, at_most=fair)]
    shares: list[list[int]] = [[] for _ in range(count)]
    held = [0] * count
    for piece in sorted(pieces, key=lambda piece: (-cost(samples, piece), piece)):
        least = min(range(count), key=lambda rank: (held[rank], rank))
        shares[least] += piece
        held[least] += cost(samples, piece)
    return [sorted(share) for share in shares]


def divided(samples: Sequence[Sample], members: list[int], *, at_most: float) -> Iterator[list[int]]:
    """Halve a group until every piece costs at most `at_most` or has one member."""
    if len(members) == 1 or cost(samples, members) <= at_most:
        yield members
        return
    middle = len(members) // 2
    yield from divided(samples, members[:middle], at_most=at_most)
    yield from divided(samples, members[middle:], at_most=at_most)


def cost(samples: Sequence[Sample], members: Sequence[int]) -> int:
    """Return the tokens of the packed row: each prompt once, and each completion."""
    prompts = {samples[i].prompt: samples[i].prefix for i in members}
    return sum(prompts.values()) + sum(len(samples[i].tokens) - samples[i].prefix for i in members)


def sum_gradients(processes: Processes, policy: Policy) -> None:
    """All-reduce the gradients; a gradient that no process has stays None.

    FSDP already sums the gradients of sharded layers, DeepSpeed those of all parameters.
    """
    if processes.count == 1 or policy.zero is not None:
        return
    divided = () if policy.shards is None else policy.shards.divided
    parameters = [p for name, p in policy.trainable().items() if name not in divided]
    if not parameters:
        return
    having = processes.gather([parameter.grad is not None for parameter in parameters])
    touched = [p for p, *has in zip(parameters, *having, strict=True) if any(has)]
    for parameter in touched:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    processes.sum_([parameter.grad for parameter in touched if parameter.grad is not None])


def divide(policy: Policy, layout: str) -> None:
    """Shard a policy over the processes of this run, by fsdp, zero1, zero2 or zero3."""
    if policy.unpacked_bytes:
        raise ConfigError("quantized weights cannot be sharded; set run.parallel=ddp")
    if policy.general is not None:
        # Sharded layers need all processes in every pass, and rows of equal length differ among them.
        raise ConfigError(
            f"run.parallel={layout} requires the fast path, but the model {policy.general.reason}; set "
            "run.parallel=ddp"
        )
    assert policy.attention, "record attention before layers are sharded"
    policy.noisy = draws_noise(policy)  # can only be tested before sharding
    if layout == "fsdp":
        policy.shards = FSDPShards(policy.model, policy.decoder, device=policy.device)
    else:
        policy.zero = ZeroEngine(policy.model, policy.head, stage=int(layout.removeprefix("zero")))
