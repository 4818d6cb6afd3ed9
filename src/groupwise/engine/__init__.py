"""Generation: continuous batching over a paged KV cache, with the policy's own weights.

Modules in reading order:

    engine           Engine: schedule → run → sample → collect, until every sequence has finished
    scheduler        which sequences run, and the KV blocks they hold: prompts shared, finished turns kept
    paged_attention  the KV cache tensors and decode attention over their blocks, on any device
    prefill          packed, chunked computation of prompts into the KV cache
    sampler          token sampling from per-sequence seeds, stop strings, prompt log-probabilities
    cpu_runner       the forward pass on a CPU, with projections that share an input as one matmul
    general_runner   the forward pass of models with their own attention and cache, on any device
    multi_lora       several LoRA adapters of one policy, and one engine for all of them
    cuda/            the decode step as one CUDA graph, with Triton kernels
    serving/         online serving: requests arrive at any time, each with its own sampling settings
    vllm/            generation on vLLM servers

Any object with `generate(requests, sampling)` can replace the engine: see `rollout.collect.Generate`.
"""
