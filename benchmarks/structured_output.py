"""JSON-schema answers: how many are valid, and how fast they are beside free answers of the same lengths.

    python benchmarks/structured_output.py --model smollm2 --answers 500

The serving engine and the rollout engine write the answers. Constrained and free answers have the same
prompts and seeds, and the free ones the lengths of the constrained ones of the first call as their limits (in
rollouts: the mean of them). Rates are the best of several calls that alternate. A first call of each kind is
not counted: it captures graphs and computes the first masks. Each call has seeds of its own, so that it has
texts of its own: masks that are kept for other answers help as much as they do with new requests.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

from groupwise.config.schema import EngineConfig, ModelConfig
from groupwise.engine.engine import Engine
from groupwise.engine.serving.serving_engine import ServingEngine, StreamChunk
from groupwise.engine.serving.serving_scheduler import Job
from groupwise.model.grammar import GrammarCompiler, json_grammar
from groupwise.model.load import load_for_generation
from groupwise.model.policy import Policy
from groupwise.records import Request, Sampling

WORD = {"type": "string", "maxLength": 24}


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = {
    "a person": record(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}, city=WORD),
    "a book": record(
        title={"type": "string", "maxLength": 40},
        author=WORD,
        year={"type": "integer", "minimum": 1400, "maximum": 2100},
        genre={"enum": ["novel", "science", "history", "poetry"]},
    ),
    "a recipe": record(
        dish=WORD,
        ingredients={"type": "array", "items": WORD, "minItems": 1, "maxItems": 5},
        vegetarian={"type": "boolean"},
    ),
    "an order": record(
        customer=record(name=WORD, premium={"type": "boolean"}),
        items={
            "type": "array",
            "items": record(product=WORD, count={"type": "integer", "minimum": 1, "maximum": 99}),
            "minItems": 1,
            "maxItems": 3,
        },
    ),
    "a review": record(
        stars={"type": "integer", "minimum": 1, "maximum": 5},
        mood={"enum": ["happy", "neutral", "angry"]},
        text={"type": "string", "maxLength": 120},
        reply={"anyOf": [WORD, {"type": "null"}]},
    ),
}
KINDS: dict[str, Any] = {
    "string": str, "integer": int, "boolean": bool, "array": list, "object": dict, "null": type(None),
}  # fmt: skip


def matches(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value matches a schema; knows the keywords that the schemas above use, and no others."""
    known = {"type", "properties", "required", "additionalProperties", "enum", "minimum", "maximum", "items"}
    assert not set(schema) - known - {"minItems", "maxItems", "maxLength", "anyOf"}
    if "anyOf" in schema:
        return any(matches(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if not isinstance(value, KINDS[kind]) or (kind == "integer" and isinstance(value, bool)):
        return False
    if kind == "integer":
        return bool(schema["minimum"] <= value <= schema["maximum"])
    if kind == "string":
        return len(value) <= schema["maxLength"]
    if kind == "array":
        sized = schema["minItems"] <= len(value) <= schema["maxItems"]
        return sized and all(matches(item, schema["items"]) for item in value)
    if kind == "object":
        properties = schema["properties"]
        return set(value) == set(properties) and all(matches(value[key], properties[key]) for key in value)
    return True


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        return matches(json.loads(text), schema)
    except ValueError:
        return False


def jobs_of(
    policy: Policy, names: Sequence[str], count: int, *, max_tokens: int
) -> list[tuple[Job, dict[str, Any]]]:
    jobs = []
    for number in range(count):
        name = names[number % len(names)]
        schema = SCHEMAS[name]
        question = (
            f"Invent {name} (number {number}). Answer in JSON that matches this schema: {json.dumps(schema)}"
        )
        job = Job(
            prompt=policy.encode(question),
            seeds=(number,),
            sampling=Sampling(temperature=0.8, max_tokens=max_tokens),
            grammar=json_grammar(schema),
        )
        jobs.append((job, schema))
    return jobs


Written = tuple[list[tuple[int, ...]], float]
"""The tokens of each answer, and the seconds that they took."""


class Server:
    """A serving engine with one client that submits everything at once."""

    def __init__(self, policy: Policy, *, slots: int, context: int, waiting: int) -> None:
        self._chunks: Queue[Sequence[StreamChunk] | Exception] = Queue()
        self.engine = ServingEngine(
            policy,
            slots=slots,
            context=context,
            waiting=waiting,
            deliver=self._chunks.put,
            failed=self._chunks.put,
        )
        self.engine.start()

    def write(self, jobs: Sequence[Job]) -> Written:
        started, tokens = time.perf_counter(), {job: [0] * 0 for job in jobs}
        for job in jobs:
            self.engine.submit(job)
        unfinished = len(jobs)
        while unfinished:
            chunks = self._chunks.get(timeout=300)
            if isinstance(chunks, Exception):
                raise chunks
            for chunk in chunks:
                tokens[chunk.job] += chunk.tokens
                unfinished -= chunk.finish is not None
        return [tuple(tokens[job]) for job in jobs], time.perf_counter() - started


class Rollouts:
    """The rollout engine, in which one grammar holds for a whole call."""

    def __init__(self, policy: Policy, *, slots: int) -> None:
        self.policy, self.engine = policy, Engine(policy, EngineConfig(max_sequences=slots))
        self._compiler = GrammarCompiler(policy, policy.end_tokens)

    def write(self, jobs: Sequence[Job]) -> Written:
        # A call has one limit for all its answers: free ones get the mean length of the constrained ones.
        grammar, limits = jobs[0].grammar, [job.sampling.max_tokens for job in jobs]
        limit = max(limits) if grammar is not None else round(sum(limits) / len(limits))
        self.policy.grammar = None if grammar is None else self._compiler.compile(grammar)
        asked = [Request(prompt=job.prompt, seeds=job.seeds) for job in jobs]
        started = time.perf_counter()
        groups = self.engine.generate(asked, replace(jobs[0].sampling, max_tokens=limit))
        return [group[0].tokens for group in groups], time.perf_counter() - started


def compare(
    write: Callable[[Sequence[Job]], Written],
    policy: Policy,
    jobs: Sequence[tuple[Job, dict[str, Any]]],
    *,
    repeats: int,
) -> dict[str, float]:
    """Write constrained and free answers in turn; return the rates and how many answers are valid."""
    rates: dict[str, list[float]] = {"constrained": [], "free": []}
    valid = total = truncated = 0
    for repeat in range(repeats + 1):
        constrained = [
            replace(job, seeds=tuple(seed + 10**6 * repeat for seed in job.seeds)) for job, _ in jobs
        ]
        answers, seconds = write(constrained)
        if repeat == 0:
            lengths = [len(tokens) for tokens in answers]
        free = [
            replace(job, grammar=None, sampling=replace(job.sampling, max_tokens=length))
            for job, length in zip(constrained, lengths, strict=True)
        ]
        freely, free_seconds = write(free)
        if repeat == 0:
            continue
        truncated += sum(
            len(a) == job.sampling.max_tokens for a, job in zip(answers, constrained, strict=True)
        )
        rates["constrained"].append(sum(map(len, answers)) / seconds)
        rates["free"].append(sum(map(len, freely)) / free_seconds)
        total += len(answers)
        valid += sum(
            is_valid(policy.decode(tokens), schema) for tokens, (_, schema) in zip(answers, jobs, strict=True)
        )
    return {
        "answers": total,
        "valid": valid / total,
        "truncated": truncated,
        "tokens_an_answer": sum(map(len, answers)) / len(answers),
        "free_tokens_an_answer": sum(map(len, freely)) / len(freely),
        "constrained_tokens_s": max(rates["constrained"]),
        "free_tokens_s": max(rates["free"]),
        "ratio": max(rates["constrained"]) / max(rates["free"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny", help="a model folder or name")
    parser.add_argument("--answers", type=int, default=500)
    parser.add_argument("--sequences", type=int, default=128, help="answers at a time")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for structured_output.json")
    arguments = parser.parse_args()
    policy = load_for_generation(ModelConfig(name=arguments.model), rank=0, trained=None)
    most = arguments.max_tokens
    jobs = jobs_of(policy, list(SCHEMAS), arguments.answers, max_tokens=most)
    started = time.perf_counter()
    compiler = GrammarCompiler(policy, policy.end_tokens)
    for grammar in dict.fromkeys(job.grammar for job, _ in jobs):
        assert grammar is not None
        compiler.compile(grammar)
    print(
        f"reading the tokenizer and compiling {len(SCHEMAS)} schemas: {time.perf_counter() - started:.2f} s"
    )
    context = max(len(job.prompt) for job, _ in jobs) + most
    found: dict[str, Any] = {"model": arguments.model, "sequences": arguments.sequences}
    server = Server(policy, slots=arguments.sequences, context=context, waiting=arguments.answers)
    found["serving"] = compare(server.write, policy, jobs, repeats=arguments.repeats)
    server.engine.close()
    rollouts = Rollouts(policy, slots=arguments.sequences)
    orders = jobs_of(policy, ["an order"], arguments.answers, max_tokens=most)
    found["rollouts"] = compare(rollouts.write, policy, orders, repeats=arguments.repeats)
    for name in ("serving", "rollouts"):
        part = found[name]
        print(
            f"{name}: {part['valid']:.1%} of {part['answers']:.0f} answers valid, "
            f"{part['truncated']} cut off; "
            f"{part['constrained_tokens_s']:.0f} tokens/s constrained, {part['free_tokens_s']:.0f} free: "
            f"{part['ratio']:.1%} ({part['tokens_an_answer']:.0f} and {part['free_tokens_an_answer']:.0f} "
            "tokens an answer)"
        )
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "structured_output.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
