"""Generation on a GPU: a decoding step is one CUDA graph.

Modules in reading order:

    decode_loop        the host issues steps ahead and reads their results a few steps late
    graph_runner       captures and replays the graph for each number of rows
    fused_layers       a decoder layer as four matrix products and four small kernels
    decode_attention   the state of a step on the device, and attention over the paged cache
    attention_kernels  Triton kernels of that attention
    layer_kernels      Triton kernels between the matrix products
    sampling_kernels   Triton kernels that open and close a step
    kernel_launch      launching a kernel before the previous one has ended
"""
