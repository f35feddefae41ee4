"""``python -m attnpatch``: the command line."""

import sys

from attnpatch.cli import main

sys.exit(main())
