"""The policy: a Hugging Face causal language model, used unmodified for training and generation.

Modules in reading order:

    load          loads a policy by model name, with or without LoRA
    policy        Policy: the model interface of engine and learner
    general_forward  the general path: own attention and cache, each answer a row of its own
    resolve       finds or downloads a model's folder, validates it, and writes new ones atomically
    tokenizer     encoding and decoding, chat templates, tool calls in a template
    grammar       constrained decoding: JSON schemas and grammars that completions must match
    token_grammar the tokens that a grammar allows next, as masks that answers share
    device        device selection, free memory, pinned transfers, contention for cores
    sharding      a policy sharded over processes: FSDP2 and DeepSpeed ZeRO
    attention/    packed attention behind transformers' AttentionInterface
    ops/          fused operations, log-probabilities, gradient checkpointing
    adapters/     LoRA, merging, quantization
"""
