"""Attention for training and prefill, and the check that a model accepts it.

Modules in reading order:

    hf_interface       the hook into transformers: attention is defined by a `layout` argument
    packed             attention over a packed training row, with each group's prompt computed once
    segment_attention  attention over segments of a row; partial results merge exactly by log-sum-exp
    ulysses            sequence parallelism: one row over several processes
    compatibility      chooses a model's path: packed attention if it computes the same in float32, or its own
"""
