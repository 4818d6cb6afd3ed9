"""`python -m groupwise` is the `groupwise` command."""

import sys

from groupwise.cli import main

sys.exit(main())
