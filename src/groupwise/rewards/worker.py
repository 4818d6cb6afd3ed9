"""Running a user's functions in a worker process, which can be killed.

A limit inside the process can be swallowed: `except: continue`, `signal.alarm(0)`. So functions that are
not ours run in a worker. At the start of a run, before CUDA starts, the trainer forks a *fork server*, which
inherits every job, closures and lambdas included. It calls none of them: it forks the worker that
does, and forks another when that one hangs, dies or is thrown away.

    trainer ── control socket ── fork server ── fork ──> worker
       └──────── requests (pickle), replies (JSON) ────────┘

State that a function keeps between calls lives in the worker, and is lost with it.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

GRACE_SECONDS = 1.0
"""Past its time limit, a call that swallows the limit gets this long before the worker is killed."""
START_SECONDS = 60.0
"""For a worker to say that it is ready."""
MEMORY_SHARE = 0.5
"""Of the machine's memory, what a worker may allocate beyond what it inherits."""
SIZE = struct.Struct("!Q")
END = "end"
Function = Callable[..., Any]
Job = Callable[[Any, float], Iterable[Any]]
"""Makes calls, each within so many seconds, and yields the result of each as JSON can write it."""


class WorkerLost(Exception):
    """The worker died or was killed during a call."""


class UnmovableError(Exception):
    """The arguments of a call cannot be sent to another process."""


class Worker:
    """The worker of one task, seen from the trainer. One call at a time; other threads wait.

    Used as a context: entering forks the fork server, leaving ends it and the worker.
    """

    def __init__(self, jobs: Mapping[str, Job]) -> None:
        self.jobs = jobs
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._server = 0
        self._channel: socket.socket | None = None

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):  # else both processes write what waits in the buffer
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        with warnings.catch_warnings():
            # Python warns of threads that hold locks. Here a lock can hang a call, which is then killed.
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
            self._control.close()  # the fork server reads the end, kills its worker and leaves
            self._control = None
            with suppress(ChildProcessError):
                os.waitpid(self._server, 0)

    def discard(self) -> None:
        """Throw the worker away, with all its state; the next call starts another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def replies(self, job: str, arguments: Any, *, seconds: float) -> Iterator[Any]:
        """Yield the result of each call that a job makes; raises `WorkerLost` when one ends the worker.

        Each may take `seconds`.
        """
        with self._lock:
            self._ask((job, arguments, seconds))
            ended = False
            try:
                while (reply := self._reply(seconds)) != END:
                    yield reply
                ended = True
            finally:
                if not ended:  # the next job must not get this one's replies
                    self.discard()

    def _ask(self, request: Any) -> None:
        try:
            data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickle raises whatever an object's own methods raise
            raise UnmovableError(f"its arguments cannot be sent to a worker ({error})") from error
        if self._channel is not None:
            try:
                send(self._channel, data)
                return
            except OSError:  # it ended after the last call, which is no fault of this one
                self.discard()
        channel = self._start()
        try:
            send(channel, data)
        except OSError:
            self.discard()
            raise WorkerLost("the worker process ended before the call") from None

    def _start(self) -> socket.socket:
        assert self._control is not None, "a worker is used inside its context"
        channel, theirs = socket.socketpair()
        self._channel = channel
        try:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError:
            self.discard()
            raise WorkerLost("the process that starts workers has died; start the run again") from None
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
            raise WorkerLost(f"took longer than {seconds:g} s, and its worker process was killed") from None
        except (OSError, EOFError, ValueError):
            self.discard()
            raise WorkerLost(
                "ended its worker process (a crash, os._exit or too much memory); a new one is started"
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
    """Be the fork server: for each socket that arrives, kill the worker there is and fork another."""
    os.setsid()  # Ctrl-C in the terminal is the trainer's to handle
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = 0
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        kill(worker)
        if not message:  # the trainer has ended
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
    """Kill a worker and every process that it started."""
    if worker:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)  # it may not lead its own group yet
        with suppress(ChildProcessError):
            os.waitpid(worker, 0)


def serve(channel: socket.socket, jobs: Mapping[str, Job]) -> None:
    """Be the worker: make calls until the trainer closes the socket."""
    os.setsid()  # its processes are killed with it
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the terminal's input is not for rewards
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    limit_resources()
    if "torch" in sys.modules:  # the trainer's threads do not exist here, and OpenMP would wait for them
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
        for stream in (sys.stdout, sys.stderr):  # what was printed is lost if the next call is killed
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()


def limit_resources() -> None:
    """Let the worker, and not the trainer, run out of memory; write no core file."""
    import resource

    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError, IndexError):
        # Pages that it can write: CUDA reserves far more addresses than memory, and those do not count.
        page = os.sysconf("SC_PAGE_SIZE")
        inherited = int(Path("/proc/self/statm").read_text().split()[5]) * page
        most = inherited + int(MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * page)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def cannot_fork() -> str | None:
    """Say why this process must not fork, if it must not."""
    if sys.platform != "linux":
        return "worker processes need Linux"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is in use already, and a process that uses CUDA must not fork"
    return None


def is_ours(function: Function) -> bool:
    """Whether a function is part of this package: bounded, and not worth a trip to another process."""
    inner = getattr(function, "func", function)  # of functools.partial
    home = getattr(inner, "__module__", None) or type(inner).__module__
    return home.partition(".")[0] == "groupwise"


def described(function: Function) -> str:
    """Return the name of a function and where it stands."""
    inner = getattr(function, "func", function)
    code = getattr(inspect.unwrap(inner), "__code__", None)
    name = getattr(inner, "__name__", type(inner).__name__)
    return f"{name} ({code.co_filename}, line {code.co_firstlineno})" if code else name


def in_process(function: Function) -> Function:
    """Mark a reward or a tool that must run in the trainer's process, such as one that uses its GPU.

    Use it as a decorator, or where the task names the function: `rewards={"judge": gw.in_process(judge)}`.
    A call there that swallows its time limit stops the run, as nothing else can end it.
    """
    try:
        function.in_process = True  # type: ignore[attr-defined]
    except AttributeError:  # a bound method, a builtin
        return in_process(partial(function))
    return function


def is_movable(function: Function) -> bool:
    return not is_ours(function) and not getattr(function, "in_process", False)
