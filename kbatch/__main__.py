"""`python -m kbatch`: the command line."""

import sys

from kbatch.cli.main import main

sys.exit(main())
