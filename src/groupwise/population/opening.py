"""Where a search begins: in a new folder, or at the last checkpoint of an old one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from groupwise.config import Config, read_config
from groupwise.errors import ConfigError
from groupwise.learner.checkpoint import verify
from groupwise.population.story import Story
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.summary import command
from groupwise.training.start import (
    last_checkpoint,
    refuse_edited_settings,
    refuse_other_settings,
    steps_in,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A folder, claimed for this process, and where in it to go on. Nothing is written yet."""

    folder: RunFolder
    lock: IO[str]
    story: Story
    checkpoint: Path | None
    begins_again: bool = False
    """Whether an old search begins anew, because it was stopped before its first checkpoint."""

    @classmethod
    def new(cls, config: Config, *, task: str) -> Opening:
        folder = RunFolder.create(
            config.run.output_dir, name=config.run.name, task=f"evolve-{task}", model=config.model.name
        ).absolute()
        return cls(folder=folder, lock=folder.lock(), story=Story(), checkpoint=None)

    @classmethod
    def again(cls, path: Path, config: Config) -> Opening:
        """Go on after the last checkpoint, every byte of it checked, or anew where none was written yet."""
        folder = RunFolder.open(path).absolute()
        lock = folder.lock()
        try:
            stored = read_config(folder.config)
            refuse_other_settings(stored, config)
            checkpoint = last_checkpoint(folder, stored)
            story = Story() if checkpoint is None else Story.from_json(verify(checkpoint))
            refuse_edited_settings(story.settings, stored, folder)
            if story.reached and config.run.max_steps > stored.run.max_steps:
                raise ConfigError(
                    f"{path} ended for good after {story.step} steps: a larger run.max_steps does not "
                    "make it go on; start a new search"
                )
        except BaseException:
            lock.close()
            raise
        again = checkpoint is None
        return cls(folder=folder, lock=lock, story=story, checkpoint=checkpoint, begins_again=again)

    def already_done(self, config: Config) -> str | None:
        """Say so when no step is left and the last session told its story to the end."""
        over = self.story.reached or self.story.step >= config.run.max_steps
        if not over or steps_in(self.folder.stats) != self.story.step:
            return None
        steps = self.story.step
        finished = f"{self.folder.path} is finished after {steps} step{'s' * (steps != 1)}"
        if self.story.reached:
            return finished
        longer = command("evolve", "--resume", self.folder.path, f"run.max_steps={2 * steps}")
        return f"{finished}; to go on, {longer}"

    def withdraw(self) -> None:
        """Take a new folder back if nothing came of it."""
        if not self.folder.config.exists():
            with suppress(OSError):
                (self.folder.path / ".lock").unlink(missing_ok=True)
                self.folder.path.rmdir()
