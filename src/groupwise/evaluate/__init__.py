"""Held-out accuracy and what it is worth.

Modules in reading order:

    held_out       greedy and sampled answers to held-out prompts, scored; reading and writing the results
    intervals      confidence intervals, paired differences, pass@k, majority votes
    contamination  which rows a run has trained on, so that it is not measured on them
    target         what a user may name: a run, a checkpoint, a model; the benchmarks
    strategies/    spending more tokens on an answer at test time
"""
