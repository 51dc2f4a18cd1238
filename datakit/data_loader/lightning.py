"""LightningCursor: a run of Lightning goes on at the micro-batch after the last one that it trained on.

Lightning restarts a DataLoader at its beginning, and asks a StatefulDataLoader for its state when that has handed out
the next batch already, so that one would be passed over.
"""

from collections.abc import Mapping
from typing import Any

from datakit.data_loader.datasets import StreamDataset
from datakit.data_loader.kept_cursor import KeptCursor
from threefold.errors import UserError
from threefold.packages import needed_for

with needed_for("LightningCursor"):
    from lightning.pytorch.callbacks import Callback


class LightningCursor(Callback):  # type: ignore[misc]
    """A callback that keeps the cursor in Lightning's checkpoints: `Trainer(callbacks=[LightningCursor(dataset)])`.

    `trainer.fit(model, DataLoader(dataset, batch_size=None), ckpt_path=...)` then goes on exactly, under other rows,
    ranks and workers too. An epoch of `limit_train_batches` begins where the one before it ended.
    """

    def __init__(self, dataset: StreamDataset) -> None:
        """Take the dataset that is trained on, the one that the DataLoader has."""
        self._kept = KeptCursor(dataset)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise UserError if Lightning would go on from a state of the loader beside the cursor."""
        if hasattr(trainer.train_dataloader, "load_state_dict"):
            raise UserError(
                f"Lightning saves the state of a {type(trainer.train_dataloader).__name__} one micro-batch late",
                hint="trainer.fit(model, DataLoader(dataset, batch_size=None, num_workers=2)); the callback goes on",
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the cursor of the micro-batch that was trained on."""
        self._kept.keep(batch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the next epoch go on."""
        self._kept.go_on()

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning puts into its checkpoint."""
        return self._kept.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the dataset begin where the checkpoint was made."""
        self._kept.load_state_dict(state_dict)
