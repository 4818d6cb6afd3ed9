"""Fused decoder operations: fewer passes over memory than autograd's.

Modules in reading order:

    equivalence     checks in float32 that a fused operation matches the original module
    rotary          attention with rotary embeddings
    fused_modules   RMSNorm and the SwiGLU block
    lora_linear     linear layers with and without LoRA
    checkpointing   gradient checkpointing
    logits          logits in float32; temperature, top-k, top-p and min-p
    logprobs        log-probabilities and entropies without [tokens × vocabulary] in memory
    triton_kernels  the Triton kernels of these operations

To add an operation, check it with `equivalence.computes_the_same` and call it in `model.load.use_fused_ops`.
"""
