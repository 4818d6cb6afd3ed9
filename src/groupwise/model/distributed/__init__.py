"""A policy divided among processes.

Modules: `fsdp` (PyTorch FSDP2) and `deepspeed_zero` (DeepSpeed ZeRO 1 to 3). Function
`parallel.work_sharing.divide` applies one of them to a policy.
"""
