"""How much an answer shares with a right one: in words, in order, in meaning."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import fmean
from typing import Any

from groupwise.errors import ConfigError
from groupwise.records import Example, Rollout
from groupwise.rewards.extraction import END_THINK

Reward = Callable[[Rollout, Example], float]
Golds = Callable[[Example], Sequence[str]]
"""The right answers of an example, of which any will do."""
Embed = Callable[[Sequence[str]], Any]
"""Texts to vectors of length 1."""

WORD = re.compile(r"\w+")
LONGEST = 2000
"""Words of an answer that are compared."""
COMMON = 0.1
"""Share of the texts from which a word is common, and tells nothing."""
FEW = 20
"""Texts that a common word must be in: of a handful of texts, none is."""
HIGHEST_BASELINE = 0.95
CACHED = 1024
"""Examples whose right answers stay embedded."""


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())[:LONGEST]


def token_f1(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall of words, repeats counted.

    Example: "the red fox", "a red red fox" -> 2 shared, 2/3 and 2/4 -> 4/7
    """
    said, wanted = Counter(words(answer)), Counter(words(gold))
    return harmonic((said & wanted).total(), said.total(), wanted.total())


def rarity_of(texts: Sequence[str]) -> Callable[[str], float]:
    """Return how much each word tells: nothing where a tenth of the texts have it, more the rarer it is."""
    having = Counter(word for text in texts for word in set(words(text)))
    common = max(COMMON * len(texts), FEW)
    return lambda word: max(0.0, math.log(common / (having[word] or 1)))


def rare_word_f1(rarity: Callable[[str], float]) -> Callable[[str, str], float]:
    """Make a measure: token F1 in which a word counts by its rarity, and by the logarithm of its repeats.

    Common words alone share nothing with an answer, whatever the answer is.
    """

    def weighed(text: str) -> dict[str, float]:
        return {word: rarity(word) * (1 + math.log(count)) for word, count in Counter(words(text)).items()}

    wanted_of = lru_cache(CACHED)(weighed)  # a group's members are compared with the same texts

    def measure(answer: str, gold: str) -> float:
        if words(answer) == words(gold):
            return 1.0
        said, wanted = weighed(answer), wanted_of(gold)
        shared = sum(min(weight, wanted[word]) for word, weight in said.items() if word in wanted)
        return 2 * shared / (sum(said.values()) + sum(wanted.values())) if shared else 0.0

    return measure


def rouge_l(answer: str, gold: str) -> float:
    """Return the F1 of the longest common subsequence of words (Lin 2004).

    Example: "a b c", "a x c" -> 2 in order, 2/3 and 2/3 -> 2/3
    """
    said, wanted = words(answer), words(gold)
    return harmonic(in_order(said, wanted), len(said), len(wanted))


def in_order(said: Sequence[str], wanted: Sequence[str]) -> int:
    """Return the length of the longest common subsequence.

    A row of the usual table differs from its left neighbour by 0 or 1, so it is kept as the bits of one whole
    number (Hyyrö 2004): 0 where the row steps up.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(wanted):
        places[word] = places.get(word, 0) | 1 << place
    every = (1 << len(wanted)) - 1
    row = every
    for word in said:
        found = row & places.get(word, 0)
        row = ((row + found) | (row - found)) & every
    return len(wanted) - row.bit_count()


def harmonic(shared: int, said: int, wanted: int) -> float:
    return 2 * shared / (said + wanted) if shared else 0.0


def shares_words(*, golds: Golds, measure: Callable[[str, str], float] = token_f1) -> Reward:
    """Make a reward: the best overlap of the answer with a right one; a rollout without an answer gets 0."""

    def overlap(rollout: Rollout, example: Example) -> float:
        answer = last_word(rollout)
        return max((measure(answer, gold) for gold in golds(example)), default=0.0) if answer else 0.0

    return overlap


def similar(*, golds: Golds, embed: Embed, baseline: float) -> Reward:
    """Make a reward: the cosine of the answer and the closest right one, from 0 at `baseline` to 1.

    Unrelated texts of one field are far from orthogonal, with some embeddings nearly parallel: without the
    baseline (see `unrelated`) everything would be rewarded about the same.
    """
    floor = min(baseline, HIGHEST_BASELINE)
    vectors_of = lru_cache(CACHED)(embed)  # a group's members are compared with the same texts

    def closeness(rollout: Rollout, example: Example) -> float:
        answer = last_word(rollout)
        if not answer:
            return 0.0
        (said,) = embed([answer])
        cosine = max(float(said @ gold) for gold in vectors_of(tuple(golds(example))))
        return max(0.0, (cosine - floor) / (1 - floor))

    return closeness


def unrelated(texts: Sequence[str], embed: Embed) -> float:
    """Return the mean cosine of neighbouring texts, which are taken to have nothing to do with each other."""
    if len(texts) < 2:
        return 0.0
    vectors = embed(texts)
    return fmean(float(one @ other) for one, other in pairwise(vectors))


def length(*, at_most: int) -> Callable[[Rollout, Example], float]:
    """Make a reward that is 1 when `rollout.text` has at most this many characters, else 0."""
    if at_most < 1:
        raise ConfigError(f"length(at_most=…) must be at least 1 character; got {at_most!r}")

    def short_enough(rollout: Rollout, example: Example) -> float:
        return float(len(rollout.text) <= at_most)

    return short_enough


CALL = "<tool_call>"


def spoken(text: str) -> str:
    """Return what a turn says after its thinking."""
    return text.rpartition(END_THINK)[2].strip()


def last_word(rollout: Rollout) -> str:
    """Return the answer: what the last turn says, or nothing if it is one more call."""
    answer = spoken(rollout.text)
    return "" if CALL in answer or (rollout.turns and rollout.turns[-1].calls) else answer


def searches(rollout: Rollout) -> list[tuple[str, ...]]:
    """Return what each call found, best first; calls that failed found nothing."""
    return [call.found for call in rollout.calls if call.error is None]


def reciprocal_rank(found: Sequence[Sequence[str]], gold: Collection[str]) -> float:
    """Return 1 / rank of the first gold name, in the search where it stands highest; 0 without one.

    Example: found (a, b) and (b, c), gold {b} -> 1.0, since the second search has it first.
    """
    ranks = [names.index(name) + 1 for names in found for name in gold if name in names]
    return 1 / min(ranks) if ranks else 0.0


def mrr(*, needed: Callable[[Example], Sequence[Collection[str]]]) -> Reward:
    """Make a reward: the mean, over what a question needs, of how high its searches found it.

    `needed` gives for each hop the documents of which any will do.
    """

    def found_high(rollout: Rollout, example: Example) -> float:
        hops, found = needed(example), searches(rollout)
        return sum(reciprocal_rank(found, gold) for gold in hops) / len(hops)

    return found_high


def recall(*, needed: Callable[[Example], Sequence[Collection[str]]], at: int) -> Reward:
    """Make a reward: the share of what a question needs that is among the first `at` of some search."""

    def found_at_all(rollout: Rollout, example: Example) -> float:
        hops, found = needed(example), [names[:at] for names in searches(rollout)]
        return sum(any(name in names for names in found for name in gold) for gold in hops) / len(hops)

    return found_at_all


def thinks_every_turn(rollout: Rollout, example: Example) -> float:
    """The share of turns that think before they speak; 0 for a rollout that never called a tool."""
    if not rollout.calls:
        return 0.0
    return sum(END_THINK in turn.text for turn in rollout.turns) / len(rollout.turns)


def searches_once(rollout: Rollout, example: Example) -> float:
    """1 for one call that worked and no other, falling by half with each one more; 0 for none."""
    calls = rollout.calls
    if not any(call.error is None for call in calls):
        return 0.0
    return 0.5 ** (len(calls) - 1)


def cites_well(rollout: Rollout, example: Example) -> float | None:
    """The share of the answer's [names] that some search returned; None for an answer that cites nothing."""
    seen = {name for names in searches(rollout) for name in names}
    cited = [part.partition("]")[0].strip() for part in last_word(rollout).split("[")[1:] if "]" in part]
    return sum(name in seen for name in cited) / len(cited) if cited else None
