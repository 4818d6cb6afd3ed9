"""Statistics of accuracy: confidence intervals, pass@k, paired comparisons and majority votes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean

Z = NormalDist().inv_cdf(0.975)
"""Half-width of a 95 % interval in standard errors: 1.96."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A share with its 95 % confidence interval, all between 0 and 1."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    def brief(self) -> str:
        """Return the share without its interval."""
        return f"{100 * self.mean:.1f} %"

    def gain(self, since: float) -> str:
        """Return the difference from an earlier share."""
        return f"{100 * (self.mean - since):+.1f} points"


@dataclass(frozen=True, slots=True)
class MeanReward:
    """A mean reward on any scale, with its 95 % confidence interval and the spread of single answers."""

    mean: float
    low: float
    high: float
    std: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def brief(self) -> str:
        """Return the mean without its interval."""
        return f"{self.mean:.3f}"

    def gain(self, since: float) -> str:
        """Return the difference from an earlier mean."""
        return f"{self.mean - since:+.3f}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The paired difference of two evaluations on the same prompts."""

    mean: float
    low: float
    high: float
    improved: int
    """Number of prompts with a higher score after."""
    worsened: int
    p_value: float
    """Two-sided p-value of the sign test."""

    def __str__(self) -> str:
        points = (100 * value for value in (self.mean, self.low, self.high))
        return "{:+.1f} points [{:+.1f}, {:+.1f}]".format(*points)


def exact_interval(successes: int, trials: int) -> Interval:
    """Return Blaker's interval of a proportion (2000): it covers every accuracy at least 95 % of the time.

    It contains every accuracy p at which outcomes as extreme as the observed one have more than 5 %
    probability in total. Outcome y is as extreme as x if the smaller of P(X <= y) and P(X >= y) is no larger
    than that of x. Example: 8 of 10 -> [0.4444, 0.9632].
    """
    if trials <= 0 or not 0 <= successes <= trials:
        raise ValueError(f"requires 0 <= successes <= trials and trials > 0; got {successes} of {trials}")
    low = lowest_accuracy(successes, trials)
    high = 1 - lowest_accuracy(trials - successes, trials)
    return Interval(successes / trials, low, high)


@cache
def lowest_accuracy(successes: int, trials: int) -> float:
    """Return the lower end of Blaker's interval.

    Below it, the outcomes as extreme as x are those from x up and those up to some y, the largest with
    P(X <= y) <= P(X >= x). At the lower end of the Clopper-Pearson interval, P(X >= x) is 2.5 %. From there
    on, the total first exceeds 5 % where P(X <= y) + P(X >= x) does, or where y + 1 becomes as extreme.
    """
    if successes == 0:
        return 0.0

    def upper(accuracy: float) -> float:
        return at_most(trials - successes, trials, 1 - accuracy)

    start = first_above(lambda accuracy: upper(accuracy) - 0.025, 0.0, 1.0)
    extreme = successes - 1
    while extreme >= 0 and at_most(extreme, trials, start) > 0.025:
        extreme -= 1
    next_joins = first_above(
        lambda accuracy: upper(accuracy) - at_most(extreme + 1, trials, accuracy), start, 1.0
    )
    return first_above(
        lambda accuracy: upper(accuracy) + at_most(extreme, trials, accuracy) - 0.05, start, next_joins
    )


def at_most(most: int, trials: int, accuracy: float) -> float:
    """Return the probability of at most this many successes."""
    if accuracy <= 0 or accuracy >= 1:
        return float(most >= 0 and (accuracy <= 0 or most >= trials))
    odds = math.log(accuracy) - math.log1p(-accuracy)
    none = trials * math.log1p(-accuracy) + math.lgamma(trials + 1)
    total = 0.0
    for count in range(most, -1, -1):
        term = math.exp(none + count * odds - math.lgamma(count + 1) - math.lgamma(trials - count + 1))
        total += term
        if term < 1e-17 and count < trials * accuracy:
            break  # below the mode, all further terms are smaller
    return total


def first_above(function: Callable[[float], float], low: float, high: float) -> float:
    """Return by bisection where a function becomes positive between two points; `high` if it does not."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return high


def wilson(successes: float, trials: float) -> Interval:
    """Return the Wilson score interval of a proportion, for an effective number of trials.

    Unlike mean ± 1.96 standard errors it stays inside 0 and 1, and is not empty at 0 of n or n of n
    (Brown, Cai & DasGupta 2001).
    """
    if trials <= 0 or not 0 <= successes <= trials:
        raise ValueError(f"requires 0 <= successes <= trials and trials > 0; got {successes} of {trials}")
    mean = successes / trials
    shrink = 1 + Z**2 / trials
    centre = (mean + Z**2 / (2 * trials)) / shrink
    half = Z / shrink * math.sqrt(mean * (1 - mean) / trials + Z**2 / (4 * trials**2))
    return Interval(mean, max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the interval of a mean of per-prompt scores between 0 and 1, such as avg@k or pass@k.

    The prompt is the sampling unit: k answers to one prompt are correlated, so counting them as k trials
    would make the interval too narrow. The variance between prompts gives the effective number of trials,
    n = p (1 - p) / var(mean), at which the Wilson interval is taken (Franco et al. 2019). A few prompts
    underestimate the variance. It therefore counts two additional prompts, each as far from the mean as the
    furthest, and Student's quantile replaces the normal one. If all scores are 0 or 1, the interval is exact;
    if all are equal, each prompt is one trial. benchmarks/coverage.py measures the coverage.
    """
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError("requires at least one score, each between 0 and 1")
    count, mean = len(values), fmean(values)
    if all(value in (0, 1) for value in values):
        return exact_interval(round(sum(values)), count)
    if min(values) == max(values):
        return wilson(mean * count, count)
    deviations = [abs(value - mean) for value in values]
    squares = math.fsum(deviation**2 for deviation in deviations) + 2 * max(deviations) ** 2
    variance_of_mean = squares / (count + 2) ** 2
    trials = mean * (1 - mean) / variance_of_mean * (Z / student_quantile(count - 1)) ** 2
    return wilson(mean * trials, trials)


def reward_interval(values: Sequence[float], *, std: float) -> MeanReward:
    """Return the interval of a mean reward on any scale, with the prompt as the sampling unit.

    Rewards between 0 and 1 have the interval of `mean_interval`. Others have Student's interval. Like
    `mean_interval`, it counts two additional prompts, each as far from the mean as the furthest.
    """
    count, mean = len(values), fmean(values)
    if min(values) >= 0 and max(values) <= 1:
        share = mean_interval(values)
        return MeanReward(mean, share.low, share.high, std)
    deviations = [abs(value - mean) for value in values]
    squares = math.fsum(deviation**2 for deviation in deviations) + 2 * max(deviations) ** 2
    half = student_quantile(max(1, count - 1)) * math.sqrt(squares) / (count + 2)
    return MeanReward(mean, mean - half, mean + half, std)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k answers drawn from n, of which c are correct, contain a correct one.

    Unbiased, unlike 1 - (1 - c/n)^k (Chen et al., arXiv 2107.03374).
    """
    if not 0 <= c <= n or not 0 < k <= n:
        raise ValueError(f"requires 0 <= c <= n and 0 < k <= n; got n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Difference:
    """Compare two scores of each prompt: the interval of the mean difference, and a sign test.

    The interval is that of Bonett & Price (2012), with Student's quantile. It counts two additional prompts,
    one that improved and one that worsened, each by the largest observed change. Without them, ten improved
    prompts out of ten would give an interval of zero width. If no prompt changed, the two change by the whole
    range of the scores.

    For scores of 0 and 1 the sign test is McNemar's exact test. For averages it makes no assumption about
    the distribution of the differences.
    """
    differences = [later - earlier for earlier, later in zip(before, after, strict=True)]
    if len(differences) < 2:
        raise ValueError("a paired difference requires at least two prompts")
    count, mean = len(differences), fmean(differences)
    scores = (*before, *after)
    range_ = max(1.0, max(scores) - min(scores))
    largest = max(map(abs, differences)) or range_
    centre = math.fsum(differences) / (count + 2)
    squares = math.fsum(difference**2 for difference in differences) + 2 * largest**2
    variance = squares / (count + 2) - centre**2
    half = student_quantile(count - 1) * math.sqrt(variance / (count + 2))
    improved = sum(difference > 0 for difference in differences)
    worsened = sum(difference < 0 for difference in differences)
    return Difference(
        mean,
        max(centre - half, -range_),
        min(centre + half, range_),
        improved,
        worsened,
        sign_test(improved, worsened),
    )


def sign_test(improved: int, worsened: int) -> float:
    """Return the exact two-sided p-value of a split under fair coin flips."""
    flips = improved + worsened
    tail = sum(math.comb(flips, heads) for heads in range(min(improved, worsened) + 1))
    return min(1.0, 2 * tail / (1 << flips))


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t, by an expansion (Abramowitz & Stegun 26.7.5)."""
    if degrees <= 2:
        return (12.7062047, 4.3026527)[degrees - 1]  # too heavy-tailed for the expansion
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
    )
    return Z + sum(term / math.pow(degrees, power) for power, term in enumerate(terms, start=1))


Alike = Callable[[str, str], bool]


def ballots(answers: Sequence[str | None], alike: Alike) -> list[list[int]]:
    """Group the indices of equal answers, the most frequent first; None is not counted.

    Example: ["72", None, "70", "72.0"] -> [[0, 3], [2]]
    """
    votes: list[list[int]] = []
    for index, answer in enumerate(answers):
        if answer is None:
            continue
        for voters in votes:
            stated = answers[voters[0]]
            if stated is not None and alike(answer, stated):
                voters.append(index)
                break
        else:
            votes.append([index])
    return sorted(votes, key=len, reverse=True)  # stable: among ties, the first answer wins


def majority(answers: Sequence[str | None], alike: Alike) -> int | None:
    """Return the first index of the most frequent answer; None if there are no answers."""
    votes = ballots(answers, alike)
    return votes[0][0] if votes else None
