"""vLLM's side of `generation`: the same prompts, groups and lengths, with log-probabilities and without.

    python benchmarks/side_vllm.py JOB.json RESULT.json

Runs in the environment that vLLM is installed in; weights are made up by vLLM itself, as their values do not
matter for speed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import vllm


def main(job: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    model = vllm.LLM(
        model=job["model"],
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=job["prompt"] + job["answer"],
        max_num_seqs=job["sequences"],
        gpu_memory_utilization=0.85,
    )
    start_seconds = time.perf_counter() - started
    rng = np.random.default_rng(1)
    prompts = [
        {"prompt_token_ids": rng.integers(0, job["vocabulary"], job["prompt"]).tolist()}
        for _ in range(job["sequences"] // job["group"])
    ]
    speeds: dict[str, float] = {}
    for name, logprobs in (("with log-probabilities", 0), ("without log-probabilities", None)):
        settings = vllm.SamplingParams(
            n=job["group"],
            temperature=1.0,
            max_tokens=job["answer"],
            ignore_eos=True,
            logprobs=logprobs,
            detokenize=False,
        )
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            outputs = model.generate(prompts, settings, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        assert tokens == job["sequences"] * job["answer"], "answers of another length"
        speeds[name] = tokens / min(seconds)
    return {"version": vllm.__version__, "start": start_seconds, "speeds": speeds}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))), encoding="utf-8"
    )
