"""What torchdata's StatefulDataLoader saves: which geometry a state was made under, and the place that it is at.

Worker w of W makes micro-batches w, w + W, w + 2W, ... of a stream. Its state is the sample at which its next round
begins: with W = 2 and 4 samples a micro-batch, the states after 5 micro-batches are 24 and 16. The place is sample 20,
which both states and the number of workers say together, and no worker's state says alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from datakit.order.arguments import whole_number
from threefold.errors import UserError

KEY = "geometry"
ONE_PROCESS, SNAPSHOT = "_num_yielded", "_snapshot"  # what a state of torchdata has without workers, and with them
WAY_OUT = "dataset.load_state_dict(SAVED) with the whole state of the loader goes on exactly; do not load it there too"


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a dataset is read: rows of a micro-batch, ranks, and which of how many workers; 0 if none reads."""

    micro_batch_size: int
    dp_size: int
    num_workers: int = 0
    worker: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether other workers read the same stream, so that the state of one is not the place."""
        return self.num_workers > 1

    @property
    def global_batch_size(self) -> int:
        """Samples of a micro-batch of all ranks."""
        return self.micro_batch_size * self.dp_size

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Geometry | None":
        """Return the geometry of a state; None of a batch's cursor, and of a state of an older version."""
        if KEY not in state:
            return None
        try:
            return cls(**{name: whole_number(name, value) for name, value in state[KEY].items()})
        except (AttributeError, TypeError, UserError):
            raise UserError(f"{state[KEY]!r} is not a geometry of a StreamDataset's state") from None

    def to_json(self) -> dict[str, int]:
        """Return a JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        return f"micro_batch_size={self.micro_batch_size}, dp_size={self.dp_size}, num_workers={self.num_workers}"


def parts_of(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the states of a dataset, by worker, in the state of a StatefulDataLoader; none if it is another state."""
    if ONE_PROCESS in state:
        parts: list[Any] = [state.get("dataset_state")]
    elif SNAPSHOT in state:
        workers = state[SNAPSHOT]["_worker_snapshots"]
        parts = [workers[f"worker_{number}"]["dataset_state"] for number in range(len(workers))]
    else:
        return []
    if not all(isinstance(part, Mapping) for part in parts):
        raise UserError("this state of a StatefulDataLoader is not of a StreamDataset", hint='take batch["cursor"]')
    return parts


def place_of(state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> int:
    """Return the sample at which the state of a StatefulDataLoader goes on; UserError if none is exact.

    The workers whose next round begins later are the first ones: of 24, 24, 12 with 3 workers and 4 samples a
    micro-batch, the place is 12 + 2 * 4. Batches that came after the snapshot are counted on.
    """
    begins = [int(part["num_samples"]) for part in parts]
    if SNAPSHOT not in state:
        return begins[0]
    first, num_ahead = min(begins), sum(begin > min(begins) for begin in begins)
    round_samples = max(begins) - first
    is_in_order = begins == [first + round_samples] * num_ahead + [first] * (len(begins) - num_ahead)
    is_last = int(state[SNAPSHOT]["_last_yielded_worker_id"]) == (num_ahead - 1) % len(begins)
    if not (is_in_order and is_last and round_samples % len(begins) == 0):
        raise UserError(
            f"the workers of this state were at samples {begins}: its batches did not come in the stream's order",
            hint="StatefulDataLoader(dataset, batch_size=None, num_workers=2), in_order=True as by default",
        )
    geometry, later = Geometry.of(parts[0]), int(state["_steps_since_snapshot"])
    samples = geometry.global_batch_size if geometry else round_samples // len(begins)
    if later and not samples:
        raise UserError(
            f"this state of an older version has {later} batches since its snapshot, and not how many samples they had",
            hint='load a batch["cursor"], or this state into a loader of the geometry that it was made under',
        )
    return first + num_ahead * (round_samples // len(begins)) + later * samples
