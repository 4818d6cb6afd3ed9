"""How the built-in model is made: a small Llama, a character-level tokenizer, a warm start on worked puzzles.

    python recipes/tiny.py --output src/groupwise/model/tiny

The worked answers (`tasks/builtin/countdown.py`) teach format and arithmetic, not judgement.
Only training puzzles are used: held-out ones stay unseen. Minutes on a GPU, about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from groupwise.config.schema import EngineConfig
from groupwise.engine.engine import Engine
from groupwise.evaluate.held_out import evaluate
from groupwise.learner.sft_learner import supervised_step, worked_sample
from groupwise.model.load import check_attention
from groupwise.model.policy import Policy
from groupwise.records import Sample, Sampling
from groupwise.tasks.builtin.countdown import (
    PREFILL,
    SYSTEM,
    USER,
    countdown,
    countdown_prompt,
    worked_answer,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; so are the fixed sentences of the puzzle's prompt, which keeps prompts short."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    before, after = USER.split("{numbers}")
    between, after = after.split("{target}")
    phrases = [SYSTEM, before, between, after, PREFILL, "<think>", "</think>", "<answer>", "</answer>"]
    roles = ["system\n", "user\n", "assistant\n"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in phrases + roles])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, *, width: int, layers: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=-(-len(tokenizer) // 16) * 16,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def samples(
    policy: Policy, seed: int, *, options: dict[str, object], patience: list[float], insight: float
) -> Iterator[Sample]:
    """Worked training puzzles without end."""
    puzzles = countdown(**options).examples  # type: ignore[arg-type]
    rng = random.Random(seed)
    for index in count():
        example = puzzles.train(index, seed=seed)  # type: ignore[union-attr]
        text = worked_answer(rng, example["numbers"], example["target"], patience=patience, insight=insight)
        if text is not None:
            answer = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
            prompt = policy.encode(countdown_prompt(example))
            yield worked_sample(prompt, [*answer, policy.tokenizer.eos_token_id], group=index)


class Stage(NamedTuple):
    """A segment of the warm start with its own schedule and demonstrations."""

    steps: int
    rate: float
    patience: list[float]
    insight: float


STAGES = [Stage(1800, 2e-3, [1, 1, 1, 1], 0.3), Stage(300, 5e-4, [32, 16, 8, 4, 2, 1], 0.12)]
"""First what works and how to reckon; then nearly blind search, given up by half after each way."""


def warm_start(policy: Policy, source: Iterator[Sample], stage: Stage, *, batch: int) -> None:
    """Imitate for one stage, with a warm-up and a cosine down to nearly nothing."""
    optimizer = torch.optim.AdamW(policy.trainable().values(), betas=(0.9, 0.98), weight_decay=0.01)
    started = time.time()
    for step in range(stage.steps):
        warm, done = min(1.0, (step + 1) / 100), step / stage.steps
        loss = supervised_step(
            policy,
            optimizer,
            [next(source) for _ in range(batch)],
            rate=stage.rate * warm * (0.5 * (1 + math.cos(math.pi * done)) + 0.02),
            max_grad_norm=1.0,
            micro_batch_tokens=65536,
        )
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss:.3f}, {time.time() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--largest", type=int, default=50)
    parser.add_argument("--numbers", type=int, nargs=2, default=(3, 3))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, width=arguments.width, layers=arguments.layers).to(arguments.device)
    check_attention(model, name="tiny")
    policy = Policy(model, tokenizer)
    print(f"{sum(p.numel() for p in policy.trainable().values()):,} parameters")
    options: dict[str, object] = {"numbers": list(arguments.numbers), "largest": arguments.largest}
    for number, stage in enumerate(STAGES, start=1):
        source = samples(policy, number, options=options, patience=stage.patience, insight=stage.insight)
        warm_start(policy, source, stage, batch=arguments.batch)
    task = countdown(**options)  # type: ignore[arg-type]
    result = evaluate(
        task, task.examples.held_out(512), codec=policy, engine=Engine(policy, EngineConfig()),  # type: ignore[union-attr]
        sampling=Sampling(max_tokens=128), samples=8, seed=0, seconds=5.0,
    )  # fmt: skip
    print(result.summary())
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
