"""Generation on vLLM servers that hold a copy of the policy.

Modules in reading order:

    vllm_engine  sends prompts to servers, collects completions, and syncs weights after every update
    vllm_client  HTTP with bounded retries, and the check that a server has the trainer's weights
"""
