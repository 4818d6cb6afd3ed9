"""Run untrusted Python with tests: a server process that forks a tester and a candidate for each run.

    trainer ── control socket ── server ── fork ──> tester ── fork ──> candidate
       └────────── job, verdict ───────────────────────┘ └─ calls by value ─┘

`Sandbox` is the trainer's side. The *server* is a fresh interpreter, so it holds nothing of the trainer, and
it never sees code or tests. It forks a *tester* for each run. The tester forks the *candidate*, which
executes the untrusted code, and only then reads the job from a socket of its own: the tests were never in the
memory of the candidate. The tester executes the tests (`code_tests`) and sends the verdict.

Where the kernel allows, the server has no network, sees a read-only file system with nothing but Python's
standard library, and has a process namespace of its own, as has each candidate. `Sandbox.missing` says what
the kernel did not allow. The candidate cannot start processes or threads, and the kernel limits its memory
and CPU time.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from groupwise.isolation.code_tests import CodeReport, Disconnected, receive, run_code, send, verdict_of

LIBC: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = (
    1,
    4,
    24,
    36,
    38,
)
SYS_MOUNT_SETATTR, AT_RECURSIVE = 442, 0x8000
CANDIDATE_NAMESPACES = NEWNS | NEWNET | NEWIPC | NEWUTS
NOBODY = 65534
BOX = "/box"
"""The candidate's working directory: an empty file system of its own."""
BOX_BYTES, OPEN_FILES = 16 << 20, 32
CHANNEL = 3
"""The only file descriptor of the candidate, beside the null device."""
WARM = ("bisect", "copy", "datetime", "functools", "heapq", "re", "statistics", "string", "typing")
"""Imported before the forks, so that answers do not wait for them."""
START_SECONDS = 60.0
GRACE_SECONDS = 30.0
"""How long after its time limit a run may still take on a busy machine."""
WHAT_IS_MISSING = {
    "network": "the network",
    "files": "files that this user may read or write",
    "processes": "signals to other processes of this user",
}
BOOTSTRAP = """
import sys, types
for name, folder in (("groupwise", sys.argv[2]), ("groupwise.isolation", sys.argv[2] + "/isolation")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from groupwise.isolation.sandbox import main
main()
"""
"""Imports this module without the rest of the package."""


class SandboxError(Exception):
    """The sandbox could not run the tests, which says nothing about the code."""


class Sandbox:
    """The trainer's side: starts the server on demand, and runs up to `workers` jobs at a time."""

    def __init__(self, *, workers: int | None = None, namespaces: bool = True) -> None:
        """`workers`: jobs at a time, by default one per core; `namespaces`: use them where allowed."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = workers or cores
        self.namespaces = namespaces
        self.missing: tuple[str, ...] = ()
        """What the candidate is not cut off from: network, files, processes."""
        self._slots = threading.BoundedSemaphore(self.workers)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._owner = 0

    def run(
        self,
        code: str,
        tests: Sequence[Any],
        *,
        setup: str = "",
        entry_point: str | None = None,
        seconds: float = 2.0,
        memory: int = 512 << 20,
    ) -> CodeReport:
        """Run tests against code. Raise SandboxError if that was not possible; threads may call this.

        tests: each is Python code that raises an exception unless the test passes, or a dict of `args`,
            `kwargs` and `expected` for a call of the entry point
        setup: code that runs before the untrusted code and before the tests
        seconds: limit of the whole run; memory: limit in bytes
        """
        if not tests:
            raise ValueError("there are no tests")
        job = {"code": code, "tests": list(tests), "setup": setup, "entry_point": entry_point}
        with self._slots:
            ours = self._connect()
            latest = time.monotonic() + seconds + GRACE_SECONDS
            try:
                ours.settimeout(seconds + GRACE_SECONDS)
                send(ours, {**job, "seconds": seconds, "memory": memory})
                verdict = receive(ours)
            except Disconnected:  # the tests ended their process, unless:
                if self._process is not None and self._process.poll() is not None:
                    raise SandboxError("the process of the sandbox ended") from None
                if time.monotonic() > latest:
                    raise SandboxError("the sandbox did not answer in time") from None
                verdict = {"failures": ["the tests ended abnormally"] * len(tests)}
            finally:
                ours.close()
        if "broken" in verdict:
            raise SandboxError("the sandbox could not isolate a process: " + str(verdict["broken"]))
        return CodeReport(tuple(verdict["failures"]))

    def _connect(self) -> socket.socket:
        """Return a socket to a new tester."""
        with self._lock:
            if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
                self._stop()
                self._start()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            return ours

    def _start(self) -> None:
        if LIBC is None:
            raise SandboxError("the sandbox for code requires Linux")
        self._control, theirs = socket.socketpair()
        flags = [] if self.namespaces else ["without-namespaces"]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-c", BOOTSTRAP, str(theirs.fileno()), PACKAGE, *flags],
                pass_fds=[theirs.fileno()],
                env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        self._owner = os.getpid()
        self._control.settimeout(START_SECONDS)
        try:
            self.missing = tuple(receive(self._control)["missing"])
        except Disconnected:
            self._stop()
            raise SandboxError("the process of the sandbox did not start") from None
        if self.missing:
            say_once(self.missing)

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()  # the server reads the end of the stream and exits
        if self._process is not None and self._owner == os.getpid():
            self._process.wait()
        self._control = self._process = None

    def close(self) -> None:
        """End the server and everything that it started."""
        with self._lock:
            self._stop()


PACKAGE = str(Path(__file__).parents[1])
said: set[tuple[str, ...]] = set()


def say_once(missing: tuple[str, ...]) -> None:
    from groupwise.tracking.run_folder import LOGGER

    if missing not in said:
        said.add(missing)
        LOGGER.warning(
            "the sandbox cannot keep untrusted code from %s: the kernel does not allow user namespaces here; "
            "run on a machine or in a container that does, or accept the risk",
            ", ".join(WHAT_IS_MISSING[one] for one in missing),
        )


def main() -> None:
    """Run the server."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in [one for one in sys.modules if one.partition(".")[0] == "groupwise"]:
        del sys.modules[name]  # the candidate shall not import the package
    for name in (*WARM, "resource"):
        __import__(name)
    missing = list(WHAT_IS_MISSING) if sys.argv[3:] else enter_namespaces()
    server = os.fork()  # in a new process namespace, this is its first process: all others end with it
    if server:
        control.close()
        os.waitpid(server, 0)
        os._exit(0)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()  # collections in the forks then leave the shared pages alone
    send(control, {"missing": missing})
    serve(control, missing)


def enter_namespaces() -> list[str]:
    """Give this process and its children namespaces of their own; return what was not allowed."""
    for missing in ([], ["files"]):
        # Tried in another process first: one that was allowed a part of this cannot go back.
        if is_allowed(missing):
            set_apart(missing, trial=False)
            return missing
    return list(WHAT_IS_MISSING)


def is_allowed(missing: list[str]) -> bool:
    """Whether a forked process can enter all namespaces of the server and of a candidate."""
    process = os.fork()
    if process == 0:
        try:
            set_apart(missing, trial=True)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1] == 0


def set_apart(missing: list[str], *, trial: bool) -> None:
    """Enter the namespaces of the server and change its root; in a trial also those of a candidate."""
    unshare_as_user(NEWNS | NEWNET | NEWIPC | NEWUTS | NEWPID)
    with suppress(OSError):
        write("/proc/sys/user/max_user_namespaces", "0")  # they would give access to more of the kernel
    if "files" not in missing:
        change_root()
    if trial:
        unshare(CANDIDATE_NAMESPACES)
        if "files" not in missing:
            mount("box", BOX, "tmpfs", MS_NOSUID | MS_NODEV)


def unshare(flags: int) -> None:
    if LIBC.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def unshare_as_user(flags: int) -> None:
    """Enter a user namespace and others. Root also maps `nobody`, whom the candidate becomes."""
    user, group = os.geteuid(), os.getegid()
    if user:
        unshare(NEWUSER | flags)
        write("/proc/self/setgroups", "deny")
        for kind, number in (("uid", user), ("gid", group)):
            write(f"/proc/self/{kind}_map", f"{number} {number} 1")
        return
    waiting, ready = os.pipe()
    helper = os.fork()  # only a process outside may map a second user
    if helper == 0:
        try:
            os.close(ready)
            os.read(waiting, 1)
            for kind in ("uid", "gid"):
                write(f"/proc/{os.getppid()}/{kind}_map", f"0 0 1\n{NOBODY} {NOBODY} 1")
            os._exit(0)
        finally:
            os._exit(1)
    os.close(waiting)
    try:
        unshare(NEWUSER | flags)
    finally:
        os.close(ready)
        mapped = os.waitpid(helper, 0)[1] == 0
    if not mapped:
        raise PermissionError("cannot map users")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    if LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}")


def change_root() -> None:
    """Make a read-only root of Python's standard library, the libraries that it loads, and an empty box."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = "/tmp"
    mount("root", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    libraries = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", f"{sys.base_prefix}/lib"}
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    for path in sorted({*libraries, *standard, "/etc/ld.so.cache", "/dev/null", "/dev/urandom"}):
        if os.path.islink(path) and path in ("/lib", "/lib64"):
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path) and not os.path.exists(root + path):
            place_of(path, root + path)
            mount(path, root + path, None, MS_BIND | MS_REC)
    for folder in sorted({f"{one}/site-packages" for one in standard} | installed_packages()):
        if os.path.isdir(root + folder):
            mount("none", root + folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=4k")
    os.mkdir(root + BOX, 0o755)
    attributes = struct.pack("QQQQ", 1 | 2, 0, 0, 0)  # read-only, no set-user-id files
    if LIBC.syscall(SYS_MOUNT_SETATTR, -1, root.encode(), AT_RECURSIVE, attributes, len(attributes)) != 0:
        raise OSError(ctypes.get_errno(), "mount_setattr")
    os.chdir(root)
    if LIBC.pivot_root(b".", b".") != 0 or LIBC.umount2(b".", MNT_DETACH) != 0:
        raise OSError(ctypes.get_errno(), "pivot_root")
    os.chdir("/")


def place_of(source: str, target: str) -> None:
    """Make a folder or an empty file to mount something on."""
    if os.path.isdir(source):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))


def installed_packages() -> set[str]:
    """Return where packages may be installed below the libraries."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    roots = {sys.base_prefix, "/usr", "/usr/local"}
    names = ("python3/dist-packages", f"{version}/dist-packages", f"{version}/site-packages")
    return {f"{root}/lib/{name}" for root in roots for name in names}


def serve(control: socket.socket, missing: list[str]) -> None:
    """Fork a tester for each socket received; end what a tester leaves behind."""
    testers: dict[int, int] = {}
    candidates: dict[int, int] = {}
    while True:
        for ready in select.select([control.fileno(), *testers], [], [])[0]:
            if ready == control.fileno():
                message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                if not message:  # the trainer has ended
                    for process in (*testers.values(), *candidates.values()):
                        end(process)
                    os._exit(0)
                status, report = os.pipe()
                tester = os.fork()
                if tester == 0:
                    run_as_tester(socket.socket(fileno=descriptors[0]), report, missing)
                os.close(descriptors[0])
                os.close(report)
                testers[status] = tester
            elif text := os.read(ready, 100):  # its candidate's process id, and 0 when that has ended
                candidates[ready] = int(text.split()[-1])
            else:
                os.close(ready)
                os.waitpid(testers.pop(ready), 0)
                end(candidates.pop(ready, 0))


def end(process: int) -> None:
    """Kill a child process and wait for it."""
    if process:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(process, 0)


def limit(**limits: int) -> None:
    """Set limits of the kernel by their names without RLIMIT_."""
    import resource

    for name, value in limits.items():
        with suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def drop_privileges(*, user: bool) -> None:
    """Give up every capability for good; with `user`, root becomes nobody. Else it may end processes."""
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if user and os.geteuid() == 0:
        with suppress(OSError):
            os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    kept = 0 if user else 1 << 5  # CAP_KILL
    LIBC.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0))


def candidate_limits(job: dict[str, Any]) -> None:
    """Limit what the untrusted code may use. Without processes it has no threads either."""
    limit(CPU=math.ceil(job["seconds"]) + 1, AS=int(job["memory"]), FSIZE=BOX_BYTES, NOFILE=OPEN_FILES)
    limit(NPROC=0, CORE=0, MEMLOCK=0)


def enter_box(channel: socket.socket, box: str | None, missing: list[str]) -> None:
    """Leave every file descriptor, the environment and the parent's namespaces behind."""
    os.setsid()
    os.dup2(channel.fileno(), CHANNEL)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(CHANNEL + 1, 1 << 16)
    os.environ.clear()
    if "processes" not in missing:
        unshare(CANDIDATE_NAMESPACES)
        owner = f"uid={NOBODY},gid={NOBODY}," if os.geteuid() == 0 else ""
        if box is None:
            mount(
                "box", BOX, "tmpfs", MS_NOSUID | MS_NODEV, f"{owner}size={BOX_BYTES},nr_inodes=256,mode=700"
            )
    folder = box or BOX
    if box and os.geteuid() == 0:
        os.chown(box, NOBODY, NOBODY)
    os.chdir(folder)
    os.environ.update({"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PATH": ""})
    drop_privileges(user=True)


def run_as_tester(trainer: socket.socket, report: int, missing: list[str]) -> None:
    """Fork the candidate, read the job, test, and send the verdict to the trainer."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        box = tempfile.mkdtemp(prefix="groupwise-") if "files" in missing else None
        channel, theirs = socket.socketpair()
        if "processes" not in missing:
            unshare(NEWPID)
        candidate = os.fork()
        if candidate == 0:
            try:
                enter_box(theirs, box, missing)
                run_code(socket.socket(fileno=CHANNEL), candidate_limits)
            finally:
                os._exit(0)
        theirs.close()
        os.write(report, f"{candidate}\n".encode())
        if box is None:  # else it must remove the box
            drop_privileges(user=False)
        LIBC.prctl(PR_SET_DUMPABLE, 0)  # other processes of this user cannot read or change it
        verdict = tested(trainer, channel)
        end(candidate)
        os.write(report, b"0\n")
        if box:
            shutil.rmtree(box, ignore_errors=True)
        send(trainer, verdict)
    except OSError as error:
        send(trainer, {"broken": str(error)})
    finally:
        os._exit(0)


def tested(trainer: socket.socket, channel: socket.socket) -> dict[str, Any]:
    """Wait for the candidate, read the job and return the verdict."""
    try:
        receive(channel)
    except Disconnected:  # before it ran any code
        return {"broken": "it ended at its start"}
    job = receive(trainer)
    limit(CPU=math.ceil(job["seconds"]) + 2, CORE=0)
    return verdict_of(job, channel)
