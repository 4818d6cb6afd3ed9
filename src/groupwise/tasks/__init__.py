"""What can be learned: a task is examples, a prompt and rewards.

Modules in reading order:

    task              Task
    examples          rows → examples; training and held-out splits
    registry          find a task by name or in a user's file
    isolate           user code in a worker; a trial of the rewards before a model loads
    code_fingerprint  has a task's own code changed since a run began?
    sft_data          demonstrations for supervised steps
    self_test         check rewards against completions with known scores
    builtin/          the tasks that come with the package

To add a built-in task, write a module in `builtin/` with a function that returns a `Task`, and enter it in
`registry.TASKS`.
"""

from groupwise.tasks.examples import Column, ExampleStream, Split, load_examples
from groupwise.tasks.isolate import isolated
from groupwise.tasks.registry import (
    TASKS,
    leave_task_file,
    load_rows,
    load_task,
    read_task_file,
    task_of,
    with_data,
    without_data,
)
from groupwise.tasks.task import Task

__all__ = [
    "TASKS",
    "Column",
    "ExampleStream",
    "Split",
    "Task",
    "isolated",
    "leave_task_file",
    "load_examples",
    "load_rows",
    "load_task",
    "read_task_file",
    "task_of",
    "with_data",
    "without_data",
]
