"""The DataLoader around a dataset: what it would do to the stream's order or to its items is refused before it begins.

A dataset is not asked what reads it, and a worker knows its number alone. But what begins an iteration, or starts a
worker, has the loader at hand: it is looked for among the callers. Where none is found, nothing is refused.
"""

import sys
import warnings
from types import FrameType
from typing import Any

from threefold.errors import UserError
from threefold.packages import needed_for

with needed_for("datakit.torch"):
    from torch.utils.data import DataLoader, get_worker_info

LIBRARIES = ("torch.", "torchdata.")  # in whose frames a local "loader" is the one that begins
COLLATORS = ("default_collate", "default_data_collator")  # which put a dim before those of the items
OF_TRAINERS = "per_device_train_batch_size=1 and data_collator=lambda items: items[0]"
STATE_AHEAD = (
    "Lightning asks a loader for its state when that has handed out the next micro-batch already, so a resumed run "
    "passes one over: Trainer(callbacks=[LightningCursor(dataset)]) with DataLoader(dataset, batch_size=None) does not"
)
PREPARE = "accelerator.prepare(model, optimizer) without the loader: each process reads what its dp_rank has"


def check_loader(dataset: Any, dp_size: int) -> None:
    """Raise UserError if what reads a dataset would change its items or their order.

    Warn of a state that will be a micro-batch ahead of what was trained on.
    """
    frame: FrameType | None = sys._getframe(1)
    has_state = False
    while frame is not None:
        loader, outer = frame.f_locals.get("loader"), frame.f_locals.get("self")
        is_torchs = str(frame.f_globals.get("__name__")).startswith(LIBRARIES)
        if is_torchs and isinstance(loader, DataLoader) and loader.dataset is dataset:
            _check_items(loader)
            has_state = hasattr(loader, "load_state_dict")
        if has_state and _fetches_ahead(outer) and getattr(get_worker_info(), "id", 0) == 0:  # warned of once
            warnings.warn(STATE_AHEAD, stacklevel=2)
            has_state = False
        num_sharers = _num_sharers(outer, dataset)
        if num_sharers > 1 and dp_size > 1:
            raise UserError(
                f"accelerate shares the items of this dataset among {num_sharers} processes, "
                f"and it has one of {dp_size} shares alone: what the others read is lost",
                hint=PREPARE,
            )
        frame = frame.f_back


def _check_items(loader: Any) -> None:
    workers = loader.num_workers
    hint = f"{type(loader).__name__}(dataset, batch_size=None, num_workers={workers})"
    if workers > 1 and not getattr(loader, "in_order", True):
        raise UserError(
            f"with in_order=False and {workers} workers batches come in another order than the stream's, "
            "so that no cursor is exact",
            hint=hint,
        )
    if loader.batch_sampler is None:
        return
    collate = getattr(loader.collate_fn, "data_collator", loader.collate_fn)  # which the Trainer wraps
    if loader.batch_size != 1 or getattr(collate, "__name__", "") in COLLATORS:
        raise UserError(
            f"an item of this dataset is a whole micro-batch, and batch_size={loader.batch_size} would join items",
            hint=f"{hint}; of a Trainer {OF_TRAINERS}",
        )


def _fetches_ahead(outer: Any) -> bool:
    """Return whether an object is what Lightning has the next batch by before the last one is trained on."""
    return type(outer).__name__ == "_PrefetchDataFetcher" and outer.prefetch_batches > 0 and outer.length is None


def _num_sharers(outer: Any, dataset: Any) -> int:
    """Return among how many processes an object of accelerate shares a dataset's items; 1 if it is something else."""
    kind = type(outer).__name__
    if kind == "IterableDatasetShard" and outer.dataset is dataset:
        return int(outer.num_processes)
    if kind == "DataLoaderDispatcher" and "state" in vars(outer):  # it asks for a first state before it has its own
        return int(outer.state.num_processes)
    return 1
