"""What can be learned: the built-in tasks, and how to write one."""

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
