"""A warm start for the MedQuAD agent: the form of a conversation, before it learns to search well.

    groupwise index build --data medquad.jsonl.gz --store files --output index
    python recipes/medquad_warm.py --index index --model smollm2 --output warm
    groupwise train medquad --model warm task.options='{index: index}'

The traces are made from training questions alone: think, search with some words of the question, read what
the index returns, answer with the beginning of the gold answer. The queries are careless (words are left
out at random), so that there is something left to learn.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from groupwise.config.model import LoraConfig, ModelConfig
from groupwise.config.sections import TaskConfig
from groupwise.learner.supervised import supervised_step
from groupwise.model.load import load_policy
from groupwise.model.policy import Policy
from groupwise.records import Example, Sample
from groupwise.rollout.calls import read_calls
from groupwise.rollout.converse import prefill_of
from groupwise.rollout.toolbox import Toolbox
from groupwise.tasks import Task, load_task

ANSWER_CHARACTERS = 350


def trace(rng: random.Random, example: Example, *, kept: float) -> tuple[str, str]:
    """Return the two turns of a demonstration, each going on from inside its thinking."""
    words = example["question"].rstrip("? ").split()
    query = " ".join(word for word in words if rng.random() < kept) or rng.choice(words)
    query = query.replace('"', "").replace("\\", "")
    call = f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{query}"}}}}\n</tool_call>'
    answer = rng.choice(example["answers"])[:ANSWER_CHARACTERS]
    stop = max(answer.rfind(". "), answer.rfind(".\n"))
    answer = answer[: stop + 1] if stop > 60 else answer
    return f"I look for {query}.\n</think>\n{call}", f"The documents answer this.\n</think>\n{answer}"


def samples(policy: Policy, task: Task, *, seed: int, kept: float) -> Iterator[Sample]:
    """Demonstrations without end, laid out as rollouts are; the loss is on the turns alone."""
    rng, toolbox = random.Random(seed), Toolbox.of(task.tools, seconds=60.0, characters=2000)
    examples = task.split(TaskConfig(held_out=0), seed=0).train
    number = 0
    while True:
        example = examples[rng.randrange(len(examples))]  # type: ignore[index, arg-type]
        prompt = task.ask(example)
        tokens = list(policy.encode(prompt, tools=toolbox.schemas))
        prefix, trained = len(tokens), [False] * len(tokens)
        first, last = trace(rng, example, kept=kept)
        calls = toolbox.answer(read_calls(first), allowed=1)
        read = policy.encode_results([call.result for call in calls], prefill=prefill_of(prompt), ended=True)
        for text, following in ((first, read), (last, ())):
            written = [
                *policy.tokenizer(text, add_special_tokens=False)["input_ids"],
                policy.tokenizer.eos_token_id,
            ]
            tokens += [*written, *following]
            trained += [True] * len(written) + [False] * len(following)
        zeros = (0.0,) * len(tokens)
        yield Sample(
            tokens=tuple(tokens), trained=tuple(trained), logprobs=zeros, entropies=zeros, advantages=zeros,
            prefix=prefix, group=number,
        )  # fmt: skip
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--index", default="index")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--kept", type=float, default=0.6, help="share of the question's words in a query")
    arguments = parser.parse_args()
    task = load_task(TaskConfig(name="medquad", options={"index": arguments.index}))
    policy = load_policy(ModelConfig(name=arguments.model), LoraConfig(r=0))
    optimizer = torch.optim.AdamW(policy.trainable().values(), betas=(0.9, 0.98), weight_decay=0.01)
    source, started = samples(policy, task, seed=0, kept=arguments.kept), time.time()
    for step in range(arguments.steps):
        warm, done = min(1.0, (step + 1) / 20), step / arguments.steps
        loss = supervised_step(
            policy,
            optimizer,
            [next(source) for _ in range(arguments.batch)],
            rate=arguments.rate * warm * (0.5 * (1 + math.cos(math.pi * done)) + 0.02),
            max_grad_norm=1.0,
            micro_batch_tokens=8192,
        )
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss:.3f}, {time.time() - started:.0f} s", flush=True)
    policy.save(arguments.output)


if __name__ == "__main__":
    main()
