"""Online serving: requests join and leave while others are running.

Modules in reading order:

    serving_engine     accepts jobs and delivers chunks of tokens, in a thread of its own
    serving_scheduler  schedules requests with per-request settings, and runs decode steps on a CPU
    cuda_serving       runs decode steps on a GPU, and short prompts as CUDA graphs
"""
