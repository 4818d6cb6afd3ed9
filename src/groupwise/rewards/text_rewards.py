"""Rewards on the text of an answer: length, overlap with references, search, citations, tests of code."""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from statistics import fmean
from typing import Any

from groupwise.config.coerce import between
from groupwise.errors import ConfigError, RolloutError
from groupwise.isolation.code_tests import UNUSED, CodeReport
from groupwise.isolation.sandbox import Sandbox, SandboxError
from groupwise.records import Example, Rollout
from groupwise.rewards.extraction import END_THINK

Reward = Callable[[Rollout, Example], float]
Golds = Callable[[Example], Sequence[str]]
"""Returns the reference answers of an example; matching any one of them suffices."""
Embed = Callable[[Sequence[str]], Any]
"""Maps texts to unit vectors."""

WORD = re.compile(r"\w+")
NUMBER = re.compile(
    r"(?<![\w.])-?(?:\d{1,30}(?:,\d{3})*(?:\.\d{1,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?(?:/[1-9]\d{0,29})?"
)
"""A number with thousands commas, decimals and an exponent, or a fraction: -1,080.5, 1e-05, 3/4."""
NOT_INSIDE_NUMBER = (
    r"(?<!\d\.)(?!(?<=\d,)\d{3}(?!\d))(?<!(?<!\w)-)",
    r"(?!\.\d|,\d{3}(?!\d))",
)
"""What may not stand before and after a number: decimals, thousands after a comma, a minus sign."""
LONGEST_MATCHED = 10_000
"""Number of characters of an answer that a regular expression searches."""
LONGEST = 2000
"""Number of words of a text that are compared."""
COMMON = 0.1
"""A word that occurs in this share of the texts is common and has weight 0."""
FEW = 20
"""Minimum number of texts in which a common word occurs: in a few texts, no word is common."""
HIGHEST_BASELINE = 0.95
CACHED = 1024
"""Number of examples whose reference answers are cached."""


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())[:LONGEST]


def token_f1(answer: str, gold: str) -> float:
    """Return the F1 score of the bag of words, counting repeats.

    Example: "the red fox", "a red red fox" -> 2 shared, 2/3 and 2/4 -> 4/7
    """
    predicted, expected = Counter(words(answer)), Counter(words(gold))
    return f1_score((predicted & expected).total(), predicted.total(), expected.total())


def rarity_of(texts: Sequence[str]) -> Callable[[str], float]:
    """Return a word's weight by its rarity in the texts: 0 for common words, larger for rarer ones."""
    frequency = Counter(word for text in texts for word in set(words(text)))
    common = max(COMMON * len(texts), FEW)
    return lambda word: max(0.0, math.log(common / (frequency[word] or 1)))


def rare_word_f1(rarity: Callable[[str], float]) -> Callable[[str, str], float]:
    """Make a measure: token F1 with words weighted by rarity and by the logarithm of their count.

    A text of common words only scores 0 against any answer.
    """

    def weighted(text: str) -> dict[str, float]:
        return {word: rarity(word) * (1 + math.log(count)) for word, count in Counter(words(text)).items()}

    weighted_gold = lru_cache(CACHED)(weighted)  # all rollouts of a group are compared with the same texts

    def measure(answer: str, gold: str) -> float:
        if words(answer) == words(gold):
            return 1.0
        predicted, expected = weighted(answer), weighted_gold(gold)
        shared = sum(min(weight, expected[word]) for word, weight in predicted.items() if word in expected)
        return 2 * shared / (sum(predicted.values()) + sum(expected.values())) if shared else 0.0

    return measure


def rouge_l(answer: str, gold: str) -> float:
    """Return the F1 of the longest common subsequence of words (Lin 2004).

    Example: "a b c", "a x c" -> 2 in order, 2/3 and 2/3 -> 2/3
    """
    predicted, expected = words(answer), words(gold)
    return f1_score(lcs_length(predicted, expected), len(predicted), len(expected))


def lcs_length(predicted: Sequence[str], expected: Sequence[str]) -> int:
    """Return the length of the longest common subsequence.

    Adjacent cells in a row of the dynamic-programming table differ by 0 or 1, so a row is stored as the
    bits of one integer (Hyyrö 2004): 0 where the row increases.
    """
    positions: dict[str, int] = {}
    for position, word in enumerate(expected):
        positions[word] = positions.get(word, 0) | 1 << position
    mask = (1 << len(expected)) - 1
    row = mask
    for word in predicted:
        matches = row & positions.get(word, 0)
        row = ((row + matches) | (row - matches)) & mask
    return len(expected) - row.bit_count()


def f1_score(shared: int, predicted: int, expected: int) -> float:
    return 2 * shared / (predicted + expected) if shared else 0.0


def shares_words(*, golds: Golds, measure: Callable[[str, str], float] = token_f1) -> Reward:
    """Make a reward: the best overlap of the answer with a reference answer; 0 without an answer."""

    def overlap(rollout: Rollout, example: Example) -> float:
        answer = answer_of(rollout)
        return max((measure(answer, gold) for gold in golds(example)), default=0.0) if answer else 0.0

    return overlap


def similar(*, golds: Golds, embed: Embed, baseline: float) -> Reward:
    """Make a reward: the cosine similarity to the closest reference answer, rescaled to 0 at `baseline`.

    Unrelated texts of one domain are far from orthogonal; with some embeddings they are nearly parallel.
    Without the baseline (see `unrelated`) all answers would get about the same reward.
    """
    floor = min(baseline, HIGHEST_BASELINE)
    vectors_of = lru_cache(CACHED)(embed)  # all rollouts of a group are compared with the same texts

    def closeness(rollout: Rollout, example: Example) -> float:
        answer = answer_of(rollout)
        if not answer:
            return 0.0
        (vector,) = embed([answer])
        cosine = max(float(vector @ gold) for gold in vectors_of(tuple(golds(example))))
        return max(0.0, (cosine - floor) / (1 - floor))

    return closeness


def unrelated(texts: Sequence[str], embed: Embed) -> float:
    """Return the mean cosine similarity of adjacent texts, which are assumed to be unrelated."""
    if len(texts) < 2:
        return 0.0
    vectors = embed(texts)
    return fmean(float(one @ other) for one, other in pairwise(vectors))


def length(*, at_most: int) -> Callable[[Rollout, Example], float]:
    """Make a reward: 1 if `rollout.text` has at most `at_most` characters, else 0."""
    if at_most < 1:
        raise ConfigError(f"length(at_most=…) must be at least 1 character; got {at_most!r}")

    def short_enough(rollout: Rollout, example: Example) -> float:
        return float(len(rollout.text) <= at_most)

    return named(short_enough, "length")


def exact_match(column: str = "answer") -> Reward:
    """Make a reward: 1 if the answer equals the example's column, ignoring case and white space, else 0."""

    def exact(rollout: Rollout, example: Example) -> float:
        return float(folded(answer_of(rollout)) == folded(example[column]))

    return named(exact, "exact_match")


def contains(column: str = "answer") -> Reward:
    """Make a reward: 1 if the answer contains the example's column as whole words, ignoring case, else 0.

    A number must be whole, too: 3.5, 3,000 and -3 do not contain 3, and -3.5 does not contain -3.
    """

    def included(rollout: Rollout, example: Example) -> float:
        wanted = folded("" if example[column] is None else example[column]).replace("−", "-")
        if not wanted:
            raise ConfigError(f"the column {column!r} is empty: contains needs a text to look for")
        before, after = NOT_INSIDE_NUMBER if wanted.lstrip("-")[:1].isdigit() else ("", "")
        text = folded(answer_of(rollout)).replace("−", "-")
        return float(re.search(rf"(?<!\w){before}{re.escape(wanted)}(?!\w){after}", text) is not None)

    return named(included, "contains")


def matches(pattern: str) -> Reward:
    """Make a reward: 1 if the regular expression matches somewhere in the answer, else 0."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"matches({pattern!r}) is not a regular expression: {error}") from None

    def matched(rollout: Rollout, example: Example) -> float:
        return float(compiled.search(answer_of(rollout)[:LONGEST_MATCHED]) is not None)

    return named(matched, "matches")


def same_number(column: str = "answer", *, tolerance: float = 0.0) -> Reward:
    """Make a reward: 1 if the last number of the answer equals the number in the example's column, else 0.

    If the column has a whole number, the part after a slash may also equal it: 10 in "Score 10/10".
    `tolerance`: largest difference that still counts, as a share of the right number.
    """
    between("same_number(tolerance=…)", tolerance, 0.0, 1.0)

    def equal(rollout: Rollout, example: Example) -> float:
        gold = last_number(str(example[column]))
        if gold is None:
            raise ConfigError(f"the column {column!r} contains no number: {str(example[column])[:60]!r}")
        answer = answer_of(rollout)
        readings = [last_number(answer)]
        if gold.denominator == 1:
            readings.append(last_number(answer, after_slash=True))
        return float(
            any(one is not None and abs(one - gold) <= Fraction(tolerance) * abs(gold) for one in readings)
        )

    return named(equal, "same_number")


def named(reward: Reward, name: str) -> Reward:
    """Return the reward under the name that it has in a list of rewards."""
    reward.__name__ = name
    return reward


def last_number(text: str, *, after_slash: bool = False) -> Fraction | None:
    """Return the last number in a text: "so 1,080 of them." -> 1080; of a fraction its value, or its end."""
    numbers = NUMBER.findall(text[-LONGEST_MATCHED:].replace("−", "-"))
    if not numbers:
        return None
    above, _, below = numbers[-1].replace(",", "").partition("/")
    if after_slash and below:
        return Fraction(below)
    return Fraction(above) / int(below or 1)


def folded(value: object) -> str:
    """Return a value as text without differences of case and white space."""
    return " ".join(str(value).split()).casefold()


CALL = "<tool_call>"


def without_thinking(text: str) -> str:
    """Return the text of a turn after its thinking."""
    return text.rpartition(END_THINK)[2].strip()


def answer_of(rollout: Rollout) -> str:
    """Return the answer: the last turn without its thinking, or "" if the turn calls a tool."""
    answer = without_thinking(rollout.text)
    return "" if CALL in answer or (rollout.turns and rollout.turns[-1].calls) else answer


def searches(rollout: Rollout) -> list[tuple[str, ...]]:
    """Return the names of the results of each successful call, best first."""
    return [call.found for call in rollout.calls if call.error is None]


def reciprocal_rank(results: Sequence[Sequence[str]], gold: Collection[str]) -> float:
    """Return 1 / rank of the first gold name, in the search that ranks it highest; 0 if none has it.

    Example: results (a, b) and (b, c), gold {b} -> 1.0, since the second search ranks it first.
    """
    ranks = [names.index(name) + 1 for names in results for name in gold if name in names]
    return 1 / min(ranks) if ranks else 0.0


def mrr(*, needed: Callable[[Example], Sequence[Collection[str]]]) -> Reward:
    """Make a reward: the mean reciprocal rank of the documents that a question needs.

    `needed` returns for each hop the acceptable documents; any one of them suffices.
    """

    def mean_reciprocal_rank(rollout: Rollout, example: Example) -> float:
        hops, results = needed(example), searches(rollout)
        return sum(reciprocal_rank(results, gold) for gold in hops) / len(hops)

    return mean_reciprocal_rank


def recall(*, needed: Callable[[Example], Sequence[Collection[str]]], at: int) -> Reward:
    """Make a reward: the share of hops with a needed document among the first `at` results of any search."""

    def recall_at(rollout: Rollout, example: Example) -> float:
        hops, results = needed(example), [names[:at] for names in searches(rollout)]
        return sum(any(name in names for names in results for name in gold) for gold in hops) / len(hops)

    return recall_at


def thinks_every_turn(rollout: Rollout, example: Example) -> float:
    """Return the share of turns that contain thinking; 0 for a rollout without tool calls."""
    if not rollout.calls:
        return 0.0
    return sum(END_THINK in turn.text for turn in rollout.turns) / len(rollout.turns)


def searches_once(rollout: Rollout, example: Example) -> float:
    """Return 1 for exactly one call, halved for each further call; 0 if no call succeeded."""
    calls = rollout.calls
    if not any(call.error is None for call in calls):
        return 0.0
    return 0.5 ** (len(calls) - 1)


def cites_well(rollout: Rollout, example: Example) -> float | None:
    """Return the share of the answer's [citations] that a search returned; None if there are none."""
    seen = {name for names in searches(rollout) for name in names}
    cited = [part.partition("]")[0].strip() for part in answer_of(rollout).split("[")[1:] if "]" in part]
    return sum(name in seen for name in cited) / len(cited) if cited else None


FENCE = "```"
PYTHON = ("", "python", "py", "python3")
LONGEST_CODE = 100_000
"""Number of characters of an answer in which code is looked for."""
REPORTS = 8192
"""Number of answers whose test results are cached."""
ANY_NAME = """
def __getattr__(name):
    def unanswered(*arguments, **named):
        raise NotImplementedError
    return unanswered
"""
"""Code that has a function of any name: it shows which tests call the code, whatever an answer is."""


def code_blocks(text: str) -> list[str]:
    """Return the closed blocks of Python code after the thinking; other languages do not count."""
    blocks: list[str] = []
    lines: list[str] | None = None
    language = ""
    for line in without_thinking(text)[:LONGEST_CODE].splitlines():
        if lines is None and line.startswith(FENCE):
            language, lines = line.strip("` \t").lower(), []
        elif lines is not None and line.rstrip() == FENCE:
            blocks += ["\n".join(lines)] if language in PYTHON else []
            lines = None
        elif lines is not None:
            lines.append(line)
    return blocks


def answered_code(text: str, *, defines: str | None = None) -> str | None:
    """Return the last block of code that defines a function of this name, else the last block."""
    blocks = code_blocks(text)
    defining = [code for code in blocks if defines and f"def {defines}(" in code]
    return next(reversed(defining or blocks), None)


class UnitTests:
    """Runs the code of an answer with an example's tests in the sandbox, and caches the results.

    Tests that do not call the code are left out: any code would pass them.
    """

    waits = True  # calls run in threads: each waits for a process

    def __init__(
        self, *, columns: tuple[str, str, str], partial: bool, seconds: float, memory_mb: int
    ) -> None:
        self.tests, self.setup, self.entry_point = columns
        self.partial, self.seconds, self.memory_mb = partial, seconds, memory_mb

    @property
    def at_once(self) -> int:
        """Calls at a time: further ones would only wait."""
        return sandbox.workers

    def __call__(self, rollout: Rollout, example: Example) -> float:
        report = self.report(rollout.text, example)
        if report is None:
            return 0.0
        return report.share if self.partial else float(report.share == 1)

    def report(self, text: str, example: Example) -> CodeReport | None:
        """Return the outcome of each test; None if the answer contains no code."""
        entry_point = example.get(self.entry_point)
        tests = [example[self.tests]] if isinstance(example[self.tests], str) else list(example[self.tests])
        if not entry_point and not all(isinstance(test, str) for test in tests):
            raise ConfigError(f"tests with args require the column {self.entry_point!r}, the function's name")
        job = {
            "code": ANY_NAME,
            "tests": tests,
            "setup": example.get(self.setup) or "",
            "entry_point": entry_point,
            "seconds": self.seconds,
            "memory": self.memory_mb << 20,
        }
        code = answered_code(text, defines=entry_point)
        try:
            unused = [failure == UNUSED for failure in cached_report(job).failures]
            if all(unused):
                raise ConfigError(
                    "no test calls the answer's code: write assertions, test_… functions, or "
                    f"check(candidate) with the column {self.entry_point!r}; got {tests[0]!r:.80}"
                )
            used = [test for test, left_out in zip(tests, unused, strict=True) if not left_out]
            return None if code is None else cached_report({**job, "code": code, "tests": used})
        except SandboxError as error:
            raise RolloutError(str(error)) from error


def unit_tests(
    tests: str = "tests",
    *,
    setup: str = "setup",
    entry_point: str = "entry_point",
    partial: bool = True,
    seconds: float = 2.0,
    memory_mb: int = 512,
) -> UnitTests:
    """Make a reward: the share of unit tests that the answer's Python code passes, in a sandbox.

    tests: column with the tests: code that fails by an exception, such as "assert add(1, 2) == 3", or
        {"args": [1, 2], "expected": 3} for calls of the entry point
    setup: column with code that runs before, if there is one
    entry_point: column with the name of the function under test, if there is one
    partial: False pays 1 only if every test passes
    seconds, memory_mb: limits of all tests of an answer; keep `seconds` below task.reward_seconds
    """
    between("seconds", seconds, 0.01)
    between("memory_mb", memory_mb, 64)
    return UnitTests(
        columns=(tests, setup, entry_point), partial=partial, seconds=seconds, memory_mb=memory_mb
    )


sandbox = Sandbox()
atexit.register(sandbox.close)
reports: OrderedDict[str, Future[CodeReport]] = OrderedDict()
reports_lock = threading.Lock()


def cached_report(job: dict[str, Any]) -> CodeReport:
    """Run a job in the sandbox, unless it ran before or runs now in another thread."""
    try:
        name = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
    except (TypeError, ValueError) as error:
        raise RolloutError(f"tests must be code or plain JSON data: {error}") from error
    with reports_lock:
        known = name in reports
        future = reports.setdefault(name, Future())
        reports.move_to_end(name)
        while len(reports) > REPORTS:
            reports.popitem(last=False)
    if not known:
        try:
            future.set_result(sandbox.run(**job))
        except BaseException as error:
            with reports_lock:
                reports.pop(name, None)
            future.set_exception(error)
    return future.result()
