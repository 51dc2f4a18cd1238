"""Datasets for PyTorch's DataLoader, and what keeps their place through the trainers of others.

    DataLoader(StreamDataset(blend, micro_batch_size=4), batch_size=None, num_workers=2)

This file and the folder `data_loader` alone of datakit name torch; `import datakit` leaves them out. LightningCursor
and HfTrainerCursor are for those trainers, and imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from threefold.packages import needed_for

with needed_for("datakit.torch"):
    from datakit.data_loader.datasets import MapDataset, StreamDataset
    from datakit.data_loader.kept_cursor import KeptCursor

if TYPE_CHECKING:
    from datakit.data_loader.hf_trainer import HfTrainerCursor
    from datakit.data_loader.lightning import LightningCursor

LAZY = {"HfTrainerCursor": "hf_trainer", "LightningCursor": "lightning"}
__all__ = ["HfTrainerCursor", "KeptCursor", "LightningCursor", "MapDataset", "StreamDataset"]


def __getattr__(name: str) -> object:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"datakit.data_loader.{LAZY[name]}"), name)
