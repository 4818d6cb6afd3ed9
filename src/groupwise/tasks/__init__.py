"""What can be learned: the built-in tasks, and how to write one."""

from groupwise.tasks.columns import Column
from groupwise.tasks.examples import load_examples
from groupwise.tasks.isolate import isolated
from groupwise.tasks.load import (
    TASKS,
    leave_task_file,
    load_rows,
    load_task,
    read_task_file,
    task_of,
    with_data,
    without_data,
)
from groupwise.tasks.split import Split, Stream
from groupwise.tasks.task import Task

__all__ = [
    "TASKS",
    "Column",
    "Split",
    "Stream",
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
