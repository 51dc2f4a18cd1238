"""KeptCursor: the place of a training loop in its stream, for programs that save objects with a `state_dict`."""

from collections.abc import Mapping
from typing import Any

from datakit.data_loader.datasets import StreamDataset
from datakit.order.arguments import require
from datakit.order.stream_record import Cursor
from threefold.errors import UserError

HINT = 'kept.keep(batch) after each step of DataLoader(StreamDataset(...), batch_size=None): it needs batch["cursor"]'


class KeptCursor:
    """The cursor after the last micro-batch that was trained on, whatever a loader has read ahead of it.

        kept = KeptCursor(dataset)
        accelerator.register_for_checkpointing(kept)    # or Run.save(step, {"data": kept, ...})
        for batch in DataLoader(dataset, batch_size=None, num_workers=2):
            ...
            kept.keep(batch)

    Loaded before the iteration begins, it lets the dataset begin where training was. All ranks have the same state.
    """

    def __init__(self, dataset: StreamDataset) -> None:
        """Begin where the dataset begins."""
        self._dataset = require("dataset", dataset, StreamDataset, "KeptCursor(StreamDataset(blend, 4))")
        self._cursor: dict[str, Any] = dataset.cursor_after()

    def keep(self, batch: Any) -> None:
        """Keep the cursor of a micro-batch that was trained on; UserError unless it is the stream's next one."""
        cursor = batch.get("cursor") if isinstance(batch, Mapping) else None
        if cursor is None:
            raise UserError("a batch without its cursor", hint=HINT)
        begin, end = self._cursor["num_samples"], Cursor.from_json(cursor).num_samples
        if end != begin + self._dataset.global_batch_size:
            raise UserError(
                f"training was at sample {begin}, and this micro-batch of {self._dataset.global_batch_size} samples "
                f"ends at {end}: it is not the stream's next one",
                hint="kept.go_on() before each further iteration of the loader",
            )
        self._cursor = dict(cursor)

    def go_on(self) -> None:
        """Let the next iteration of the dataset begin at the kept cursor, not where the last one began."""
        self._dataset.load_state_dict(self._cursor)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor after the last micro-batch that was kept."""
        return dict(self._cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the dataset begin at a cursor; UserError if that is of another stream."""
        self._dataset.load_state_dict(state)
        self._cursor = self._dataset.cursor_after()
