"""Our side of `against_trl`: the parts of `groupwise train`, put together as `training.run` does.

python benchmarks/side_groupwise.py JOB.json RESULT.json
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import transformers
from machine import held, settle
from workload import Job, Result, Step, digest, examples, read_job, split, task, write_result

from groupwise.algo.samples import training_batch
from groupwise.config.schema import (
    AlgoConfig,
    Config,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
)
from groupwise.engine.engine import Engine
from groupwise.learner.learner import Learner
from groupwise.model.load import load_policy
from groupwise.training.collector import Batch, Collector
from groupwise.training.loop import collect_batch


def trained_tokens(batch: Batch, algo: AlgoConfig) -> int:
    """Tokens that the update computed a gradient for."""
    keep_zero = algo.beta > 0 or algo.entropy_bonus != 0
    samples, _, _ = training_batch(batch.groups, mask_truncated=algo.mask_truncated, keep_zero=keep_zero)
    return sum(sample.length for sample in samples)


def dtype(job: Job) -> str:
    return "float32" if job.device == "cpu" else "bfloat16"


def config_for(job: Job) -> Config:
    return Config(
        model=ModelConfig(
            name=job.model, dtype=dtype(job), device=job.device, gradient_checkpointing=job.recompute
        ),
        lora=LoraConfig(r=job.lora_r),
        # Nothing is refilled: both sides draw the same number of answers.
        rollout=RolloutConfig(
            prompts=job.prompts,
            group_size=job.group_size,
            max_tokens=job.max_tokens,
            temperature=1.0,
            refill=0,
        ),
        # A deep random model in bfloat16 blows rounding up: the sides of the gap differ by some 0.04.
        algo=AlgoConfig(loss="dapo", beta=0.0, max_gap=0.05 if job.device == "cpu" else 0.2),
        optim=OptimConfig(learning_rate=job.learning_rate, micro_batch_tokens=job.pass_tokens),
        run=RunConfig(seed=job.seed, max_steps=job.warm_up + job.steps),
    ).resolve()


def run(job: Job) -> Result:
    torch.set_num_threads(job.threads)
    config = config_for(job)
    policy = load_policy(config.model, config.lora)
    if job.fixed_length:
        policy.end_tokens = frozenset()
    engine = Engine(policy, config.engine)
    learner = Learner(
        policy,
        algo=config.algo,
        optim=config.optim,
        sampling=config.rollout.sampling,
        max_steps=config.run.max_steps,
    )
    collector = Collector(config, task=task(job), split=split(job), codec=policy, engine=engine)
    start_gb, peak_gb = held(job.device), 0.0
    prompts = [policy.encode(task(job).ask(example)) for example in examples(job)]
    steps: list[Step] = []
    cursor = 0
    for number in range(1, config.run.max_steps + 1):
        started, cpu = time.perf_counter(), time.process_time()
        batch = collect_batch(collector, number, cursor=cursor)
        collected = time.perf_counter()
        if job.device == "cuda":
            engine.release()
            torch.cuda.reset_peak_memory_stats()
        report = learner.train_on(batch.groups)
        print(f"gap {report['policy/gap']:.4f}, {learner.micro_batch_tokens} tokens a pass", flush=True)
        settle(job.device)
        ended = time.perf_counter()
        peak_gb = max(peak_gb, held(job.device))
        steps.append(
            Step(
                seconds=ended - started,
                cpu_seconds=time.process_time() - cpu,
                generating=batch.rollout_seconds,
                scoring=collected - started - batch.rollout_seconds,
                updating=ended - collected,
                trained_tokens=trained_tokens(batch, config.algo),
                prompts=digest(prompts[cursor : batch.cursor]),
            )
        )
        cursor = batch.cursor
    trained = list(policy.trainable().values())
    return Result(
        steps=tuple(steps),
        trained_parameters=sum(parameter.numel() for parameter in trained),
        dtypes=f"{policy.head_weight.dtype}, {trained[0].dtype}",
        prompt_tokens=max(map(len, prompts)),
        start_gb=start_gb,
        peak_gb=peak_gb,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )


if __name__ == "__main__":
    write_result(Path(sys.argv[2]), run(read_job(Path(sys.argv[1]))))
