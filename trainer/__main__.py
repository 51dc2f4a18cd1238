"""`python -m trainer` is the `trainer` command."""

import sys

from threefold.child_python import forget_current_folder

forget_current_folder()

from threefold.packages import start  # noqa: E402  # only now, as it imports the standard library

sys.exit(start("trainer"))
