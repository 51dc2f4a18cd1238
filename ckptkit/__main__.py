"""`python -m ckptkit` is the `ckptkit` command."""

import sys

from ckptkit.cli import main

sys.exit(main())
