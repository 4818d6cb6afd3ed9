"""Run user functions, such as rewards and tools, in a worker process that can be killed.

User code can defeat a time limit inside its own process: `except: continue`, `signal.alarm(0)`. Functions
from outside this package therefore run in a worker. At the start of a run, before CUDA is initialized, the
trainer forks a *fork server*, which inherits every job, including closures and lambdas. The fork server
calls none of them. It forks the worker that does, and forks a new one when a worker hangs, dies or is
discarded.

    trainer ── control socket ── fork server ── fork ──> worker
       └──────── requests (pickle), replies (JSON) ────────┘

State that a function keeps between calls lives in the worker and is lost with it.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from groupwise.errors import RolloutError
from groupwise.isolation.time_limit import is_ours

GRACE_SECONDS = 1.0
"""How long after its time limit a call may still run before the worker is killed."""
START_SECONDS = 60.0
"""How long a worker may take to start."""
MEMORY_SHARE = 0.5
"""Share of the machine's memory that a worker may allocate beyond what it inherits."""
ERROR_CHARACTERS = 300
"""How much of a command's error output is shown."""
SIZE = struct.Struct("!Q")
END = "end"
Function = Callable[..., Any]
Job = Callable[[Any, float], Iterable[Any]]
"""Takes arguments and a time limit for each call, and yields the result of each call as JSON data."""


class WorkerLost(Exception):
    """The worker died or was killed during a call."""


class UnmovableError(Exception):
    """The arguments of a call cannot be sent to another process."""


class Worker:
    """Trainer-side handle to the worker of one task. Makes one call at a time; other threads wait.

    A context manager: entering forks the fork server, leaving terminates it and the worker.
    """

    def __init__(self, jobs: Mapping[str, Job]) -> None:
        self.jobs = jobs
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._server = 0
        self._channel: socket.socket | None = None

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):  # otherwise both processes write the buffered output
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        with warnings.catch_warnings():
            # Python warns that another thread may hold a lock. A call that hangs on one is killed.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._server = os.fork()
        if self._server == 0:
            try:
                ours.close()
                fork_workers(theirs, self.jobs)
            finally:
                os._exit(0)
        theirs.close()
        self._control = ours
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()
        if self._control is not None:
            self._control.close()  # the fork server reads EOF, kills its worker and exits
            self._control = None
            with suppress(ChildProcessError):
                os.waitpid(self._server, 0)

    def discard(self) -> None:
        """Discard the worker and all its state. The next call starts a new one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def replies(self, job: str, arguments: Any, *, seconds: float) -> Iterator[Any]:
        """Yield the result of each call that a job makes. Raise `WorkerLost` if a call terminates the worker.

        `seconds` limits each call.
        """
        with self._lock:
            self._send_request((job, arguments, seconds))
            ended = False
            try:
                while (reply := self._reply(seconds)) != END:
                    yield reply
                ended = True
            finally:
                if not ended:  # the next job must not receive replies of this one
                    self.discard()

    def _send_request(self, request: Any) -> None:
        try:
            data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickle propagates any exception of an object's methods
            raise UnmovableError(f"its arguments cannot be pickled ({error})") from error
        if self._channel is not None:
            try:
                send(self._channel, data)
                return
            except OSError:  # the worker died after the previous call: retry with a new one
                self.discard()
        channel = self._start()
        try:
            send(channel, data)
        except OSError:
            self.discard()
            raise WorkerLost("the worker process exited before the call") from None

    def _start(self) -> socket.socket:
        assert self._control is not None, "use the worker inside its context"
        channel, theirs = socket.socketpair()
        self._channel = channel
        try:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError:
            self.discard()
            raise WorkerLost("the fork server has died; restart the run") from None
        finally:
            theirs.close()
        if self._reply(START_SECONDS) != "ready":
            raise WorkerLost("the worker process did not start")
        return channel

    def _reply(self, seconds: float) -> Any:
        assert self._channel is not None
        try:
            self._channel.settimeout(seconds + GRACE_SECONDS)
            return json.loads(receive(self._channel))
        except TimeoutError:
            self.discard()
            raise WorkerLost(f"took longer than {seconds:g} s; its worker process was killed") from None
        except (OSError, EOFError, ValueError):
            self.discard()
            raise WorkerLost(
                "terminated its worker process (a crash, os._exit or out of memory); a new one is started"
            ) from None


def send(channel: socket.socket, data: bytes) -> None:
    channel.sendall(SIZE.pack(len(data)) + data)


def receive(channel: socket.socket) -> bytes:
    return receive_exactly(channel, SIZE.unpack(receive_exactly(channel, SIZE.size))[0])


def receive_exactly(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def fork_workers(control: socket.socket, jobs: Mapping[str, Job]) -> None:
    """Run the fork server: for each socket received, kill the current worker and fork a new one."""
    os.setsid()  # the trainer handles Ctrl-C
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = 0
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        kill(worker)
        if not message:  # the trainer has exited
            return
        worker = os.fork()
        if worker == 0:
            try:
                control.close()
                serve(socket.socket(fileno=descriptors[0]), jobs)
            finally:
                os._exit(1)
        os.close(descriptors[0])


def kill(worker: int) -> None:
    """Kill a worker and all its child processes."""
    if worker:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)  # it may not have called setsid yet
        with suppress(ChildProcessError):
            os.waitpid(worker, 0)


def serve(channel: socket.socket, jobs: Mapping[str, Job]) -> None:
    """Run the worker: serve requests until the trainer closes the socket."""
    os.setsid()  # so that killing the process group also kills its children
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # rewards must not read from the terminal
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    limit_resources()
    if "torch" in sys.modules:  # threads do not survive a fork, and OpenMP would wait for them
        sys.modules["torch"].set_num_threads(1)
    send(channel, b'"ready"')
    while True:
        try:
            name, arguments, seconds = pickle.loads(receive(channel))
        except EOFError:
            return
        for reply in jobs[name](arguments, seconds):
            send(channel, json.dumps(reply).encode())
        send(channel, json.dumps(END).encode())
        for stream in (sys.stdout, sys.stderr):  # buffered output is lost if the next call is killed
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()


def limit_resources() -> None:
    """Limit the worker's memory, so that it and not the trainer runs out; disable core dumps."""
    import resource

    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError, IndexError):
        # Limit writable pages, not address space: CUDA reserves far more addresses than memory.
        page = os.sysconf("SC_PAGE_SIZE")
        inherited = int(Path("/proc/self/statm").read_text().split()[5]) * page
        most = inherited + int(MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * page)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of the user; each run has a session of its own, which can be killed."""

    line: str
    running: set[int] = field(default_factory=set, compare=False)
    """Process ids of the runs in progress."""

    def run(self, text: str, *, variables: Mapping[str, str], seconds: float) -> str:
        """Run the command with `text` as its input, and return its output. Raise RolloutError if it fails.

        Programs next to this Python interpreter are found first, `python` among them.
        """
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
        try:
            process = subprocess.Popen(
                shlex.split(self.line),
                env={**os.environ, "PATH": path, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise RolloutError(f"cannot run {self.line!r}: {error}") from None
        self.running.add(process.pid)
        with process:
            try:
                output, errors = process.communicate(text, timeout=seconds)
            except subprocess.TimeoutExpired:
                raise RolloutError(f"took longer than {seconds:g} s") from None
            finally:
                kill_session(process.pid)  # also what the command left running
                self.running.discard(process.pid)
        if process.returncode:
            shown = errors.strip()[-ERROR_CHARACTERS:] or "it wrote no error"
            raise RolloutError(f"exited with status {process.returncode}: {shown}")
        return output.strip()

    def kill(self) -> None:
        """Kill the runs in progress."""
        for process in list(self.running):
            kill_session(process)


def kill_session(process: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def cannot_fork() -> str | None:
    """Return why this process must not fork, or None if it may."""
    if sys.platform != "linux":
        return "worker processes require Linux"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is already initialized, and a process that uses CUDA must not fork"
    return None


def described(function: Function) -> str:
    """Return the name of a function with its file and line."""
    inner = getattr(function, "func", function)
    code = getattr(inspect.unwrap(inner), "__code__", None)
    name = getattr(inner, "__name__", type(inner).__name__)
    return f"{name} ({code.co_filename}, line {code.co_firstlineno})" if code else name


def in_process(function: Function) -> Function:
    """Mark a reward or a tool that must run in the trainer's process, for example to use its GPU.

    Use it as a decorator, or where the task lists the function: `rewards={"judge": gw.in_process(judge)}`.
    If such a call ignores its time limit, the run stops: nothing else can interrupt it.
    """
    try:
        function.in_process = True  # type: ignore[attr-defined]
    except AttributeError:  # a bound method or a builtin
        return in_process(partial(function))
    return function


def is_movable(function: Function) -> bool:
    return not is_ours(function) and not getattr(function, "in_process", False)
