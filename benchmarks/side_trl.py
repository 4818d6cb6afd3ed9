"""TRL's side of `against_trl`: `GRPOTrainer` as it is, with a stopwatch around its parts.

python benchmarks/side_trl.py JOB.json RESULT.json
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from machine import held, settle
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import Job, Result, Step, digest, digits_reward, examples, read_job, task, write_result


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """Knows how long the last batch took to generate and to score, and what it was."""

    generating = 0.0
    preparing = 0.0
    prompt_ids: list[list[int]]
    trained_tokens = 0

    def _generate(self, prompts: list[Any]) -> Any:
        started = time.perf_counter()
        output = super()._generate(prompts)
        self.generating = time.perf_counter() - started
        self.prompt_ids = [list(ids) for ids in output[0]]
        self.trained_tokens = sum(len(ids) for ids in output[1])
        return output

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        started = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()  # what follows is the update
        self.preparing = time.perf_counter() - started
        return output


class Stopwatch(TrainerCallback):
    """Times each optimizer step: from the first micro-batch, which generates, to the new weights."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.trainer: TimedTrainer | None = None
        self.started = self.cpu = 0.0
        self.steps: list[Step] = []
        self.longest_prompt = 0
        self.peak_gb = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        settle(self.job.device)
        seconds = time.perf_counter() - self.started
        self.peak_gb = max(self.peak_gb, held(self.job.device))
        trainer = self.trainer
        assert trainer is not None, "set before training starts"
        self.longest_prompt = max(self.longest_prompt, *map(len, trainer.prompt_ids))
        self.steps.append(
            Step(
                seconds=seconds,
                cpu_seconds=time.process_time() - self.cpu,
                generating=trainer.generating,
                scoring=trainer.preparing - trainer.generating,
                updating=seconds - trainer.preparing,
                trained_tokens=trainer.trained_tokens,
                prompts=digest(trainer.prompt_ids[:: self.job.group_size]),
            )
        )


def settings(job: Job, folder: str) -> GRPOConfig:
    """One optimizer step for each batch of answers, nothing logged, nothing saved."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=job.device == "cpu",
        bf16=job.device == "cuda",
        gradient_checkpointing=job.recompute,
        max_steps=job.warm_up + job.steps,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=job.sequences // job.micro_batch,
        num_generations=job.group_size,
        max_completion_length=job.max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        generation_kwargs={"min_new_tokens": job.max_tokens} if job.fixed_length else None,
        loss_type="dapo",
        beta=0.0,
        num_iterations=1,
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        seed=job.seed,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def dataset(job: Job, tokenizer: Any) -> Dataset:
    """The same prompts as text: TRL's chat path cannot continue an answer that has begun."""
    texts = [
        asked
        if isinstance(asked := task(job).ask(example), str)
        else tokenizer.apply_chat_template(list(asked), tokenize=False, continue_final_message=True)
        for example in examples(job)
    ]
    return Dataset.from_list([{"prompt": text} for text in texts])


def run(job: Job) -> Result:
    torch.set_num_threads(job.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.float32 if job.device == "cpu" else torch.bfloat16
    )
    adapter = LoraConfig(
        r=job.lora_r, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    stopwatch = Stopwatch(job)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=model,
            reward_funcs=digits_reward,
            args=settings(job, folder),
            train_dataset=dataset(job, tokenizer),
            processing_class=tokenizer,
            peft_config=adapter if job.lora_r else None,
            callbacks=[stopwatch],
        )
        stopwatch.trainer = trainer
        start_gb = held(job.device)
        trainer.train()
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return Result(
        steps=tuple(stopwatch.steps),
        trained_parameters=sum(parameter.numel() for parameter in trained),
        dtypes=f"{trainer.model.get_output_embeddings().weight.dtype}, {trained[0].dtype}",
        prompt_tokens=stopwatch.longest_prompt,
        start_gb=start_gb,
        peak_gb=stopwatch.peak_gb,
        versions={
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
    )


if __name__ == "__main__":
    write_result(Path(sys.argv[2]), run(read_job(Path(sys.argv[1]))))
