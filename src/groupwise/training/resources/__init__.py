"""What a run needs, estimated before anything loads.

Modules: `model_shape` (a model's shape from its config), `run_estimate` (memory and time of a step).
"""
