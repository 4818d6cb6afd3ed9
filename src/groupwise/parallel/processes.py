"""The processes of one run, as `torchrun` or `accelerate launch` started them; alone, there is one.

Every process runs the same loop on the same state. Work that is dealt out comes back to all of them
(`gather`), so whatever is decided from it is decided alike everywhere. What goes wrong in one goes wrong
in all, with one sentence: the leader says it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from groupwise.config import Config
from groupwise.config.schema import RunConfig
from groupwise.errors import ConfigError, GroupwiseError, InvariantError, RemoteRankError

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")

BUCKET = 1 << 25
"""Numbers summed over processes in one message."""
PATIENCE = timedelta(hours=2)
"""How long one process waits for the others: rollouts and evaluations of one may take that much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Who takes part, and which of them this one is."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    """Among those on this machine: which GPU is ours."""
    group: Any = None
    """The line they talk on; None: the one that all share."""

    def aside(self) -> Processes:
        """The same processes on a line of their own, for a thread beside the one that trains."""
        if self.count == 1:
            return self
        import torch.distributed as dist

        return replace(self, group=dist.new_group(backend="gloo", timeout=PATIENCE))

    @property
    def leader(self) -> bool:
        """The one that writes files, talks to trackers and speaks."""
        return self.rank == 0

    @property
    def share(self) -> slice:
        """Of a list that all have, what this process works on."""
        return slice(self.rank, None, self.count)

    def gather(self, value: T) -> list[T]:
        """Return everyone's value, in the order of ranks."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        values: list[T] = [value] * self.count
        with connected():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def joined(self, own: Sequence[T]) -> list[T]:
        """Return the whole list of which each process made its `share`."""
        parts = self.gather(list(own))
        longest = max(len(part) for part in parts)
        return [part[i] for i in range(longest) for part in parts if i < len(part)]

    def any(self, value: bool) -> bool:
        return any(self.gather(value))

    @contextmanager
    def together(self) -> Iterator[None]:
        """End the block in all processes or in none: one that fails takes the others with it.

        Every process must come by here. What is raised is the failure of the lowest rank; those that
        are not the leader leave the telling to it.
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
        told = [None if own is None else (portable(own), self.rank)]
        failures = [failure for part in self.gather(told) for failure in part if failure is not None]
        if failures:
            first, rank = failures[0]
            if self.leader:
                raise (own if own is not None else with_rank(first, rank)) from own
            raise RemoteRankError(str(first), code=exit_code(first)) from own

    def lead(self, work: Callable[[], T]) -> T | None:
        """Let the leader do something alone; the others go on when it is done, or fail with it."""
        done = None
        with self.together():
            if self.leader:
                done = work()
        return done

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes; few large messages for many small tensors."""
        if self.count == 1:
            return
        for bucket in buckets(tensors):
            sum_bucket(bucket, group=self.group)


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split into lists of one type and device each, of bounded size."""
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
    """Join the others that the launcher's environment speaks of, and leave them at the end."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    import torch
    import torch.distributed as dist

    # Else transformers, seeing accelerate's FSDP, would give all but the first process empty weights.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    if cuda:
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local_rank} of this machine has no GPU of its own: there are "
                f"{torch.cuda.device_count()}; start as many processes as GPUs"
            )
        torch.cuda.set_device(local_rank)
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
    try:
        yield Processes(rank=rank, count=count, local_rank=local_rank)
    except (ConfigError, InvariantError) as error:
        error.add_note(f"in process {rank}")  # nobody else tells it
        raise
    finally:
        if mine:
            dist.destroy_process_group()


@contextmanager
def connected() -> Iterator[None]:
    """Say so when another process has gone: its own words tell why."""
    try:
        yield
    except RuntimeError as error:
        raise InvariantError(
            f"another process of this run is gone, see its own message ({str(error).splitlines()[0]})"
        ) from error


def portable(error: Exception) -> Exception:
    """The error itself where it can travel, else one of the same kind with its words."""
    try:
        copied: Exception = pickle.loads(pickle.dumps(error))
        return copied
    except Exception:  # a user's error may fail to pickle in any way; its words must get through all the same
        return RuntimeError(f"{type(error).__name__}: {error}")


def with_rank(error: Exception, rank: int) -> Exception:
    """The same error, saying where it happened."""
    kind = type(error) if isinstance(error, GroupwiseError) else RuntimeError
    return kind(f"in process {rank}: {error}")


def exit_code(error: Exception) -> int:
    return 2 if isinstance(error, ConfigError) else 3 if isinstance(error, InvariantError) else 1


DIVIDING = ("fsdp", "zero1", "zero2", "zero3")
"""Layouts that divide the policy, or what its optimizer keeps."""


def layout_of(run: RunConfig) -> str:
    """Return how several processes share the update: ddp, fsdp, zero1, zero2, zero3 or context."""
    if run.parallel is not None:
        return run.parallel
    if accelerate_env("USE_DEEPSPEED", "false") == "true":
        return f"zero{zero_stage()}"
    return "fsdp" if accelerate_env("USE_FSDP", "false") == "true" else "ddp"


def as_launched(config: Config) -> Config:
    """Take over where accelerate's DeepSpeed settings put the optimizer; the rest is ours to say."""
    if config.run.parallel is not None or not layout_of(config.run).startswith("zero"):
        return config
    if accelerate_env("DEEPSPEED_CONFIG_FILE") != "none":
        raise ConfigError(
            "deepspeed_config_file is not read: most of what it says is said by settings of this program; "
            "give accelerate a zero_stage instead"
        )
    if accelerate_env("DEEPSPEED_OFFLOAD_PARAM_DEVICE") != "none":
        raise ConfigError("offload_param_device must be none: only the optimizer can be kept in main memory")
    place = accelerate_env("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE")
    if place not in ("none", "cpu"):
        raise ConfigError(f"offload_optimizer_device must be none or cpu; got {place}")
    return config if place == "none" else replace(config, optim=replace(config.optim, offload=True))


def zero_stage() -> int:
    stage = accelerate_env("DEEPSPEED_ZERO_STAGE", "2")
    if stage not in ("1", "2", "3"):
        raise ConfigError(f"accelerate's zero_stage must be 1, 2 or 3; got {stage}")
    return int(stage)


def accelerate_env(name: str, default: str = "none") -> str:
    return os.environ.get(f"ACCELERATE_{name}", default).lower()
