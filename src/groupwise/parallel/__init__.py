"""Several processes, one run.

Modules in reading order:

    processes     who takes part, as torchrun or accelerate started them
    work_sharing  who computes what of an update; dividing a policy; one gradient from all processes
"""
