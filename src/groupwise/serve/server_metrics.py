"""Figures of the server for Prometheus: requests, tokens, load and latencies, in its text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
"""Upper bounds of the buckets of a latency."""


class LatencyHistogram:
    """Counts of latencies by bucket."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._total += seconds

    def samples(self, name: str) -> Iterator[str]:
        bounds = [*(f"{bound:g}" for bound in SECONDS), "+Inf"]
        for bound, count in zip(bounds, accumulate(self._counts), strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self._total:.6f}"
        yield f"{name}_count {sum(self._counts)}"


class ServerMetrics:
    """What the server has done since it started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """Requests by endpoint and status."""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.first_token = LatencyHistogram()
        self.duration = LatencyHistogram()

    def render(self, *, running: int, waiting: int) -> str:
        """Return all figures in Prometheus' text format."""
        requests = [
            f'{{endpoint="{endpoint}",status="{status}"}} {count}'
            for (endpoint, status), count in sorted(self.requests.items())
        ]
        lines = [
            *described("requests_total", "counter", "Requests by endpoint and HTTP status.", requests),
            *described("prompt_tokens_total", "counter", "Prompt tokens.", [f" {self.prompt_tokens}"]),
            *described(
                "generated_tokens_total", "counter", "Generated tokens.", [f" {self.generated_tokens}"]
            ),
            *described("completions_running", "gauge", "Completions that generate.", [f" {running}"]),
            *described("completions_waiting", "gauge", "Completions in the queue.", [f" {waiting}"]),
        ]
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Seconds from a request to its first token.", self.first_token),
            ("request_duration_seconds", "Seconds from a request to its last token.", self.duration),
        ):
            lines += described(name, "histogram", text, [])
            lines += histogram.samples(f"groupwise_{name}")
        return "\n".join(lines) + "\n"


def described(name: str, kind: str, text: str, samples: list[str]) -> list[str]:
    """Return a metric's samples, which lack the name, after its description."""
    name = f"groupwise_{name}"
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *(name + sample for sample in samples)]
