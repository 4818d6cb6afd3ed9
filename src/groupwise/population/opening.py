"""Where a search begins: in a new folder, or at the last checkpoint of an old one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from groupwise.config import Config, read_config
from groupwise.learner.checkpoint import latest_checkpoint, verify
from groupwise.population.story import Story
from groupwise.tracking.run_folder import RunFolder
from groupwise.training.start import refuse_other_settings, steps_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A folder, claimed for this process, and where in it to go on. Nothing is written yet."""

    folder: RunFolder
    lock: IO[str]
    story: Story
    checkpoint: Path | None

    @classmethod
    def new(cls, config: Config, *, task: str) -> Opening:
        folder = RunFolder.create(
            config.run.output_dir, name=config.run.name, task=f"evolve-{task}", model=config.model.name
        )
        return cls(folder=folder, lock=folder.lock(), story=Story(), checkpoint=None)

    @classmethod
    def again(cls, path: Path, config: Config) -> Opening:
        """Go on after the last checkpoint, every byte of it checked, or anew when there is none."""
        folder = RunFolder.open(path)
        lock = folder.lock()
        try:
            refuse_other_settings(read_config(folder.config), config)
            checkpoint = latest_checkpoint(folder.checkpoints)
            story = Story() if checkpoint is None else Story.from_json(verify(checkpoint))
        except BaseException:
            lock.close()
            raise
        return cls(folder=folder, lock=lock, story=story, checkpoint=checkpoint)

    def already_done(self, config: Config) -> str | None:
        """Say so when no step is left and the last session told its story to the end."""
        over = self.story.reached or self.story.step >= config.run.max_steps
        if not over or steps_in(self.folder.stats) != self.story.step:
            return None
        return f"{self.folder.path} is finished after {self.story.step} step{'s' * (self.story.step != 1)}"

    def withdraw(self) -> None:
        """Take a new folder back if nothing came of it."""
        if not self.folder.config.exists():
            with suppress(OSError):
                (self.folder.path / ".lock").unlink(missing_ok=True)
                self.folder.path.rmdir()
