"""Run user code safely: rewards and tools of a task may hang, crash or exhaust memory.

Modules in reading order:

    time_limit  time limits for code that runs in this process
    worker      run functions in a worker process that can be killed
    sandbox     run untrusted Python with tests in processes that are cut off from the machine
    code_tests  the two sides of such a run: tests that call the code by value
"""
