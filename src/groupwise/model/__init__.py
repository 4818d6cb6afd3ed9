"""The policy: a Hugging Face causal language model, used unmodified for training and generation.

Modules in reading order:

    load          from a name to a policy, with or without adapters
    policy        Policy: what engine and learner need of a model
    resolve       which folder a name means; writing a model's folder safely
    tokenizer     text ⇄ tokens, chat templates, tools in a template
    device        devices, free memory, pinned transfers
    attention/    our attention behind transformers' AttentionInterface
    ops/          fused operations, log-probabilities, gradient checkpointing
    adapters/     LoRA, merging, quantization
    distributed/  FSDP2 and DeepSpeed ZeRO
"""
