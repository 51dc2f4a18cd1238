"""The peak memory of a ckptkit command."""

import json
import subprocess
import sys
from typing import Any

from tests.support.checks import require

# A child's peak RSS begins at its parent's: it is the small process between that measures.
MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], check=False).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def ckptkit(*argv: str) -> tuple[dict[str, Any], int]:
    """The JSON that a verb prints, and its peak RSS in bytes."""
    command = [sys.executable, "-c", MEASURE, sys.executable, "-m", "ckptkit", *argv, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    require(done.returncode == 0, done.stderr)
    return json.loads(done.stdout), int(done.stderr.split()[-1]) * 1024
