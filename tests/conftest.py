"""Every test runs offline and on one thread, so that it gives the same result everywhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

# Set before anything imports torch or transformers, which read these once.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # `make test-gpu` sets it to 0

pytest.register_assert_rewrite("tests.support")

# In the background of a shell Ctrl-C is ignored, and would be in every command that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def small_policy() -> Any:
    """A policy of two random layers with grouped query heads and the built-in tokenizer, in float32."""
    from tests.support.small_models import policy_of, small_model

    return policy_of(small_model())


SLOW_FILES = (
    "training/test_kills.py",
    "evolution/test_evolve_run.py",
    "model/test_deepspeed_zero.py",
    "rewards/test_hostile_rewards.py",
    "parallel/test_processes.py",
    "training/test_resume.py",
    "engine/cuda/test_cuda_engine.py",
    "engine/cuda/test_fp8.py",
    "engine/cuda/test_speculation.py",
    "training/test_damage.py",
    "training/test_agent_runs.py",
    "report/test_page.py",
    "evaluate/test_eval_suite.py",
    "serve/test_openai_server.py",
    "test_compatibility.py",
    "serve/test_responses_api.py",
    "model/test_remote_code.py",
    "tasks/test_custom_tasks.py",
    "test_api.py",
    "training/test_grpo_run.py",
    "engine/vllm/test_vllm_engine.py",
    "engine/test_multi_lora.py",
    "engine/serving/test_serving_engine.py",
    "evolution/test_ray_tune.py",
    "evolution/test_population_features.py",
    "report/test_static_report.py",
    "training/test_sft_run.py",
    "model/adapters/test_merge_adapters.py",
    "test_cli.py",
    "learner/test_optimizer.py",
    "gym/test_agent.py",
    "training/test_callbacks.py",
    "rollout/test_environment.py",
    "model/adapters/test_lora.py",
    "training/resources/test_prompt_lengths.py",
    "isolation/test_sandbox.py",
    "tasks/builtin/test_search_qa.py",
    "tasks/builtin/test_code_problems.py",
    "tasks/external/test_reasoning_gym_tasks.py",
    "report/test_watch_server.py",
    "test_combinations.py",
    "test_installation.py",
    "learner/test_distillation.py",
    "tasks/test_user_functions.py",
    "retrieval/test_fetch.py",
    "rewards/test_llm_judge.py",
    "engine/test_engine.py",
    "engine/test_token_masks.py",
    "serve/test_structured_output.py",
    "learner/test_constrained_rollouts.py",
    "tasks/builtin/test_boxed_math.py",
    "evaluate/test_held_out.py",
    "model/test_general_path.py",
    "test_extending.py",
    "model/test_model_families.py",
)
"""Files that start processes, train runs, interpret GPU kernels or open a browser, the longest first.

`make test` starts with them, so that no worker begins a long file at the end. `make test-fast` leaves them
out: they have the marker `slow`.
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {Path(__file__).parent / name: number for number, name in enumerate(SLOW_FILES)}
    for item in items:
        if item.path in order:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return a worker for each core; with `-n auto` two more, as slow tests wait for limits and servers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 2 if config.option.numprocesses == "auto" else cores
