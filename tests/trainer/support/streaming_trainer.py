"""`python -m tests.trainer.support.streaming_trainer` is the `trainer` command, with `--optimizer-offload` on CPUs too.

Copies are made as late as what follows allows, so a save that did not wait for them would miss some.
"""

import sys
from typing import Any

from trainer import engine
from trainer.cli import main
from trainer.config import Config
from trainer.store.window import Streaming
from trainer.verify.late_lanes import streaming_on_cpu


def streaming_of(config: Config, mesh: Any, *, with_optimizer: bool) -> Streaming | None:
    """Return how a run on CPUs streams."""
    if not (config.optim.offload and with_optimizer):
        return None
    print("streams", flush=True)
    return streaming_on_cpu()


if __name__ == "__main__":
    engine.streaming_of = streaming_of
    sys.exit(main(sys.argv[1:]))
