"""Replay: a graph of passes on a CPU, which has none. What would be launched is run again on the recorded tensors.

So it reads what a graph may read: a batch and a scale that were not copied there are those of the step before.
"""

from collections.abc import Callable

from trainer.engine import Engine
from trainer.pipeline.graph import Capture, PassGraph, Results


def run_again(run: Callable[[], Results]) -> Capture:
    """Stand in for a recording: its results have their places for good."""
    places = run()

    def launch() -> None:
        for place, result in zip(places, run(), strict=True):
            place.copy_(result)

    return Capture(launch, places)


def record_passes(engine: Engine) -> None:
    """Let an engine on a CPU run its passes as a graph would."""
    engine.graph = PassGraph(engine._passes, engine.store.expire, run_again)
