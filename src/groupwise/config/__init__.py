"""Settings, declared once and read from YAML files, flags, `section.key=value` overrides and Python.

Modules in reading order:

    schema     what is learned: model, lora, task, rollout, tools, optim; `Config`, which joins all sections
    algorithm  advantages and the loss: algo
    runtime    the sections around it: engine, evaluate, sft, evolve, run, track
    coerce     YAML parsing, range checks, and conversion to the type that a setting declares
    loading    defaults < YAML file < flags < overrides; writes settings back with their documentation

To add a setting, add a field with a docstring to its section. A test checks that the setting is used.
"""

from groupwise.config.loading import FLAGS, config_from_keywords, differences, dump_config, read_config
from groupwise.config.schema import Config

__all__ = ["FLAGS", "Config", "config_from_keywords", "differences", "dump_config", "read_config"]
