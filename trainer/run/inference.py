"""A trained model: a checkpoint of any layout, open for evaluation or generation on one process or on a mesh.

The configuration is the run's own, out of the checkpoint, or a file's; flags win over both. Its layout is not taken
over: one process holds all of the model unless flags say otherwise.
"""

import dataclasses
from typing import Any

from ckptkit import HfFolder, Root, Run, open_source
from threefold.flags import Settings
from trainer.checkpoint.changes import recorded_config, with_saved_vocabulary
from trainer.checkpoint.load import restore_step
from trainer.config import Config
from trainer.config.resolve import settled
from trainer.config.walk import config_from, read_toml
from trainer.engine import Engine
from trainer.job.ranks import Ranks
from trainer.mesh.mesh import mesh_of

OTHER_TABLES = {"parallel", "checkpoint", "log"}  # of the training run, not of the model


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed step and the configuration to read it with.

    `window` is the most tokens that generation reads: those of the longest rows that the run had read, unless a flag
    set train.seq_length. `stores` are those of the run, which may be gone by now.
    """

    run: Run | HfFolder
    root: Root
    config: Config
    window: int
    stores: tuple[str, ...] = ()


def open_checkpoint(url: str, config_path: str | None, overrides: Settings, *, world_size: int) -> Checkpoint:
    """Find the step that `url` means and the configuration for it; touches no tensor and no process group."""
    run = open_source(url)
    step = run.resolve()
    root = run.root(step)
    own = dict(root.metadata.get("config", {}))
    tables: dict[str, Any] = read_toml(config_path) if config_path else own
    if isinstance(tables.get("model", {}), dict):  # what the file does not say
        tables["model"] = {**own.get("model", {}), **tables.get("model", {})}
    tables = {name: table for name, table in tables.items() if name not in OTHER_TABLES}
    if isinstance(tables.get("train"), dict):  # what depends on the tables left out
        of_steps = {"gradient_accumulation_steps": 0, "rampup_batch_size": (), "eval_interval": 0}
        tables["train"] = {**tables["train"], **of_steps}
    flags = {name: flag for name, flag in overrides.items() if not name.startswith(("checkpoint.", "log."))}
    source = config_path or f"the configuration in step {step} of {run.storage.url}"
    given = None if config_path else ()
    checked = config_from(tables, flags, source=source, world_size=world_size, written=given)
    config = with_saved_vocabulary(settled(checked, recorded_config(root)), root)
    stores = (*config.data.stores, *config.data.valid_stores)
    if config.data.valid.order == "permuted":  # the training set is not read, and may be gone by now
        data = dataclasses.replace(config.data, stores=(), weights=(), mixture=())
        config = dataclasses.replace(config, data=data)
    asked = config.train.seq_length
    window = asked if "train.seq_length" in flags else max(asked, int(root.metadata.get("seq_length", 0)))
    return Checkpoint(run, root, config, window, stores)


class TrainedModel:
    """Mesh and engine with a checkpoint's parameters; every rank of a mesh makes the same calls."""

    def __init__(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        """Build and restore; a per-tensor report if the checkpoint holds another model than configured."""
        config, root = checkpoint.config, checkpoint.root
        self.mesh = mesh_of(config, ranks.rank, ranks.device)
        # which layers' windows cut something follows from the longest rows, and generation reads so many tokens
        longest = max(config.train.seq_length, checkpoint.window)
        widest = dataclasses.replace(config, train=dataclasses.replace(config.train, seq_length=longest))
        self.engine = ranks.on_all(lambda: Engine(widest, self.mesh, with_optimizer=False))
        ranks.on_all(lambda: restore_step(self.engine, checkpoint.run, root.step))
        self.engine.store.publish()
        trained_in = root.metadata.get("config", {}).get("train", {}).get("precision", config.train.precision)
        if trained_in != config.train.precision:
            text = f"step {root.step} was trained in {trained_in}: its parameters are converted to "
            ranks.say(text + config.train.precision)
