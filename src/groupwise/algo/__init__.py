"""From rewards to a loss: pure functions of numbers and tensors. They know no model, settings file or logger.

Modules in reading order:

    reward_combination  several rewards of one rollout → one number
    advantages          rewards of a group → one advantage per rollout
    samples             rollouts with advantages → token sequences to train on
    losses              advantages and log-probabilities → (sum of the loss, metrics); the KL penalty
    surrogates          losses other than the clipped ratio, and those of the user

To add an advantage, write a function and enter it in `advantages.ADVANTAGES` and `config.algorithm`. To add a
loss, write it in `surrogates` and enter it in `losses.SURROGATES`, `losses.MEAN_OVER` and `config.algorithm`.
docs/algorithms.md has every formula.
"""
