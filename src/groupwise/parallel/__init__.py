"""Distributed runs: several processes train one policy.

Modules in reading order:

    processes     the process group, as torchrun or accelerate launched it, and its collectives
    work_sharing  load balancing of an update, sharding of a policy, and the gradient all-reduce
"""
