"""Run user code safely: rewards and tools of a task may hang, crash or exhaust memory.

Modules in reading order:

    time_limit  time limits for code that runs in this process
    worker      run functions in a worker process that can be killed
"""
