"""Compare answers by `math-verify` in a separate process that can be killed at any time."""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from groupwise.errors import ConfigError, RolloutError
from groupwise.rewards.verify.math_verify_worker import PATIENCE

SECONDS = 0.5
"""CPU time limit of one comparison."""
START_SECONDS = 60.0
REPLY_SECONDS = PATIENCE * SECONDS + 2.0
"""How long to wait for a reply before the worker is considered dead."""


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
            [sys.executable, "-m", "groupwise.rewards.verify.math_verify_worker", str(SECONDS)],
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
