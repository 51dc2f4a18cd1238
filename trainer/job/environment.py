"""What torch and its OpenMP read of the environment when they are loaded; set before that, unless the user did."""

import os
import sys

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # its warnings are of each try to connect; what fails is one line of ours
# Threads that wait for each other in a loop take the processor from the one that they wait for: where others run beside
# on the same cores, a step takes several times as long.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}


def prepare_torch() -> bool:
    """Set the variables that are not set; return False if torch is loaded already, which would not see them."""
    if "torch" in sys.modules:
        return False
    for name, value in {**QUIET, **PASSIVE}.items():
        os.environ.setdefault(name, value)
    return True
