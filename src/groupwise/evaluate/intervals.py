"""What a measured accuracy is worth: intervals, pass@k and paired comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

Z = NormalDist().inv_cdf(0.975)
"""Half width of a 95 % interval, in standard errors: 1.96."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A share with its 95 % confidence interval, all between 0 and 1."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True, slots=True)
class Difference:
    """How much better the same prompts are answered after than before."""

    mean: float
    low: float
    high: float
    improved: int
    """Prompts answered better after."""
    worsened: int
    p_value: float
    """Of a split this uneven if every prompt were as likely to improve as to worsen."""

    def __str__(self) -> str:
        points = (100 * value for value in (self.mean, self.low, self.high))
        return "{:+.1f} points [{:+.1f}, {:+.1f}]".format(*points)


def wilson(successes: float, trials: float) -> Interval:
    """The Wilson score interval of a proportion.

    Unlike mean ± 1.96 standard errors it stays inside 0 and 1, and is not empty at 0 of n or n of n
    (Brown, Cai & DasGupta 2001). A fractional number of trials is an effective sample size.
    """
    if trials <= 0 or not 0 <= successes <= trials:
        raise ValueError(f"needs 0 <= successes <= trials and a trial, got {successes} of {trials}")
    mean = successes / trials
    shrink = 1 + Z**2 / trials
    centre = (mean + Z**2 / (2 * trials)) / shrink
    half = Z / shrink * math.sqrt(mean * (1 - mean) / trials + Z**2 / (4 * trials**2))
    return Interval(mean, max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(values: Sequence[float]) -> Interval:
    """The interval of a mean of per-prompt scores between 0 and 1, such as avg@k or pass@k.

    The prompt is the unit: k answers to one prompt succeed or fail together, so counting them as k
    trials would make the interval too narrow. The spread between prompts says how many independent
    trials the answers are worth, n = p (1 - p) / var(mean), and the Wilson interval is taken at that
    effective size (Franco et al. 2019). Few prompts show too little of the spread, so the variance counts
    two further prompts, each as far from the mean as the furthest, and Student's quantile replaces the
    normal one. Scores of 0 and 1 are counted exactly, and scores that do not vary at all tell nothing
    about spread: in both cases each prompt is one trial. benchmarks/coverage.py measures the coverage.
    """
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError("needs at least one score, each between 0 and 1")
    count, mean = len(values), fmean(values)
    if all(value in (0, 1) for value in values) or min(values) == max(values):
        return wilson(mean * count, count)
    deviations = [abs(value - mean) for value in values]
    squares = math.fsum(deviation**2 for deviation in deviations) + 2 * max(deviations) ** 2
    variance_of_mean = squares / (count + 2) ** 2
    trials = mean * (1 - mean) / variance_of_mean * (Z / student_quantile(count - 1)) ** 2
    return wilson(mean * trials, trials)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k answers drawn from n, of which c are correct, hold a correct one.

    Unbiased, unlike 1 - (1 - c/n)^k (Chen et al., arXiv 2107.03374).
    """
    if not 0 <= c <= n or not 0 < k <= n:
        raise ValueError(f"needs 0 <= c <= n and 0 < k <= n, got n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Difference:
    """Compare two scores of each prompt: an interval of the mean difference, and a sign test.

    The interval is that of Bonett & Price (2012), with Student's quantile: it counts two further prompts,
    one that improved and one that worsened, each by the largest change seen. Without them ten of ten
    improved prompts, which do not vary, would leave an interval of no width. Where no prompt changed, the
    two change by the whole range of the scores.

    On scores of 0 and 1 the sign test is McNemar's exact test; on averages it assumes nothing about
    how the differences are distributed.
    """
    differences = [later - earlier for earlier, later in zip(before, after, strict=True)]
    if len(differences) < 2:
        raise ValueError("a paired difference needs at least two prompts")
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
    """The two-sided p-value of a split under fair coin flips, by exact counting."""
    flips = improved + worsened
    tail = sum(math.comb(flips, heads) for heads in range(min(improved, worsened) + 1))
    return min(1.0, 2 * tail / (1 << flips))


def student_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, by its expansion around the normal (Abramowitz & Stegun 26.7.5)."""
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
    """Return who states each different answer, by index, the most stated first; no answer is no vote.

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
    return sorted(votes, key=len, reverse=True)  # stable: of equally many, the one stated first


def majority(answers: Sequence[str | None], alike: Alike) -> int | None:
    """Return the first index that states the most frequent answer; None when nobody states one."""
    votes = ballots(answers, alike)
    return votes[0][0] if votes else None
