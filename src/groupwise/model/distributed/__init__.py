"""Sharding of a policy over processes.

Modules: `fsdp` (PyTorch FSDP2) and `deepspeed_zero` (DeepSpeed ZeRO stages 1 to 3).
`parallel.processes.divide` applies one of them to a policy.
"""
