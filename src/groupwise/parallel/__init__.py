"""Distributed runs: several processes train one policy.

One module, `processes`: the process group as torchrun or accelerate launched it, its collectives, and how an
update is divided: load balancing, sharding of a policy, the gradient all-reduce.
"""
