"""What can be learned: the built-in tasks, and how to write one."""

from groupwise.tasks.examples import load_examples
from groupwise.tasks.load import TASKS, leave_task_file, load_task
from groupwise.tasks.split import Split, Stream
from groupwise.tasks.task import Task

__all__ = ["TASKS", "Split", "Stream", "Task", "leave_task_file", "load_examples", "load_task"]
