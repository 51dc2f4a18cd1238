"""No loss of power, at any moment of a program, takes back what it had promised."""

import os
from collections.abc import Iterable

import pytest

from tests.power_loss.exploring import Recorded, recorded
from tests.power_loss.programs import PROGRAMS
from tests.power_loss.unseen import RACES, UNSEEN
from tests.support.strace import needs_strace
from tools.power_loss.states import MODELS

NUM_RANDOM = int(os.environ.get("POWER_LOSS_STATES", "3"))  # of each moment, besides those with one change lost or kept
QUICK = "save", "store"
LARGE = (*(name for name in PROGRAMS if "shards" in name or name.startswith("prune of ")), "retention", *RACES)
LONG = "eight writers", "preprocess", "tiers", *LARGE


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """When a program is tried: always, in CI, or only with all tests."""
    return () if name in QUICK else (pytest.mark.slow, *([] if name in LONG else [pytest.mark.ci]))


@needs_strace
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in PROGRAMS])
def test_every_state_keeps_what_was_promised(name: str) -> None:
    with recorded(name) as program:
        assert program.recording.promises
        for model in MODELS:
            tally = program.explore(model, num_random=NUM_RANDOM)
            assert tally.faults == {}, model
            assert tally.num_trees > 2 or model == "hosts"


@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(1200)  # each of the uses that cost nothing is looked for in every state
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in LARGE])
def test_a_use_of_fsync_that_is_left_out_is_found(name: str) -> None:
    with recorded(name) as program:
        uses = sorted({sync.use for sync in program.recording.syncs})
        assert unfound(program, uses) == UNSEEN.get(name, {}).keys()


def unfound(program: Recorded, uses: Iterable[str]) -> set[str]:
    """Return the uses of fsync without which every state keeps what was promised."""
    return {use for use in uses if not program.explore("weakest", without=use, stops_at_fault=True).faults}
