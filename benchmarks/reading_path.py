"""Count the files and lines that a reader passes through to follow one GRPO step.

The script traces the second of three steps of a plain run: the built-in model on a CPU, one process, a list
of examples with one reward, a KL penalty, no tools, no tracker, no evaluation and no checkpoint due.

- A module counts if the step executes more than two of its lines. Two lines or fewer are a question that is
  answered with no, such as "was Ctrl-C pressed?".
- **Algorithm**: the layers that hold the stages: tasks, rollout, rewards, algo, learner, training. The reward
  function itself, the built-in tasks and the layers below (records, config, tracking, …) do not count.
- **With the CPU engine**: also the modules of `engine`, and those of `model` that the engine calls directly.
- "lines" are all lines of these modules. "read" are the lines of the functions and methods that the step
  executes, with their docstrings: a reader who follows the calls passes through these.

Run: python benchmarks/reading_path.py
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import groupwise
from groupwise import Task
from groupwise.config import read_config
from groupwise.rewards import length
from groupwise.training.loop import train

ROOT = Path(str(groupwise.__file__)).parent
LOOP = "training/loop.py"
STEP = 2
ALGORITHM = ("tasks", "rollout", "rewards", "algo", "learner", "training")
TASKS_OWN = ("tasks/builtin/", "rewards/text_rewards.py", "rewards/extraction.py", "rewards/verify/")
QUESTION = 2
"""Executed lines up to which a module only answers a question."""
SETTINGS = (
    *("run.max_steps=3", "run.save_every=100", "track.trackers=[]", "track.report=false"),
    *("track.rollouts_every=100", "evaluate.skip=true", "model.device=cpu", "algo.beta=0.01"),
    *("rollout.prompts=3", "rollout.group_size=8", "rollout.max_tokens=4", "rollout.temperature=1.5"),
)


@dataclass
class Trace:
    """What a step executes: lines of each module, and the modules that call it."""

    lines: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    callers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    active: bool = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace a call: `sys.settrace` calls this for every new frame."""
        module = module_of(frame)
        if module is None:
            return None
        starts = (module, frame.f_code.co_name) == (LOOP, "train_step") and frame.f_locals["step"] == STEP
        if starts:
            self.active = True
        if not self.active:
            return None
        caller = frame.f_back
        while caller is not None and module_of(caller) is None:
            caller = caller.f_back
        if caller is not None:
            self.callers[module].add(module_of(caller) or "")

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                self.lines[module].add(frame.f_lineno)
            elif event == "return" and starts:
                self.active = False
            return local

        return local


def module_of(frame: FrameType) -> str | None:
    """Return the path of a frame's module inside the package; None for code from elsewhere."""
    name = frame.f_code.co_filename
    return name[len(str(ROOT)) + 1 :] if name.startswith(f"{ROOT}/") else None


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]


def trace_step() -> Trace:
    """Train three steps and trace the second."""
    trace = Trace()
    task = Task(
        name="plain",
        examples=[{"question": f"{number} + 1 ="} for number in range(16)],
        prompt=lambda example: str(example["question"]),
        rewards={"length": length(at_most=4)},
    )
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(overrides=[*SETTINGS, f"run.output_dir={folder}", "task.held_out=0"])
        with tracing(trace):
            train(config, task=task)
    return trace


def algorithm(trace: Trace) -> list[str]:
    """Return the modules of the algorithm, in the order of their names."""
    return sorted(
        module
        for module, lines in trace.lines.items()
        if module.partition("/")[0] in ALGORITHM
        and not module.startswith(TASKS_OWN)
        and len(lines) > QUESTION
    )


def cpu_engine(trace: Trace) -> list[str]:
    """Return the modules of the engine on a CPU, and those of the model that it calls directly."""
    return sorted(
        module
        for module, lines in trace.lines.items()
        if len(lines) > QUESTION
        and (
            module.startswith("engine/")
            or (
                module.startswith("model/")
                and any(caller.startswith("engine/") for caller in trace.callers[module])
            )
        )
    )


def lines_of(module: str) -> int:
    return len((ROOT / module).read_text(encoding="utf-8").splitlines())


def read_in(module: str, executed: set[int]) -> int:
    """Return the lines of the functions and methods of a module that have an executed line."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = [range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in functions]
    return len({line for span in spans if executed & set(span) for line in span})


@dataclass(frozen=True)
class Count:
    """How much there is to read."""

    files: int
    lines: int
    read: int


def count(modules: list[str], trace: Trace) -> Count:
    return Count(
        files=len(modules),
        lines=sum(map(lines_of, modules)),
        read=sum(read_in(module, trace.lines[module]) for module in modules),
    )


def counts(trace: Trace) -> dict[str, Count]:
    """Count the algorithm, and the algorithm with the CPU engine."""
    stages = algorithm(trace)
    return {
        "the algorithm": count(stages, trace),
        "with the CPU engine": count(stages + cpu_engine(trace), trace),
    }


def table(modules: list[str], trace: Trace) -> str:
    return "\n".join(
        f"  {module:38}{lines_of(module):6}{read_in(module, trace.lines[module]):6}" for module in modules
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    trace = trace_step()
    print(f"  {'module':38}{'lines':>6}{'read':>6}")
    print(table(algorithm(trace), trace))
    print("\n  the CPU engine")
    print(table(cpu_engine(trace), trace))
    print()
    for name, total in counts(trace).items():
        print(f"{name}: {total.files} files, {total.lines:,} lines, {total.read:,} read")


if __name__ == "__main__":
    main()
