"""Compare answers by `math-verify` in a separate process that can be killed at any time.

`MathVerifyPool` starts a process that runs `main`. It reads one pair of answers per line as JSON and writes
one verdict per line. It only supervises: it imports sympy once and forks a child that compares within time
and memory limits. When a child exceeds a limit or crashes, that comparison fails and a new child is forked
within milliseconds, with everything already imported.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from groupwise.errors import ConfigError, RolloutError

SECONDS = 0.5
"""CPU time limit of one comparison."""
PATIENCE = 4
"""Wall-clock limit as a multiple of the CPU time limit: a busy machine must not change a verdict."""
START_SECONDS = 60.0
REPLY_SECONDS = PATIENCE * SECONDS + 2.0
"""How long to wait for a reply before the worker is considered dead."""
MEMORY_BYTES = 2 << 30
WARM_UP = r"\lfloor\frac{x^2+\sqrt{2}}{3}\rfloor+\sum_{k=1}^{3}k\cdot\sin(x)"


class MathVerifyPool:
    """A worker process that is started on demand and restarted when it dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.ready = False
        self.lock = threading.Lock()

    def equal(self, predicted: str, truth: str) -> bool:
        """Compare two answers in the worker. Raise RolloutError if that fails or exceeds the limits."""
        with self.lock:
            response = self.request(predicted, truth) or self.request(predicted, truth)
        if response is None:
            raise RolloutError("the math-verify process died twice on one answer")
        if "error" in response:
            raise RolloutError(str(response["error"]))
        return bool(response["equal"])

    def request(self, predicted: str, truth: str) -> dict[str, object] | None:
        """Return the response, or None if the worker died and was discarded."""
        self.start()
        process = self.process
        assert process is not None
        assert process.stdin is not None
        self.ready = self.ready or self.reply(START_SECONDS) is not None
        try:
            process.stdin.write(json.dumps({"predicted": predicted, "truth": truth}) + "\n")
            process.stdin.flush()
            response = self.reply(REPLY_SECONDS)
        except (BrokenPipeError, ValueError):
            response = None
        except BaseException:
            # Interrupted between request and response: the next request must not receive this response.
            self.stop()
            raise
        if response is None:
            self.stop()
        return response

    def reply(self, seconds: float) -> dict[str, object] | None:
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        return dict(json.loads(line)) if line else None

    def start(self) -> None:
        """Start the worker if none is running, without waiting until it is ready."""
        if self.process is not None and self.process.poll() is None:
            return
        self.stop()
        package = Path(__file__).parents[2]
        path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        self.ready = False

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


comparer = MathVerifyPool()
atexit.register(comparer.stop)


def require() -> None:
    """Raise ConfigError if `math-verify` is not installed; start the worker in the background."""
    if find_spec("math_verify") is None:
        raise ConfigError("the math verifier requires math-verify: pip install 'groupwise[math]'")
    comparer.start()


def main() -> None:
    seconds = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    compare(WARM_UP, WARM_UP)  # import and fill the parser's tables before the fork: children inherit them
    reply({"ready": True}, sys.stdout)
    child = WorkerFork(seconds)
    for line in sys.stdin:
        response = child.request(line)
        if response is None:
            child = WorkerFork(seconds)
            response = json.dumps(
                {"error": f"the comparison took more than {seconds:g} s or too much memory"}
            )
        sys.stdout.write(f"{response.strip()}\n")
        sys.stdout.flush()
    child.kill()


class WorkerFork:
    """A forked child that serves comparisons over pipes until it is killed."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(request_write)
            os.close(reply_read)
            serve(os.fdopen(request_read), os.fdopen(reply_write, "w"), seconds)
            os._exit(0)
        os.close(request_read)
        os.close(reply_write)
        self.requests = os.fdopen(request_write, "w")
        self.replies = os.fdopen(reply_read)

    def request(self, line: str) -> str | None:
        """Return the child's response, or None if it exceeded a limit and was killed."""
        try:
            self.requests.write(line)
            self.requests.flush()
        except BrokenPipeError:
            self.kill()
            return None
        ready, _, _ = select.select([self.replies], [], [], PATIENCE * self.seconds)
        response = self.replies.readline() if ready else ""
        if not response:
            self.kill()
        return response or None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for pipe in (self.requests, self.replies):
            with suppress(BrokenPipeError):
                pipe.close()


def serve(requests: IO[str], replies: IO[str], seconds: float) -> None:
    """Serve requests. The kernel kills this process when one takes too long or too much memory."""
    import resource

    with suppress(ValueError, OSError):  # not every system supports this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # no handler: the signal also interrupts calls into C
    for line in requests:
        pair = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer: dict[str, object] = {"equal": compare(pair["predicted"], pair["truth"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply(answer, replies)


def compare(predicted: str, truth: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    # Only the LaTeX extractor: the fallbacks take the last number they see.
    # The library's own time limits do not interrupt calls into C; this process sets stricter ones.
    ours, theirs = (
        parse(
            f"${text}$",
            extraction_config=[LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )
        for text in (predicted, truth)
    )
    return bool(verify(theirs, ours, float_rounding=10, strict=True, timeout_seconds=None))


def reply(answer: dict[str, object], to: IO[str]) -> None:
    to.write(f"{json.dumps(answer)}\n")
    to.flush()
