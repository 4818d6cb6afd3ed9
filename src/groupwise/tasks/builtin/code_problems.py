"""Write a Python function that passes unit tests: generated problems, or MBPP and HumanEval files.

A template is a sentence, a solution and arguments for tests, all with parameters. The expected results come
from the solution, which is part of this module; the code of an answer runs in the sandbox only.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from groupwise.config.coerce import between, convert
from groupwise.errors import ConfigError
from groupwise.records import Example, Message, Rollout
from groupwise.rewards.text_rewards import answered_code, code_blocks, unit_tests
from groupwise.tasks.examples import Column, text
from groupwise.tasks.task import Task, normalize_text

SYSTEM = (
    "You are a Python programmer. Answer with one ```python block that contains the function, and no tests."
)
HELD_OUT_ONE_IN = 5
SHOWN, HIDDEN = 2, 4
"""Tests of a generated problem in its prompt, and tests that score the answer."""
DISTINCT = 4
"""Least number of different results."""
DRAWN, MAX_DRAWS = 30, 1000


def code(*, seconds: float = 2.0, memory_mb: int = 512, templates: Sequence[str] | None = None) -> Task:
    """Write a Python function: generated problems, or `--data FILE` with the columns of MBPP or HumanEval.

    `seconds`, `memory_mb`: limits of the tests of one answer; `templates`: which kinds of generated problems.
    """
    convert(seconds, to=float, setting="task.options.seconds")
    convert(memory_mb, to=int, setting="task.options.memory_mb")
    between("task.options.seconds", seconds, 0.1, 60)
    limits: Any = {"seconds": seconds, "memory_mb": memory_mb, "setup": "test_setup_code"}
    return Task(
        name="code",
        examples=CodeProblems(chosen_templates(templates)),
        prompt=code_prompt,
        rewards={
            "passed": unit_tests(**limits),
            "all_passed": unit_tests(partial=False, **limits),
            "format": one_block,
        },
        weights={"format": 0.2},
        accuracy="all_passed",
        format="format",
        key=lambda example: normalize_text(example["text"]),
        columns={
            "text": Column(read=text, names=("text", "prompt"), judges=False),
            "tests": Column(read=read_tests, names=("tests", "test_list", "test")),
        },
        predicted=answered_code,
        gold=gold_completion,
        worked=lambda example, rng: gold_completion(example) if solution_of(example) else None,
        difficulty=lambda example: example.get("template"),
        perfect=2.2,
    )


def read_tests(value: Any) -> list[Any]:
    """Read MBPP's list of asserts, HumanEval's function `check`, or calls with expected results."""
    tests = [value] if isinstance(value, str) else value
    if not isinstance(tests, list) or not tests:
        raise ValueError("expected a list of tests")
    for test in tests:
        if isinstance(test, str):
            try:
                ast.parse(test)
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"a test is not valid Python ({error})") from None
        elif not isinstance(test, dict) or not {"args", "expected"} <= test.keys():
            raise ValueError("a test must be code, or have args and expected")
    return tests


def code_prompt(example: Example) -> list[Message]:
    """Return the problem, with the tests that it shows: of MBPP the first one, of HumanEval none."""
    request = str(example["text"]).strip()
    if example.get("entry_point") and "shown" not in example:
        request = f"Complete this function:\n```python\n{request}\n```"
    shown = example.get("shown") or [test for test in example["tests"][:1] if str(test).startswith("assert")]
    if shown:
        request += "\n\nIt must pass tests such as:\n" + "\n".join(shown)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request}]


def solution_of(example: Example) -> str | None:
    """Return the reference solution, if the data has one."""
    if body := example.get("canonical_solution"):
        return f"{example['text']}{body}"
    return example.get("code")


def gold_completion(example: Example) -> str:
    solution = solution_of(example)
    if solution is None:
        raise ConfigError("this row has no solution: add a column `code` or `canonical_solution`")
    return f"```python\n{solution.strip()}\n```"


def one_block(rollout: Rollout, example: Example) -> float:
    """Return 1 for exactly one block of valid Python, else 0."""
    blocks = code_blocks(rollout.text)
    if len(blocks) != 1 or not blocks[0].strip():
        return 0.0
    try:
        ast.parse(blocks[0])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    return 1.0


@dataclass(frozen=True, slots=True)
class Template:
    """A kind of problem. `{…}` in the texts stands for the function's name and the parameters."""

    request: str
    solution: str
    parameters: Callable[[random.Random], dict[str, Any]]
    arguments: Callable[[random.Random], list[Any]]
    names: tuple[str, ...]


def numbers(rng: random.Random, *, low: int = -20, high: int = 60) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(0, 9))]


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 7)))


def grid(rng: random.Random) -> list[list[int]]:
    width = rng.randint(1, 4)
    return [[rng.randint(-9, 9) for _ in range(width)] for _ in range(rng.randint(1, 4))]


WORDS = (
    *("apple", "river", "stone", "cloud", "tiger", "lamp", "ocean", "pencil", "a", "Orange", "tea"),
    *("Window", "green", "tree", "to", "Violin", "eel", "zebra", "banana", "kiwi", "moss", "up"),
)
TEMPLATES: dict[str, Template] = {
    "sum_multiples": Template(
        "Write a function {name}(n) that returns the sum of all positive integers below n that are divisible "
        "by {a} or by {b}.",
        "def {name}(n):\n    return sum(i for i in range(1, n) if i % {a} == 0 or i % {b} == 0)",
        lambda rng: {"a": rng.randint(2, 9), "b": rng.randint(3, 17)},
        lambda rng: [rng.randint(0, 200)],
        ("sum_multiples", "add_multiples", "multiples_total"),
    ),
    "count_letters": Template(
        "Write a function {name}(text) that returns how many characters of text are in {letters!r}, "
        "ignoring case.",
        "def {name}(text):\n    return sum(character in {letters!r} for character in text.lower())",
        lambda rng: {"letters": "".join(sorted(rng.sample("abcdefghiklmnoprstuw", rng.randint(2, 5))))},
        lambda rng: [sentence(rng)],
        ("count_letters", "letter_count", "how_many"),
    ),
    "scale_above": Template(
        "Write a function {name}(values) that returns a list of the values greater than {limit}, "
        "each multiplied "
        "by {factor}, in their order.",
        "def {name}(values):\n    return [{factor} * value for value in values if value > {limit}]",
        lambda rng: {"limit": rng.randint(-5, 30), "factor": rng.randint(2, 9)},
        lambda rng: [numbers(rng)],
        ("scale_above", "keep_and_scale", "filtered_products"),
    ),
    "every_nth": Template(
        "Write a function {name}(items) that returns every {step}th item of a list, beginning with "
        "the item at "
        "index {start}.",
        "def {name}(items):\n    return items[{start}::{step}]",
        lambda rng: {"step": rng.randint(4, 9), "start": rng.randint(0, 4)},
        lambda rng: [[rng.randint(0, 99) for _ in range(rng.randint(0, 20))]],
        ("every_nth", "take_some", "sparse"),
    ),
    "shift_letters": Template(
        "Write a function {name}(text) that moves each lower-case letter of text by {shift} places in the "
        "alphabet, from z on to a, and leaves all other characters as they are.",
        "def {name}(text):\n    return ''.join(\n        chr((ord(c) - 97 + {shift}) % 26 + 97) if "
        "'a' <= c <= 'z' "
        "else c for c in text\n    )",
        lambda rng: {"shift": rng.randint(1, 25)},
        lambda rng: [sentence(rng)],
        ("shift_letters", "encode", "rotate_text"),
    ),
    "digit_sum": Template(
        "Write a function {name}(n) that returns the sum of the digits of the non-negative integer n written "
        "in base {base}.",
        "def {name}(n):\n    total = 0\n    while n:\n        n, digit = divmod(n, {base})\n        "
        "total += digit\n"
        "    return total",
        lambda rng: {"base": rng.randint(2, 16)},
        lambda rng: [rng.randint(0, 10 ** rng.randint(1, 6))],
        ("digit_sum", "sum_of_digits", "digits_in_base"),
    ),
    "best_window": Template(
        "Write a function {name}(values) that returns the {end} sum of {size} consecutive values, or None if "
        "there are fewer values.",
        "def {name}(values):\n    sums = [sum(values[i:i + {size}]) for i in range(len(values) - "
        "{size} + 1)]\n"
        "    return {choose}(sums, default=None)",
        lambda rng: (
            {"size": rng.randint(2, 7)}
            | rng.choice(({"end": "largest", "choose": "max"}, {"end": "smallest", "choose": "min"}))
        ),
        lambda rng: [numbers(rng)],
        ("best_window", "extreme_run", "window_sum"),
    ),
    "long_words": Template(
        "Write a function {name}(text) that returns the words of text with at least {least} "
        "letters, sorted by "
        "{how}.",
        "def {name}(text):\n    return sorted((word for word in text.split() if len(word) >= "
        "{least}), key={key})",
        lambda rng: (
            {"least": rng.randint(2, 6)}
            | rng.choice(
                (
                    {"how": "length, then alphabetically", "key": "lambda word: (len(word), word)"},
                    {"how": "the alphabet, ignoring case", "key": "str.lower"},
                    {"how": "their last letter, equal ones in their order", "key": "lambda word: word[-1]"},
                )
            )
        ),
        lambda rng: [sentence(rng)],
        ("long_words", "select_words", "sorted_words"),
    ),
    "repeated": Template(
        "Write a function {name}(items) that returns a sorted list of the distinct items that occur {how} "
        "{times} times.",
        "def {name}(items):\n    return sorted(item for item in set(items) if items.count(item) "
        "{sign} {times})",
        lambda rng: (
            {"times": rng.randint(2, 5)}
            | rng.choice(
                (
                    {"how": "at least", "sign": ">="},
                    {"how": "at most", "sign": "<="},
                    {"how": "exactly", "sign": "=="},
                )
            )
        ),
        lambda rng: [[rng.randint(0, 4) for _ in range(rng.randint(0, 18))]],
        ("repeated", "items_by_count", "occurring"),
    ),
    "replace_divisible": Template(
        "Write a function {name}(n) that returns a list of the integers from 1 to n, in which "
        "multiples of {a} "
        "are replaced by {first!r}, multiples of {b} by {second!r}, and multiples of both by {both!r}.",
        "def {name}(n):\n    return [\n        {both!r} if i % {a} == 0 and i % {b} == 0 else "
        "{first!r} if i % {a} == 0 "
        "else {second!r} if i % {b} == 0 else i\n        for i in range(1, n + 1)\n    ]",
        lambda rng: (
            dict(
                zip(
                    ("first", "second", "both"),
                    rng.sample(("fizz", "buzz", "ping", "pong", "tick", "tock"), 3),
                    strict=True,
                )
            )
            | {"a": rng.randint(2, 4), "b": rng.randint(5, 8)}
        ),
        lambda rng: [rng.randint(0, 45)],
        ("replace_divisible", "game_numbers", "spoken"),
    ),
    "grid_values": Template(
        "Write a function {name}(grid) that takes a list of rows of numbers and returns a list of "
        "{what}, each "
        "multiplied by {factor}.",
        "def {name}(grid):\n    return [{factor} * {value} for line in {lines}]",
        lambda rng: (
            {"factor": rng.randint(2, 9)}
            | rng.choice(
                (
                    {"what": "the sums of its rows", "value": "sum(line)", "lines": "grid"},
                    {"what": "the sums of its columns", "value": "sum(line)", "lines": "zip(*grid)"},
                    {
                        "what": "the largest values of its columns",
                        "value": "max(line)",
                        "lines": "zip(*grid)",
                    },
                    {"what": "the smallest values of its rows", "value": "min(line)", "lines": "grid"},
                    {"what": "the first values of its rows", "value": "line[0]", "lines": "grid"},
                )
            )
        ),
        lambda rng: [grid(rng)],
        ("grid_values", "of_grid", "summarize", "table_values"),
    ),
    "count_words": Template(
        "Write a function {name}(text) that returns a dict from each word that {condition} to how often it "
        "occurs in text. Words are separated by spaces.",
        "def {name}(text):\n    words = [word for word in text.split() if {test}]\n"
        "    return {{word: words.count(word) for word in words}}",
        lambda rng: rng.choice(
            tuple(
                {"condition": f"contains the letter {letter!r}", "test": f"{letter!r} in word"}
                for letter in "aeiorn"
            )
            + tuple({"condition": f"has {n} letters", "test": f"len(word) == {n}"} for n in (3, 4, 5, 6))
        ),
        lambda rng: [sentence(rng)],
        ("count_words", "word_counts", "tally"),
    ),
    "reverse_words": Template(
        "Write a function {name}(text) that reverses each word of text with more than {length} letters, and "
        "returns all words in their order, joined by {mark!r}.",
        "def {name}(text):\n    words = [word[::-1] if len(word) > {length} else word for word in "
        "text.split()]\n"
        "    return {mark!r}.join(words)",
        lambda rng: {"length": rng.randint(1, 5), "mark": rng.choice((" ", "-", "_", "+", ", "))},
        lambda rng: [sentence(rng)],
        ("reverse_words", "flip_words", "turned", "mirror_words"),
    ),
    "recurrence": Template(
        "A sequence starts with a(0) = {first} and a(1) = {second}, and a(n) = {p} * a(n - 1) + {q} "
        "* a(n - 2) "
        "for larger n. Write a function {name}(n) that returns a(n).",
        "def {name}(n):\n    a, b = {first}, {second}\n    for _ in range(n):\n        a, b = b, "
        "{p} * b + {q} * a\n"
        "    return a",
        lambda rng: {
            "first": rng.randint(0, 5),
            "second": rng.randint(1, 5),
            "p": rng.randint(1, 3),
            "q": rng.randint(-2, 3),
        },
        lambda rng: [rng.randint(0, 15)],
        ("recurrence", "nth_term", "sequence"),
    ),
    "coprime": Template(
        "Write a function {name}(values) that returns the values that have no divisor greater than "
        "1 in common "
        "with {modulus}.",
        "import math\n\n\ndef {name}(values):\n    return [value for value in values if "
        "math.gcd(value, {modulus}) == 1]",
        lambda rng: {"modulus": rng.randint(6, 60)},
        lambda rng: [numbers(rng, low=1)],
        ("coprime", "without_common", "prime_to"),
    ),
    "ranked": Template(
        "Write a function {name}(values) that returns the value at rank {k} among the distinct values, where "
        "rank 1 is the {end}, or None if there are fewer distinct values.",
        "def {name}(values):\n    distinct = sorted(set(values), reverse={reverse})\n"
        "    return distinct[{k} - 1] if len(distinct) >= {k} else None",
        lambda rng: (
            {"k": rng.randint(2, 8)}
            | rng.choice(({"end": "largest", "reverse": True}, {"end": "smallest", "reverse": False}))
        ),
        lambda rng: [[rng.randint(0, 12) for _ in range(rng.randint(0, 14))]],
        ("ranked", "at_rank", "value_of_rank"),
    ),
    "count_pairs": Template(
        "Write a function {name}(values) that returns the number of pairs of values at different positions "
        "whose {operation} is {target}. Each pair counts once.",
        "def {name}(values):\n    return sum(\n        {expression} == {target} for i in range(len(values)) "
        "for j in range(i + 1, len(values))\n    )",
        lambda rng: (
            {"target": rng.randint(0, 12)}
            | rng.choice(
                (
                    {"operation": "sum", "expression": "values[i] + values[j]"},
                    {"operation": "absolute difference", "expression": "abs(values[i] - values[j])"},
                )
            )
        ),
        lambda rng: [[rng.randint(0, 9) for _ in range(rng.randint(0, 10))]],
        ("count_pairs", "pairs", "matching_pairs"),
    ),
    "chunk": Template(
        "Write a function {name}(values) that cuts a list into parts of {size} values, the last one possibly "
        "shorter, and returns {what}.",
        "def {name}(values):\n    parts = [values[i:i + {size}] for i in range(0, len(values), {size})]\n"
        "    return {expression}",
        lambda rng: (
            {"size": rng.randint(2, 6)}
            | rng.choice(
                (
                    {"what": "the parts", "expression": "parts"},
                    {"what": "the sum of each part", "expression": "[sum(part) for part in parts]"},
                    {"what": "the first value of each part", "expression": "[part[0] for part in parts]"},
                )
            )
        ),
        lambda rng: [numbers(rng)],
        ("chunk", "cut", "in_parts"),
    ),
    "polynomial": Template(
        "Write a function {name}(x) that returns {a} * x**2 + {b} * x + {c} if x is {condition}, "
        "else {other}.",
        "def {name}(x):\n    return {a} * x**2 + {b} * x + {c} if {test} else {other}",
        lambda rng: (
            {
                "a": rng.randint(1, 9),
                "b": rng.randint(-9, 9),
                "c": rng.randint(-9, 9),
                "other": rng.randint(-5, 5),
            }
            | rng.choice(
                (
                    {"condition": "even", "test": "x % 2 == 0"},
                    {"condition": "negative", "test": "x < 0"},
                    {"condition": "divisible by 3", "test": "x % 3 == 0"},
                )
            )
        ),
        lambda rng: [rng.randint(-12, 12)],
        ("polynomial", "value_at", "evaluate"),
    ),
}


def chosen_templates(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the templates to use; raise ConfigError for an unknown one."""
    if names is None:
        return tuple(TEMPLATES)
    if isinstance(names, str) or not names or not set(names) <= set(TEMPLATES):
        raise ConfigError(f"task.options.templates must be a list of {', '.join(TEMPLATES)}; got {names!r}")
    return tuple(names)


@dataclass(frozen=True, slots=True)
class CodeProblems:
    """An `ExampleStream` of problems. A hash of the request decides whether a problem is held out."""

    templates: tuple[str, ...]

    def train(self, index: int, *, seed: int) -> Example:
        rng = random.Random(f"code train {seed} {index}")
        for _ in range(MAX_DRAWS):
            problem = draw(rng, rng.choice(self.templates))
            if not is_held_out(problem[1]) and (example := complete(*problem)):
                return example
        raise ConfigError("code: no training problem was found; choose more templates")

    def held_out(self, count: int) -> list[Example]:
        """Return up to `count` distinct problems, the same number of each template."""
        rng = random.Random("code held out")
        problems: dict[str, Example] = {}
        for number in range(count):
            for _ in range(MAX_DRAWS):
                problem = draw(rng, self.templates[number % len(self.templates)])
                new = is_held_out(problem[1]) and problem[1] not in problems
                if new and (example := complete(*problem)):
                    problems[problem[1]] = example
                    break
        return list(problems.values())


def draw(rng: random.Random, template: str) -> tuple[str, str, str, str]:
    """Draw the parameters of a problem: its template, request, solution and the function's name."""
    chosen = TEMPLATES[template]
    values = {**chosen.parameters(rng), "name": rng.choice(chosen.names)}
    return template, chosen.request.format(**values), chosen.solution.format(**values), values["name"]


def is_held_out(request: str) -> bool:
    """Whether a problem is held out: also under another name of the function."""
    plain = " ".join(word for word in request.split() if "(" not in word)
    return hashlib.sha256(plain.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


@lru_cache(maxsize=4096)
def complete(template: str, request: str, solution: str, name: str) -> Example | None:
    """Add tests to a problem, which depend on its text only; None if nearly all of them have one result."""
    namespace: dict[str, Any] = {}
    exec(solution, namespace)  # the solution of a template above
    rng = random.Random(request)
    drawn: dict[str, str] = {}
    for _ in range(DRAWN):
        arguments = TEMPLATES[template].arguments(rng)
        drawn[f"{name}({', '.join(map(repr, arguments))})"] = repr(namespace[name](*arguments))
    if len(set(drawn.values())) < DISTINCT:
        return None
    # A constant answer shall pass few tests: calls with different results come first.
    first = {result: call for call, result in reversed(drawn.items())}
    ordered = sorted(drawn.items(), key=lambda test: first[test[1]] != test[0])
    tests = [f"assert {call} == {result}" for call, result in ordered[: SHOWN + HIDDEN]]
    shown, hidden = tests[:SHOWN], tests[SHOWN:]
    return Example(
        {
            "text": request,
            "shown": shown,
            "tests": hidden,
            "entry_point": name,
            "code": solution,
            "template": template,
        }
    )
