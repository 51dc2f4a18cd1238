"""`python -m datakit` is the `datakit` command."""

import sys

from datakit.cli import main

sys.exit(main())
