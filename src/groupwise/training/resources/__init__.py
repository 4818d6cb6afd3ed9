"""What a run needs, estimated before anything loads, and what it gets.

Modules: `model_shape` (a model's shape from its config), `run_estimate` (memory and time of a step),
`cpu_contention` (other processes on the same cores).
"""
