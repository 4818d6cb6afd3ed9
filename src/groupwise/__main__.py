"""The `groupwise` command, also `python -m groupwise`."""

import gc
import sys


def main() -> int:
    gc.disable()  # nothing imported becomes garbage; collections would take a sixth of the time of --help
    from groupwise.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
