"""A callback that stops the run when held-out accuracy reaches a target."""

from collections.abc import Mapping

import groupwise as gw


class StopAtTarget(gw.Callback):
    def __init__(self, target: float = 0.5) -> None:
        self.target = target

    def after_evaluation(self, run: gw.RunControl, scores: Mapping[str, float]) -> None:
        if scores["eval/greedy"] >= self.target:
            run.stop(f"accuracy {scores['eval/greedy']:.0%} at step {run.step}")


if __name__ == "__main__":
    gw.train("countdown", callbacks=[StopAtTarget(0.4)], max_steps=100)
