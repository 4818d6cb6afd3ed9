"""How the built-in model is made: a small Llama, a character-level tokenizer, a warm start on worked puzzles.

    python recipes/tiny.py --output src/groupwise/model/tiny

The worked answers teach format and arithmetic, not judgement: each tries one to four ways in its thinking
and then answers with the last, right or wrong. Only training puzzles are used: held-out ones stay unseen.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from groupwise.config.sections import EngineConfig
from groupwise.engine.engine import Engine
from groupwise.evaluate.held_out import evaluate
from groupwise.learner.supervised import supervised_step, worked_sample
from groupwise.model.load import check_attention
from groupwise.model.policy import Policy
from groupwise.records import Example, Sample, Sampling
from groupwise.tasks.countdown import PREFILL, SYSTEM, USER, countdown, countdown_prompt

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


Attempt = tuple[list[str], str, int]
"""The lines that work it out, the expression, its value."""


def attempt(rng: random.Random, numbers: list[int]) -> Attempt:
    """Combine the numbers at random, keeping every result a positive whole number."""
    pool = [(number, str(number)) for number in numbers]
    lines = []
    while len(pool) > 1:
        a, left = pool.pop(rng.randrange(len(pool)))
        b, right = pool.pop(rng.randrange(len(pool)))
        if a < b:
            a, left, b, right = b, right, a, left
        operators = ["+", "*"] + (["-"] if a > b else []) + (["/"] if a % b == 0 else [])
        operator = rng.choice(operators)
        value = {"+": a + b, "*": a * b, "-": a - b, "/": a // b}[operator]
        lines.append(f"{a}{operator}{b}={value}")
        pool.append((value, f"({left}{operator}{right})"))
    value, expression = pool[0]
    return lines, expression[1:-1], value


def worked_answer(rng: random.Random, example: Example, *, patience: list[float], insight: float) -> str:
    """Thinking that tries a few ways, then the last one as the answer: often right, often given up too early.

    `patience` weighs how many ways are tried at most, all different; each works with a chance of `insight`,
    and the first that works is the last.
    """
    numbers, target = list(example["numbers"]), example["target"]
    most = rng.choices(range(1, len(patience) + 1), patience)[0]
    thoughts: list[str] = []
    while True:
        works = rng.random() < insight
        while True:
            lines, expression, value = attempt(rng, numbers)
            thought = ",".join(lines)
            if (value == target) == works and value < 1000 and thought not in thoughts:
                break
        thoughts.append(thought)
        if works or len(thoughts) == most:
            return "\n".join(thoughts) + f"</think>\n<answer>{expression}</answer>"


def samples(
    policy: Policy, seed: int, *, options: dict[str, object], patience: list[float], insight: float
) -> Iterator[Sample]:
    """Worked training puzzles without end."""
    puzzles = countdown(**options).examples  # type: ignore[arg-type]
    rng = random.Random(seed)
    index = 0
    while True:
        example = puzzles.train(index, seed=seed)  # type: ignore[union-attr]
        answer = policy.tokenizer(
            worked_answer(rng, example, patience=patience, insight=insight), add_special_tokens=False
        )["input_ids"]
        yield worked_sample(
            policy.encode(countdown_prompt(example)), [*answer, policy.tokenizer.eos_token_id], group=index
        )
        index += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--largest", type=int, default=50)
    parser.add_argument("--numbers", type=int, nargs=2, default=(3, 3))
    parser.add_argument("--patience", type=float, nargs="+", default=[1, 1, 1, 1])
    parser.add_argument("--insight", type=float, default=0.3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, width=arguments.width, layers=arguments.layers).to(arguments.device)
    check_attention(model, name="tiny")
    policy = Policy(model, tokenizer)
    print(f"{sum(p.numel() for p in policy.trainable().values()):,} parameters")
    options: dict[str, object] = {"numbers": list(arguments.numbers), "largest": arguments.largest}
    source = samples(policy, 1, options=options, patience=arguments.patience, insight=arguments.insight)
    optimizer = torch.optim.AdamW(policy.trainable().values(), betas=(0.9, 0.98), weight_decay=0.01)
    started = time.time()
    for step in range(arguments.steps):
        warm, done = min(1.0, (step + 1) / 100), step / arguments.steps
        loss = supervised_step(
            policy, optimizer, [next(source) for _ in range(arguments.batch)],
            rate=arguments.rate * warm * (0.5 * (1 + math.cos(math.pi * done)) + 0.02),
            max_grad_norm=1.0, micro_batch_tokens=65536,
        )  # fmt: skip
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss:.3f}, {time.time() - started:.0f} s", flush=True)
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
