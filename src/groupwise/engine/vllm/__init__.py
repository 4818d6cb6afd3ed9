"""Generation by vLLM servers that hold a copy of the policy.

Modules in reading order:

    vllm_engine  prompts to servers, completions back, new weights after every update
    vllm_client  HTTP with bounded retries, and the check that a server's weights are the trainer's
"""
