"""Faults of what is saved and restored: state that is left out, old or of another, and steps that go on otherwise."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from datakit import Loader
from trainer import engine
from trainer.checkpoint import load, mapping
from trainer.engine import Engine
from trainer.model.balance import Balance
from trainer.store.store import ParameterStore
from trainer.verify.faults.fault import ANOTHER_LAYOUT, DP, EXPERTS, RESHARD, RESUME, TP, Fault
from trainer.verify.faults.planting import Patch, Plant, together, wrapping

RESTORED = "was_restored"  # an attribute of stores that a restore has filled


def marked(real: Any, self: ParameterStore) -> None:
    """Note that a store was restored: only then is it published as a whole."""
    real(self)
    setattr(self, RESTORED, True)


def behind_a_resume(plant: Plant) -> Plant:
    """Plant something that asks `is_restored`."""
    return together(wrapping(ParameterStore, "publish", marked), plant)


def is_restored(store: ParameterStore) -> bool:
    """Return whether a store goes on from a saved step."""
    return hasattr(store, RESTORED)


def rate_off_by_one(patch: Patch) -> None:
    """Let a step behind a resume have the learning rate of the step before."""
    resumed = threading.local()

    def start_step(real: Any, self: Engine, *args: Any, **options: Any) -> Any:
        resumed.by = int(is_restored(self.store))
        return real(self, *args, **options)

    wrapping(Engine, "start_step", start_step)(patch)
    wrapping(engine, "learning_rate", lambda real, optim, step: real(optim, step - resumed.by))(patch)


def counted_again(real: Any, self: ParameterStore, optim: Any, lr: float, updates: int, **options: Any) -> None:
    """Let AdamW count its updates from the resume on."""
    real(self, optim, lr, updates - 2 if is_restored(self) else updates, **options)


def other_seed(real: Any, self: Engine, *args: Any, **options: Any) -> Any:
    """Drop by another seed behind a resume."""
    parts = real(self, *args, **options)
    if not is_restored(self.store):
        return parts
    return [replace(part, dropout=part.dropout and replace(part.dropout, seed=part.dropout.seed + 1)) for part in parts]


def from_the_first(real: Any, self: Loader, *args: Any) -> None:
    """Read from the first sample on, whatever was read before."""
    *shape, _, options = args
    real(self, *shape, None, options)


def a_step_back(real: Any, self: Loader, *args: Any) -> None:
    """Read the samples of a saved step once more."""
    *shape, start, options = args
    real(self, *shape, start, options)
    self.load_state_dict(self.state_at(0 if start is None else start.num_samples - self.global_batch_size))


def moments_swapped(real: Any, *args: Any, **options: Any) -> Any:
    """Restore each moment from the other."""
    names = {"optim.exp_avg": "optim.exp_avg_sq", "optim.exp_avg_sq": "optim.exp_avg"}
    pieces = []
    for piece in real(*args, **options):
        kind, slash, name = piece.name.partition("/")
        pieces.append(replace(piece, name=names.get(kind, kind) + slash + name))
    return pieces


def moments_of_same_layout(real: Any, store: ParameterStore, *args: Any, **options: Any) -> Any:
    """Leave moments out where one process restores what a layout saved."""
    pieces = real(store, *args, **options)
    is_alone = store.mesh.layout.world_size == 1
    return [piece for piece in pieces if not (is_alone and piece.name.startswith("optim.exp"))]


def moments_left_out(real: Any, *args: Any, **options: Any) -> Any:
    return real(*args, with_moments=False)


def before_the_update(patch: Patch) -> None:
    """Save what was there before the last update."""

    def update(real: Any, self: ParameterStore, *args: Any, **options: Any) -> None:
        self.join()
        old = [bucket.master.clone() for bucket in self.buckets]
        vars(self)["before_update"] = old
        real(self, *args, **options)

    def join_masters(real: Any, self: ParameterStore) -> None:
        real(self)
        for bucket, old in zip(self.buckets, vars(self).pop("before_update", ()), strict=False):
            bucket.master.copy_(old)

    wrapping(ParameterStore, "update", update)(patch)
    wrapping(ParameterStore, "join_masters", join_masters)(patch)


def all_but_the_last(real: Any, *args: Any, **options: Any) -> Iterator[Any]:
    return iter(list(real(*args, **options))[:-1])


def of_each_rank(real: Any, *args: Any, of_owned: bool = False, **options: Any) -> Iterator[Any]:
    pieces: Iterator[Any] = real(*args, **options)
    return pieces


BALANCED = EXPERTS | {"moe_balance": "bias", "moe_bias_rate": 0.1}

SAVE_FAULTS = (
    Fault(
        "piece-not-saved",
        "a rank does not save its last piece",
        DP,
        wrapping(mapping, "_pieces", all_but_the_last),
        check=RESHARD,
    ),
    Fault(
        "saved-by-each-rank",
        "each rank saves what all have",
        DP,
        wrapping(mapping, "_pieces", of_each_rank),
        zero_stage=0,
        check=RESHARD,
    ),
    Fault("saved-before-update", "a save has the weights before the update", DP, before_the_update, check=RESUME),
    Fault(
        "moments-left-out",
        "a resume leaves moments out",
        DP,
        wrapping(load, "restored_pieces", moments_left_out),
        check=RESUME,
    ),
    Fault(
        "moments-swapped",
        "a resume takes each moment for the other",
        DP,
        wrapping(load, "restored_pieces", moments_swapped),
        check=RESUME,
    ),
    Fault(
        "moments-not-resharded",
        "moments are left out where the layout is another",
        TP,
        wrapping(load, "restored_pieces", moments_of_same_layout),
        check=ANOTHER_LAYOUT,
    ),
    Fault(
        "reset-unsaid",
        "another optimizer begins at zero, and nobody is asked",
        None,
        wrapping(load, "refuse_reset", lambda real, *args, **options: None),
        check=RESUME,
    ),
    Fault(
        "restore-not-published",
        "ranks keep their own parameters of what others restored",
        DP,
        wrapping(ParameterStore, "publish", lambda real, self: None),
        check=RESUME,
    ),
    Fault(
        "biases-not-restored",
        "the biases of a router begin at zero behind a resume",
        DP,
        wrapping(Balance, "pieces", lambda real, self: []),
        model=BALANCED,
        check=RESUME,
    ),
    Fault(
        "rate-off-by-one-resumed",
        "the learning rate is off by one behind a resume",
        None,
        behind_a_resume(rate_off_by_one),
        check=RESUME,
    ),
    Fault(
        "count-from-resume",
        "AdamW counts its updates from the resume on",
        None,
        behind_a_resume(wrapping(ParameterStore, "update", counted_again)),
        check=RESUME,
    ),
    Fault(
        "seed-after-resume",
        "dropout has another seed behind a resume",
        None,
        behind_a_resume(wrapping(Engine, "_microbatches", other_seed)),
        check=RESUME,
    ),
    Fault(
        "samples-from-the-first",
        "a resume reads from the first sample on",
        DP,
        wrapping(Loader, "__init__", from_the_first),
        check=RESUME,
    ),
    Fault(
        "samples-repeated",
        "a resume reads the samples of the saved step once more",
        DP,
        wrapping(Loader, "__init__", a_step_back),
        check=RESUME,
    ),
)
