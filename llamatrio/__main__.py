"""`python -m llamatrio`."""

import sys

from llamatrio.cli.main import main

sys.exit(main())
