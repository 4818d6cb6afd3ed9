"""Rewards to gradients: pure functions, numbers in, `(sum, metrics)` out.

    rewards → advantages → samples → packing → corrections, kl, losses → metrics

Nothing here knows of settings files, models or loggers; docs/algorithms.md has every formula.
"""
