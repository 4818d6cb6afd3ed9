"""Generation: continuous batching over a paged KV cache, with the policy's own weights.

Modules in reading order:

    engine           Engine: schedule → run → sample → collect, until every sequence has finished
    scheduler        which sequences run: admission, growth, preemption, release
    kv_cache         the blocks of the cache and who uses them
    paged_attention  attention of a decoding step over the blocks, on any device
    prefill          prompts into the cache, packed
    sampler          token draws with derived noise, stop strings, log-probabilities of prompts
    stacked_weights  weights that share an input stacked into one product, adapters merged or side by side
    cpu_runner       the forward pass on a CPU
    multi_lora       one engine for all members of a population
    cuda/            the same step as one CUDA graph, with Triton kernels
    serving/         requests that come one by one, each with its own settings
    vllm/            generation by vLLM servers

Anything with `generate(requests, sampling)` can take the engine's place: see `rollout.collect.Generate`.
"""
