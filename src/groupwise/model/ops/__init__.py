"""Operations of a decoder, in fewer passes over memory than autograd makes.

Modules in reading order:

    equivalence     does a fast operation compute what the original module computes? Checked in float32
    rmsnorm         RMSNorm
    rotary          rotary attention
    swiglu          the gated SiLU block
    lora_linear     linear layers with and without LoRA
    checkpointing   gradient checkpointing
    logits          logits in float32; temperature, top-k, top-p and min-p
    logprobs        log-probabilities and entropies without [tokens × vocabulary] in memory
    triton_kernels  the Triton kernels of these operations

To add an operation, write it beside a check by `equivalence.computes_the_same`, and call it in
`model.load.use_fused_ops`.
"""
