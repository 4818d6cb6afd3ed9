"""A policy to talk to: whatever the user named, loaded for generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from groupwise.config import Config, read_config
from groupwise.evaluate.target import Target, find_target
from groupwise.model.source import local_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a name means, settled before anything heavy loads."""

    target: Target
    config: Config

    @property
    def vllm_command(self) -> str:
        """The command that serves the same with vLLM."""
        target, model = self.target, self.config.model.name
        if target.rank:
            return f"vllm serve {model} --enable-lora --lora-modules {target.name}={target.trained}"
        return f"vllm serve {target.trained or model}"


def find_named(name: str, overrides: Sequence[str]) -> Named:
    """Tell what a run, checkpoint, adapter or model is, and read its settings."""
    target = find_target(name)
    config = read_config(target.run.config if target.run else None, overrides=overrides)
    config = replace(config, model=replace(config.model, name=target.base or config.model.name))
    local_folder(config.model.name)
    return Named(target=target, config=config.resolve())
