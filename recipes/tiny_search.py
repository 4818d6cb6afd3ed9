"""How the built-in search model is made: a small Llama, a word-level tokenizer, a warm start on talks.

    python recipes/tiny_search.py --output src/groupwise/model/tiny_search

The demonstrations play in worlds of their own, never in the one that is trained and measured on. The first
stage teaches to search and to read; the second is careless: half a name for a query, a hop left out, the
wrong thing read. What is left to reinforcement is judgement: what to search for, when to search on, and what
to answer. About half an hour on one core.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tiny import build_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import groupwise.tasks.builtin.search_qa as world
from groupwise.config import Config
from groupwise.engine.engine import Engine
from groupwise.evaluate.held_out import evaluate
from groupwise.learner.sft_learner import supervised_step
from groupwise.model.load import check_attention
from groupwise.model.policy import Policy
from groupwise.model.tokenizer import with_tools_text
from groupwise.records import Sample, Sampling
from groupwise.rollout.collect import Tools
from groupwise.rollout.tools import tool_of
from groupwise.tasks.builtin.search_qa import (
    QUESTIONS,
    RELATIONS,
    SYSTEM,
    QuestionStream,
    World,
    make_world,
    search_prompt,
    search_qa,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OPEN_CALL, CLOSE_CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "', '"}}\n</tool_call>'
PHRASES = (
    *(" lives in", ", works for", " and plays the", " lies on the river", ". The mayor is", " makes"),
    *(". The owner is", "\n1.", "\n2.", "\n3.", "1.", "2.", "3.", ".\n"),
)
TOOLS = [tool_of(function).schema for function in search_qa().tools]


def words() -> list[str]:
    """Every word that documents are made of, with the space before it."""
    pools = (getattr(world, name) for name in dir(world) if name.isupper())
    named = {word for pool in pools if isinstance(pool, list) for word in pool}
    return sorted(f" {word}" for word in named | set(RELATIONS.values()))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; so are the words of the world and the fixed sentences of the conversation."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    system = with_tools_text([{"role": "system", "content": SYSTEM}], TOOLS)[0]["content"]
    asked = [part for question in QUESTIONS.values() for part in question.split("{s}")]
    tags = ["<think>", "</think>\n", OPEN_CALL, CLOSE_CALL, "<answer>", "</answer>"]
    roles = ["system\n", "user\n", "assistant\n", "<tool_response>\n", "</tool_response>"]
    texts = dict.fromkeys([system, *asked, *tags, *roles, *PHRASES, *words()])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


class Care(NamedTuple):
    """How a demonstrator works: the chance of each mistake."""

    half_name: float
    """The query has one word of the name."""
    other_word: float
    """The query is about something else in the question or in what was read."""
    misread: float
    """Another fact of the document is taken for the one that was looked for."""
    give_up: float
    """The answer is given a hop too early."""
    silent: float
    """A turn without thinking."""


def query_for(rng: random.Random, entity: str, relation: str, world: World, care: Care) -> str:
    chance = rng.random()
    if chance < care.half_name and " " in entity:
        return rng.choice(entity.split())
    if chance < care.half_name + care.other_word:
        return rng.choice([RELATIONS[relation], rng.choice(list(world.facts))])
    return rng.choice([entity, entity, f"{entity} {RELATIONS[relation]}"])


def read_off(
    rng: random.Random, found: list[str], entity: str, relation: str, world: World, care: Care
) -> str:
    """Return what a demonstrator reads: in the entity's document, or in the first that will do."""
    fitting = [name for name in found if relation in world.facts[name]] or found
    facts = world.facts[entity if entity in found else fitting[0]]
    if rng.random() < care.misread or relation not in facts:
        return rng.choice(list(facts.values()))
    return facts[relation]


def conversation(rng: random.Random, world: World, care: Care) -> tuple[str, list[tuple[str, str]]]:
    """Return a question and the turns of a demonstration, each with what the tool answers to it."""
    questions = QuestionStream(world=world, paths=tuple(QUESTIONS))
    example = questions.draw(rng, held_out=rng.random() < 0.25)
    path = next(p for p, text in QUESTIONS.items() if text == example["question"].replace(
        f" {example['documents'][0]}", "{s}"))  # fmt: skip
    search = search_tool(world)
    entity, turns = example["documents"][0], []
    for hop, relation in enumerate(path):
        if hop and rng.random() < care.give_up:
            break
        query = query_for(rng, entity, relation, world, care)
        thought = "" if rng.random() < care.silent else f"<think> {entity} {RELATIONS[relation]}</think>\n"
        found, text = search(query)
        turns.append((f"{thought}{OPEN_CALL} {query}{CLOSE_CALL}", text))
        if not found:
            break
        entity = read_off(rng, found, entity, relation, world, care)
        if relation != path[-1] and path[hop + 1] not in world.facts.get(entity, {}):
            break  # misread: there is nothing to go on with
    thought = "" if rng.random() < care.silent else f"<think> {entity}</think>\n"
    turns.append((f"{thought}<answer> {entity}</answer>", ""))
    return example["question"], turns


def search_tool(world: World):  # type: ignore[no-untyped-def]
    def search(query: str) -> tuple[list[str], str]:
        names = world.search(query, 3)
        lines = [f"{rank}. {world.documents[name]}" for rank, name in enumerate(names, start=1)]
        return names, "\n".join(lines) or "Nothing found."

    return search


def samples(policy: Policy, seed: int, care: Care) -> Iterator[Sample]:
    """Demonstrations without end, laid out as rollouts are; the loss is on the turns alone."""
    rng = random.Random(seed)
    number = 0
    while True:
        world = make_world(rng.randrange(1, 10**6), people=480)
        for _ in range(200):
            question, turns = conversation(rng, world, care)
            prompt = policy.encode(search_prompt({"question": question}), tools=TOOLS)  # type: ignore[arg-type]
            tokens, trained = list(prompt), [False] * len(prompt)
            for text, result in turns:
                written = [*policy._tokens(text), policy.tokenizer.eos_token_id]
                tokens += written
                trained += [True] * len(written)
                if result:
                    read = policy.encode_results([result], prefill="", ended=True)
                    tokens += read
                    trained += [False] * len(read)
            zeros = (0.0,) * len(tokens)
            yield Sample(
                tokens=tuple(tokens), trained=tuple(trained), logprobs=zeros, entropies=zeros,
                advantages=zeros, prefix=len(prompt), group=number,
            )  # fmt: skip
            number += 1


class Stage(NamedTuple):
    steps: int
    rate: float
    care: Care


STAGES = [
    Stage(1800, 3e-3, Care(half_name=0.1, other_word=0.02, misread=0.02, give_up=0.02, silent=0.05)),
    Stage(150, 3e-4, Care(half_name=0.5, other_word=0.05, misread=0.15, give_up=0.25, silent=0.25)),
]


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


def report(policy: Policy) -> None:
    task, config = search_qa(), Config()
    result = evaluate(
        task, task.examples.held_out(256), codec=policy, engine=Engine(policy, config.engine),  # type: ignore[union-attr]
        sampling=Sampling(max_tokens=64), samples=4, seed=0, seconds=5.0,
        tools=Tools.of(task.tools, config.tools),
    )  # fmt: skip
    print(result.summary(), {name: str(i) for name, i in result.reward_intervals().items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--stage", type=int, nargs="+", default=[1, 2], help="which to run; 2 alone goes on")
    parser.add_argument("--start", type=Path, help="a folder to go on from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = (
        LlamaForCausalLM.from_pretrained(arguments.start, dtype=torch.float32)
        if arguments.start
        else build_model(tokenizer, width=arguments.width, layers=arguments.layers)
    ).to(arguments.device)
    check_attention(model, name="tiny-search")
    policy = Policy(model, tokenizer)
    print(f"{sum(p.numel() for p in policy.trainable().values()):,} parameters, {len(tokenizer)} tokens")
    for number in arguments.stage:
        stage = STAGES[number - 1]
        warm_start(policy, samples(policy, number, stage.care), stage, batch=arguments.batch)
        report(policy)
        if number < len(STAGES):
            model.save_pretrained(arguments.output.with_name(f"{arguments.output.name}-stage{number}"))
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
