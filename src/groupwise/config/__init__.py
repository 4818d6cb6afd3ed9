"""Settings: declared once, read from YAML, flags, `section.key=value` and Python.

Modules in reading order:

    schema   the sections that decide what is learned: model, lora, task, rollout, algo, optim, tools, evolve
    runtime  the sections around it: engine, evaluate, sft, run, track
    coerce   YAML text and Python values → the type that a setting declares
    loading  defaults < YAML file < flags < overrides; writes settings back with their documentation

To add a setting, add a field with a docstring to its section. A test checks that some module reads it.
"""

from groupwise.config.loading import FLAGS, config_from_keywords, differences, dump_config, read_config
from groupwise.config.schema import Config

__all__ = ["FLAGS", "Config", "config_from_keywords", "differences", "dump_config", "read_config"]
