"""ValidSet: an open validation set of a run, by its name: that of `[data.valid]` has none, others have their own."""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass

from datakit import Blend
from threefold.errors import UserError
from trainer.config import Config, ValidSetConfig
from trainer.config.data import LOSS
from trainer.data import open_valid_blend


@dataclass(frozen=True, slots=True)
class ValidSet:
    """A blend and how many of its first samples are evaluated."""

    name: str
    blend: Blend
    num_samples: int

    @property
    def loss_name(self) -> str:
        """The name of its loss, in metrics and in a checkpoint's metadata."""
        return f"{LOSS}/{self.name}" if self.name else LOSS

    def repeats(self) -> str:
        """Return a line on the stores whose rows are read more than once, "" if there are none."""
        counts = self.blend.counts(self.num_samples).tolist()
        pairs = zip(self.blend.stores, counts, self.blend.rows.tolist(), strict=True)
        texts = [f"{count} samples of the {rows} of {store.place}" for store, count, rows in pairs if count > rows]
        what = f"validation set {self.name}" if self.name else "validation"
        return f"{what} reads rows more than once: {', '.join(texts)}" if texts else ""


def open_valid_sets(
    config: Config, report: Callable[[str], None] = lambda _: None, only: Collection[str] = ()
) -> list[ValidSet]:
    """Return the validation sets of a run, those with names behind that of `[data.valid]`; `only` names some of them.

    `report` takes a line on each that reads rows again. UserError for a set that is not there, or cannot be read.
    """
    data = config.data
    known = [valid_set.name for valid_set in data.valid_sets]
    for name in only:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none with a name"
            hint = f"--set {known[0]}" if known else "leave --set out"
            raise UserError(f"the configuration has no validation set {name}: {has}", hint=hint)
    opened = []
    if not only and (data.has_plain_valid or not data.valid_sets):
        opened.append(ValidSet("", open_valid_blend(config, report), data.valid.num_samples))
    opened += [_opened(config, valid_set) for valid_set in data.valid_sets if not only or valid_set.name in only]
    for line in filter(None, (valid_set.repeats() for valid_set in opened)):
        report(line)
    return opened


def _opened(config: Config, asked: ValidSetConfig) -> ValidSet:
    steps = dataclasses.replace(config.train, seed=config.data.valid.seed or 0)
    try:
        return ValidSet(asked.name, asked.open(steps, table="data.valid_sets"), asked.num_samples)
    except UserError as error:
        error.message = f"validation set {asked.name}: {error.message}"
        raise
