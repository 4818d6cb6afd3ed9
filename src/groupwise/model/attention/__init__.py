"""Attention for training and prefill, and the check that a model accepts it.

Modules in reading order:

    hf_interface       the hook into transformers: a `layout` argument says what attention means
    packed             attention of a training row, each group's prompt computed once
    segment_attention  attention over segments of a row, in parts that merge exactly by their log-sum-exp
    ulysses            one row over several processes (sequence parallelism)
    compatibility      does a model with our attention compute the same function? Compared in float32
"""
