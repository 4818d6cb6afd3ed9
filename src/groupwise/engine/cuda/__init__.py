"""Generation on a GPU: each decode step is one CUDA graph.

Modules in reading order:

    decode_loop        issues steps ahead of the device and reads their results a few steps late
    graph_runner       captures and replays one CUDA graph per batch size and sampling settings
    fused_layers       a decoder layer as four matrix products and four small kernels
    graph_weights      what these layers read: weights and cache in FP8, or adapters of several members
    decode_attention   the device state of a decode step, and attention over the paged cache
    attention_kernels  Triton kernels for that attention; programmatic dependent launch
    sampling_kernels   Triton kernels that gather a step's inputs and sample its tokens
    speculation        drafts from what followed the same context before, checked several in one step
"""
