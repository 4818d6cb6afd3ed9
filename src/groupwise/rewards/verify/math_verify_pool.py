"""Comparing answers with `math-verify`, in a process of its own that may be killed at any time."""

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
"""Of computing, for one comparison."""
START_SECONDS = 60.0
REPLY_SECONDS = PATIENCE * SECONDS + 2.0
"""After which the whole worker is taken to be gone."""


class MathVerifyPool:
    """A worker process, started on demand, and started again whenever it is lost."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.ready = False
        self.lock = threading.Lock()

    def equal(self, predicted: str, truth: str) -> bool:
        """Ask the worker; raises RolloutError when the pair cannot be compared within the limits."""
        with self.lock:
            answer = self.ask(predicted, truth) or self.ask(predicted, truth)
        if answer is None:
            raise RolloutError("the comparing process died twice over one answer")
        if "error" in answer:
            raise RolloutError(str(answer["error"]))
        return bool(answer["equal"])

    def ask(self, predicted: str, truth: str) -> dict[str, object] | None:
        """Return the reply; None when the worker was lost, and has been thrown away."""
        self.start()
        process = self.process
        assert process is not None
        assert process.stdin is not None
        self.ready = self.ready or self.reply(START_SECONDS) is not None
        try:
            process.stdin.write(json.dumps({"predicted": predicted, "truth": truth}) + "\n")
            process.stdin.flush()
            answer = self.reply(REPLY_SECONDS)
        except (BrokenPipeError, ValueError):
            answer = None
        except BaseException:
            # Interrupted between question and answer: the next question must not get this one's reply.
            self.stop()
            raise
        if answer is None:
            self.stop()
        return answer

    def reply(self, seconds: float) -> dict[str, object] | None:
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        return dict(json.loads(line)) if line else None

    def start(self) -> None:
        """Start the worker if there is none, without waiting for it."""
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
    """Refuse to go on without `math-verify`, and start the worker while other things load."""
    if find_spec("math_verify") is None:
        raise ConfigError("the math verifier needs math-verify: pip install 'groupwise[math]'")
    comparer.start()
