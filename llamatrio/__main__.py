"""`python -m llamatrio`."""

import sys

from llamatrio.cli import main

sys.exit(main())
