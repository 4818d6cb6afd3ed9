"""Settings: declared once in `sections`, read from YAML, flags, the shell and Python by `read`."""

from groupwise.config.flags import FLAGS
from groupwise.config.read import config_from_keywords, read_config
from groupwise.config.sections import Config
from groupwise.config.show import differences, dump_config

__all__ = ["FLAGS", "Config", "config_from_keywords", "differences", "dump_config", "read_config"]
