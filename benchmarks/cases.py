"""The cases of `against_trl`: a model, a workload, and the settings in which TRL may try it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from random_qwen import random_folder
from workload import Job

from groupwise.model.resolve import smollm2_folder

TINY_FOLDER = Path(__file__).parent.parent / "src" / "groupwise" / "model" / "tiny"


@dataclass(frozen=True, slots=True)
class Setting:
    """How TRL is run."""

    micro_batch: int
    """Sequences in one forward and backward pass."""
    keep_freed_memory: bool
    recompute: bool = False

    def __str__(self) -> str:
        if self == AS_IT_COMES:
            return "TRL as it comes"
        notes = [", malloc"] * self.keep_freed_memory + [", checkpointing"] * self.recompute
        return f"TRL, micro-batch {self.micro_batch}{''.join(notes)}"


AS_IT_COMES = Setting(8, keep_freed_memory=False, recompute=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload, and the settings in which TRL may try it."""

    model: str
    lora_r: int
    prompts: int
    group_size: int
    max_tokens: int
    trl_settings: tuple[Setting, ...]
    device: str = "cpu"
    prompt_words: int = 0

    def job(self, *, fixed_length: bool, steps: int, threads: int) -> Job:
        return Job(
            model=str(self._folder()),
            device=self.device,
            prompt_words=self.prompt_words,
            lora_r=self.lora_r,
            prompts=self.prompts,
            group_size=self.group_size,
            max_tokens=self.max_tokens,
            fixed_length=fixed_length,
            warm_up=1,
            steps=steps,
            threads=threads,
        )

    def _folder(self) -> Path:
        if self.model == "tiny":
            return TINY_FOLDER
        if self.model == "smollm2":
            return smollm2_folder()
        return random_folder(self.model, device=torch.device(self.device))


TINY = Case(
    model="tiny",
    lora_r=0,
    prompts=32,
    group_size=16,
    max_tokens=128,
    trl_settings=(Setting(128, True), Setting(256, True), AS_IT_COMES),
)
SMOLLM2 = Case(
    model="smollm2",
    lora_r=0,
    prompts=8,
    group_size=8,
    max_tokens=64,
    trl_settings=(Setting(8, True), Setting(16, True)),
)
QWEN = Case(
    model="1.5b",
    lora_r=16,
    prompts=16,
    group_size=8,
    max_tokens=512,
    trl_settings=(Setting(16, False), AS_IT_COMES),
    device="cuda",
    prompt_words=128,
)
CASES = {
    "tiny-full": TINY,
    "tiny-lora": replace(TINY, lora_r=16),
    "smollm2-full": SMOLLM2,
    "smollm2-lora": replace(SMOLLM2, lora_r=16),
    "qwen-lora": QWEN,
}
