"""Settings: declared once in `sections`, read from YAML, flags, the shell and Python by `read`."""

from groupwise.config.loading import FLAGS, config_from_keywords, differences, dump_config, read_config
from groupwise.config.schema import Config

__all__ = ["FLAGS", "Config", "config_from_keywords", "differences", "dump_config", "read_config"]
