"""Run the command line: `python -m kbatch`."""

import sys

from kbatch.cli.main import main

sys.exit(main())
