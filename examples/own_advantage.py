"""An advantage of your own: better than the group's median, and more on the last turn."""

from statistics import median

import groupwise as gw


def above_median(rollouts: list[gw.Rollout]) -> list[list[float]]:
    middle = median(rollout.reward for rollout in rollouts)
    advantages = []
    for rollout in rollouts:
        better = rollout.reward - middle
        earlier = len(rollout.turn_lengths) - 1
        advantages.append([0.5 * better] * earlier + [better])  # one value per turn
    return advantages


if __name__ == "__main__":
    gw.train("countdown", advantage=above_median, max_steps=36)
