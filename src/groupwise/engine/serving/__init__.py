"""The engine behind a server: requests join and leave while others are running.

Modules in reading order:

    serving_engine     jobs in, chunks of text out, in a thread of its own
    serving_scheduler  the scheduler for requests with settings of their own, and the steps on a CPU
    cuda_serving       the steps on a GPU, and short prompts as CUDA graphs
"""
