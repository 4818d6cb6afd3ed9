"""Device selection, memory queries, transfers to the device, and on a CPU matrix products and contention.

The threads of a matrix product wait for each other, and so for other busy processes. On two cores, with one
other process busy, two threads draw a third of what one thread alone draws. `CPUThreads` uses fewer threads
then, but only where the results keep their bits: a run is to be repeatable.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.errors import ConfigError


def device_of(name: str | None) -> torch.device:
    """Return the named device, by default the GPU if there is one; raise ConfigError if it does not exist."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        available = f"this machine has cuda:0 to cuda:{count - 1}" if count else "torch finds no GPU"
        raise ConfigError(f"model.device={name} does not exist: {available}; choose another device")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("model.device=mps does not exist on this machine; choose another device")
    return device


def has_kernels(x: Tensor) -> bool:
    """Whether Triton kernels can run on this tensor."""
    return x.is_cuda and _has_triton()


def supports_fp8(device: torch.device) -> bool:
    """Whether the device multiplies matrices in FP8 with a scale for each row and column."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return nvidia and _has_triton() and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device without blocking the host.

    A copy from pageable memory makes the host wait for all queued GPU work. A copy from pinned memory is
    queued like any other work.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


TILE = 4096
"""Approximate tokens per tile in an MLP that keeps no activations: enough to saturate a GPU."""


def total_memory(device: torch.device) -> int:
    """Return the bytes this process may allocate on a device, including torch's per-process limit."""
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        share = torch.cuda.memory.get_per_process_memory_fraction(number)
        return int(share * torch.cuda.get_device_properties(number).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device now."""
    if device.type == "cuda":
        held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        return min(torch.cuda.mem_get_info(device)[0] + held, total_memory(device)) - used
    return _available()


def _available() -> int:
    """Return the available main memory: free or reclaimable where the system reports it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def return_freed_memory() -> None:
    """Return freed heap memory to the system, if the C library supports it."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def kept_numbers(width: int, inner: int, layers: int, *, recomputed: bool) -> int:
    """Return an upper estimate of the activations per token that a forward pass keeps, in elements.

    A layer keeps about ten vectors of the hidden size and four of the intermediate size. With gradient
    checkpointing it keeps one vector, plus the rest of one layer at a time.
    """
    layer = 10 * width + 4 * inner
    return layer + layers * width if recomputed else layers * layer


def tile_count(tokens: int) -> int:
    """Return the number of tiles for so many tokens. Example: 5120 -> 1, because two are slower; 8192 -> 2"""
    return max(1, round(tokens / TILE))


OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of torch's messages on a GPU, on a CPU and of cuBLAS."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an operation failed because memory was short."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


@contextmanager
def explain_out_of_memory(doing: str, remedy: str) -> Iterator[None]:
    """Turn an error about short memory into one sentence that says what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise ConfigError(f"out of memory while {doing}; {remedy}") from error


def raise_device_error(error: Exception) -> None:
    """Raise the error again if memory or a deterministic kernel was missing.

    A trial of what a model can do calls this: such an error says nothing about the model.
    """
    if ran_out_of_memory(error) or NO_DETERMINISTIC_KERNEL in str(error):
        raise error


NO_DETERMINISTIC_KERNEL = "does not have a deterministic implementation"
"""Part of torch's message."""


@contextmanager
def deterministic_kernels(device: torch.device, *, on: bool) -> Iterator[None]:
    """Use only kernels that give the same bits for the same input on a GPU. A CPU always does.

    Must be entered before the first matrix product of the process: cuBLAS reads its workspace setting then.
    Raises ConfigError for an operation that has no such kernel.
    """
    if not on or device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # every element is written anyway
    try:
        yield
    except RuntimeError as error:
        if NO_DETERMINISTIC_KERNEL not in str(error):
            raise
        operation = str(error).partition(f" {NO_DETERMINISTIC_KERNEL}")[0]
        raise ConfigError(
            f"the model uses {operation}, which has no deterministic kernel on a GPU; set "
            "run.deterministic=false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled


PROC = Path("/proc")
CONTENDED_CORES = 0.5
"""Number of cores used by other processes."""
MEASURING_SECONDS = 0.25
"""Minimum measuring time: the system counts CPU time in hundredths of a second."""


class CPUUsage(NamedTuple):
    """Seconds since boot: wall clock, CPU time of our cores, CPU time of this process and its children."""

    clock: float
    everyone: float
    own: float


class CPUThreads:
    """Uses fewer threads while other processes need the cores.

    Without such processes it never calls `torch.set_num_threads`, which takes from MKL the choice to use one
    thread for a small product: attention in generation then takes three times as long.

    keeps_bits: whether the run computes the same bits with so many threads. If not, `adapt` changes nothing.
    """

    def __init__(self, keeps_bits: Callable[[int], bool]) -> None:
        self._threads, self._cores = torch.get_num_threads(), our_cores()
        self._keeps_bits = cache(keeps_bits)
        self._before = self._used()
        self._noticed = False

    def _used(self) -> CPUUsage | None:
        return used(cores=self._cores, pid=os.getpid())

    def adapt(self) -> str | None:
        """Set the number of threads by the load since the last call. Return a notice the first time.

        Call it every few seconds.
        """
        now, cores = self._used(), len(self._cores)
        others = cores_of_others(self._before, now)
        if others is None:
            return None
        self._before = now
        threads = uncontended_threads(others, threads=self._threads, cores=cores)
        adapts = threads == self._threads or self._keeps_bits(threads)
        if adapts and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        if threads == self._threads or self._noticed:
            return None
        self._noticed = True
        return contention_notice(others, threads=self._threads, cores=cores, adapts=adapts)

    def restore(self) -> None:
        """Set the number of threads back."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)


def our_cores() -> frozenset[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def used(proc: Path = PROC, *, cores: frozenset[int], pid: int) -> CPUUsage | None:
    """Read the CPU time used so far; None if the system does not report it."""
    try:
        ticks = 0
        for line in (proc / "stat").read_text().splitlines():
            name, *fields = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in cores:
                user, nice, system, _idle, _waiting, *interrupts = map(int, fields[:7])
                ticks += user + nice + system + sum(interrupts)
        own = ticks_of_family(proc, pid)
    except (OSError, ValueError):
        return None
    second = os.sysconf("SC_CLK_TCK")
    return CPUUsage(time.monotonic(), ticks / second, own / second)


def ticks_of_family(proc: Path, pid: int) -> int:
    """Return the CPU time of a process and its descendants, those that have ended included."""
    ticks, children = {}, dict[int, list[int]]()
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # after the name
        except OSError:
            continue  # the process has ended
        number, parent = int(stat.parent.name), int(fields[1])
        ticks[number] = sum(map(int, fields[11:15]))  # its own time, then that of its ended children
        children.setdefault(parent, []).append(number)
    family = [pid]
    for member in family:
        family += children.get(member, [])
    return sum(ticks.get(member, 0) for member in family)


def cores_of_others(before: CPUUsage | None, after: CPUUsage | None) -> float | None:
    """Return how many cores other processes used on average; None if unknown or measured too briefly."""
    if before is None or after is None or after.clock < before.clock + MEASURING_SECONDS:
        return None
    everyone, own = after.everyone - before.everyone, after.own - before.own
    return max(0.0, everyone - own) / (after.clock - before.clock)


def uncontended_threads(others: float, *, threads: int, cores: int) -> int:
    """Return how many of these threads have a core for themselves, at least one."""
    if others < CONTENDED_CORES or threads + others < cores + CONTENDED_CORES:
        return threads
    return min(threads, max(1, round(cores - others)))


def contention_notice(others: float, *, threads: int, cores: int, adapts: bool) -> str | None:
    """Return a notice if other processes leave too few cores for these threads.

    adapts: whether the run uses fewer threads by itself
    """
    fewer = uncontended_threads(others, threads=threads, cores=cores)
    if fewer == threads:
        return None
    busy = f"other processes use {others:.1f} of {cores} cores"
    if adapts:
        return f"{busy}; until they end, {fewer} of {threads} threads compute, with the same results"
    return (
        f"{busy}, and {threads} threads contend for them; until they end, OMP_NUM_THREADS={fewer} is faster"
    )


@cache
def has_faster_onednn() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL, which torch uses.

    MKL uses AVX-512 on Intel's processors only. On AMD's, oneDNN takes less than half the time. The first
    call bounds its caches, because oneDNN reads their size with its first product.
    """
    has_onednn = torch.backends.mkldnn.enabled and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not has_onednn or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        processor = (PROC / "cpuinfo").read_text()
    except OSError:
        processor = platform.processor()
    if "AuthenticAMD" not in processor:
        return False
    # Two caches of kernels, each of which would keep a thousand: half a megabyte for each shape.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", CACHED_KERNELS)
    os.environ.setdefault("LRU_CACHE_CAPACITY", CACHED_KERNELS)
    return True


CACHED_KERNELS = "64"
"""A pass of an update uses about 20 shapes, a step of generation 5."""


SMALL_MATRIX = 1 << 14
"""Elements of a right operand below which compiling a kernel, about 0.3 ms, takes longer than it saves."""


def uses_onednn(left: Tensor, right: Tensor) -> bool:
    """Whether `product` multiplies these two by oneDNN. Does not depend on the number of rows on the left."""
    if not left.is_cpu or right.numel() < SMALL_MATRIX or not right.is_cpu or not has_faster_onednn():
        return False
    return left.dtype == right.dtype == torch.float32 and left.numel() > 0


def product(left_NI: Tensor, right_IO: Tensor) -> Tensor:
    """Return left @ right, without a gradient."""
    if not uses_onednn(left_NI, right_IO):
        return left_NI @ right_IO
    (rows, inner), columns = left_NI.shape, right_IO.shape[1]
    # The first operand is copied if it is transposed, as in the gradient of a weight. Copying the smaller
    # operand and the result is faster.
    if not left_NI.is_contiguous() and inner * (rows - columns) > rows * columns:
        return _onednn_linear(right_IO.T, left_NI, None).T.contiguous()
    return _onednn_linear(left_NI, right_IO.T, None)


def add_product(total_NO: Tensor, left_NI: Tensor, right_IO: Tensor, *, add: bool = True) -> None:
    """Add left @ right to `total`, or write it there with `add=False`; without a gradient."""
    if left_NI.dtype == total_NO.dtype and not uses_onednn(left_NI, right_IO):
        total_NO.addmm_(left_NI, right_IO, beta=int(add))
    elif add:
        total_NO.add_(product(left_NI, right_IO))
    else:
        total_NO.copy_(product(left_NI, right_IO))


def _onednn_linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    bias_O = None if bias_O is None else bias_O.contiguous()  # its stride is ignored
    y_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
    return y_NO


def repeatable_linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x Wᵀ + b with the same bits from one thread as from two.

    MKL gives each thread a multiple of 4 rows, and has another kernel for fewer than 4, which rounds
    differently. Of 5 to 11 rows, two threads would compute the last 1 to 3 by that kernel, but one thread
    would not. Rows of zeros make them a multiple of 4.

    oneDNN has another kernel for a single row. It compiles a kernel for each number of rows, so generation
    uses few different numbers.
    """
    rows, missing = len(x_NI), 0
    if not x_NI.is_cpu or x_NI.dtype != torch.float32:
        return torch.nn.functional.linear(x_NI, weight_OI, bias_O)
    operands = (x_NI, weight_OI) if bias_O is None else (x_NI, weight_OI, bias_O)
    differentiable = torch.is_grad_enabled() and any(one.requires_grad for one in operands)
    by_onednn = uses_onednn(x_NI, weight_OI) and not differentiable
    if by_onednn:
        missing = rows_to_add(rows)
    elif 4 < rows < 12:
        missing = -rows % 4
    if missing:
        x_NI = torch.nn.functional.pad(x_NI, (0, 0, 0, missing))
    y_NO = (_onednn_linear if by_onednn else torch.nn.functional.linear)(x_NI, weight_OI, bias_O)
    if not missing:
        return y_NO
    # Not a view where that is possible: autograd forbids changing a view that a function returns.
    return y_NO[:rows] if differentiable else y_NO.resize_(rows, y_NO.shape[1])


def rows_to_add(rows: int) -> int:
    """Return how many rows to add for oneDNN; none to the many of an update. Example: 384 -> 0, 385 -> 31"""
    if rows == 1:
        return 1
    return -rows % max(16, 1 << rows.bit_length() - 4) if 16 < rows < 1024 else 0


COMPARED_ROWS = (*range(1, 18), 64, 384)
COMPARED_TOKENS = (20, 60, 333, 1024)


def products_keep_bits(weights: Iterable[tuple[Tensor, Tensor | None]], *, threads: int) -> bool:
    """Whether float32 products with these weights and biases have the same bits with so many threads.

    Compares those of generation, with few rows and many, and those of an update.
    """
    weights, all_threads = list(weights), torch.get_num_threads()

    def products() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        for weight_OI, bias_O in weights:
            outputs, inputs = weight_OI.shape
            x_TI = torch.randn(max(COMPARED_TOKENS), inputs, generator=generator)
            gradient_TO = torch.randn(max(COMPARED_TOKENS), outputs, generator=generator)
            for rows in COMPARED_ROWS:
                yield repeatable_linear(x_TI[:rows], weight_OI, bias_O)
                yield repeatable_linear(gradient_TO[:rows], weight_OI.T, None)
            for tokens in COMPARED_TOKENS:
                yield product(x_TI[:tokens], weight_OI.T)
                yield product(gradient_TO[:tokens], weight_OI)
                yield product(gradient_TO[:tokens].T, x_TI[:tokens])

    # Until the first call of `set_num_threads`, MKL uses one thread where a product gains nothing from two.
    expected = list(products())
    try:
        for count in (threads, all_threads):
            torch.set_num_threads(count)
            if not all(map(torch.equal, products(), expected)):
                return False
    finally:
        torch.set_num_threads(all_threads)
    return True
