"""Tasks: examples, a prompt and rewards.

Modules in reading order:

    task              Task; the split into training and held-out examples; keys of equal prompts
    examples          load rows as examples
    registry          load a task by name or from a user's file
    isolate           run user code in a worker; try the rewards before a model loads
    user_code         functions that settings name by import path; fingerprints of the user's code
    sft_data          demonstrations for supervised fine-tuning
    self_test         test rewards against completions with known scores
    builtin/          the built-in tasks
    external/         tasks, environments and tools from other packages

To add a built-in task, write a function that returns a `Task` in a module of `builtin/`, and add it to
`registry.TASKS`.
"""

from groupwise.records import ExampleStream, Split
from groupwise.tasks.examples import Column, load_examples
from groupwise.tasks.isolate import isolated
from groupwise.tasks.registry import (
    TASKS,
    is_loadable,
    leave_task_file,
    load_rows,
    load_task,
    read_task_file,
    task_of,
    with_data,
    without_data,
)
from groupwise.tasks.task import Task
from groupwise.tasks.user_code import UserFunctions, split_functions, use_functions

__all__ = [
    "TASKS",
    "Column",
    "ExampleStream",
    "Split",
    "Task",
    "UserFunctions",
    "is_loadable",
    "isolated",
    "leave_task_file",
    "load_examples",
    "load_rows",
    "load_task",
    "read_task_file",
    "split_functions",
    "task_of",
    "use_functions",
    "with_data",
    "without_data",
]
