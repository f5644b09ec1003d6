"""`python -m kbatch`: the command line."""

import sys

from kbatch.cli import main

sys.exit(main())
