"""Faults in what a run validates on, and in the validation loss that chooses its best steps."""

import difflib
import re
from collections.abc import Iterator

from threefold.needs import unmet
from threefold.options import Fault
from trainer.config import Config
from trainer.config.data import LOSS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def eval_faults(config: Config) -> Iterator[Fault]:
    """Yield the faults of validation sets and between them, and an evaluation without any."""
    interval = config.train.eval_interval
    if interval and not config.data.validates:
        yield {"train.eval_interval", "data.valid.stores"}, f"train.eval_interval {interval} needs data.valid.stores"
    places: dict[str, int] = {}
    for number, valid_set in enumerate(config.data.valid_sets):
        table = f"data.valid_sets[{number}]"
        if not valid_set.name:
            yield {"data.valid_sets"}, f'{table} has no name: name = "set{number}"'
        elif not NAME.fullmatch(valid_set.name):
            better = re.sub(r"[^A-Za-z0-9_-]+", "-", valid_set.name).strip("-_") or f"set{number}"
            text = f'{table}.name {valid_set.name!r} is not of letters, digits, _ and -: name = "{better}"'
            yield {"data.valid_sets"}, text
        elif valid_set.name in places:
            text = f"{table}.name {valid_set.name} is that of data.valid_sets[{places[valid_set.name]}] too"
            yield {"data.valid_sets"}, f'{text}: name = "{valid_set.name}{number}"'
        places.setdefault(valid_set.name, number)
        if not valid_set.stores:
            yield {"data.valid_sets"}, f'{table}.stores names no token store: stores = ["store/valid"]'
        for names, text in (*valid_set.faults(table), *unmet(valid_set, f"{table}.")):
            yield {"data.valid_sets", *names}, text


def best_faults(config: Config) -> Iterator[Fault]:
    """Yield the first fault in the validation loss that chooses the best steps."""
    save, metric = config.checkpoint, config.checkpoint.keep_best_metric
    if not save.keep_best or metric.partition("/")[0] != LOSS:
        return
    names = {"checkpoint.keep_best", "checkpoint.keep_best_metric", "train.eval_interval"}
    if not config.train.eval_interval:
        yield names, f"checkpoint.keep_best {save.keep_best} by {metric} needs train.eval_interval"
        return
    known = [LOSS] * config.data.has_plain_valid + [valid_set.loss_name for valid_set in config.data.valid_sets]
    if metric not in known:
        nearest = (difflib.get_close_matches(metric, known, 1, 0) or ["loss"])[0]
        text = f"checkpoint.keep_best_metric {metric} is of no validation set: --checkpoint.keep-best-metric {nearest}"
        yield {*names, "data.valid.stores", "data.valid_sets"}, text
