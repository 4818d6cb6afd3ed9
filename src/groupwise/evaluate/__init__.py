"""Evaluation: held-out accuracy with confidence intervals, and test-time strategies.

Modules in reading order:

    held_out       answer held-out prompts greedily and by sampling, score the answers, store the results
    intervals      confidence intervals, paired differences, pass@k, majority votes
    target         resolve what to evaluate: a run, a checkpoint, an adapter or a model; the benchmarks
    contamination  exclude examples that the policy was trained on, in all runs that it comes from
    strategies     test-time strategies that spend more tokens on an answer
"""
