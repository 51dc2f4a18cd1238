"""What is verified: the configuration of a file, of a run's newest step, or of a command line of Megatron-LM."""

import os
from dataclasses import dataclass, replace
from typing import Any

from ckptkit import open_source
from threefold.errors import UserError
from threefold.flags import Settings
from threefold.options import FlagText
from trainer.checkpoint.changes import with_saved_vocabulary
from trainer.config import Config, ValidConfig
from trainer.config.foreign.conversion import Conversion, source_of
from trainer.config.walk import config_from, load_config
from trainer.verify.trial import SavedStep

BESIDE = {"checkpoint", "log"}  # tables that change no number


@dataclass(frozen=True, slots=True)
class Source:
    """A run's configuration, for as many ranks as its layout asks for, where it is from, and its saved step, if any."""

    config: Config
    name: str
    start: SavedStep | None = None


def open_run_or_file(name: str, flags: Settings, *, megatron: str = "") -> Source:
    """Return the source of a file's name, a run's URL, or a command of Megatron-LM; flags win over what it says.

    Stores are not opened, those that validate are left out.
    """
    flags = {**flags}
    flags.setdefault("data.valid.stores", FlagText("none", "--data.valid.stores"))
    if megatron:
        title, command = source_of(megatron)
        source = Source(config_from(Conversion.of(command).tables, flags, source=title, world_size=None), title)
    elif name.endswith(".toml") or os.path.isfile(name):
        source = Source(load_config(name, flags, world_size=None), name)
    else:
        source = _newest(name, flags)
    data = replace(source.config.data, valid=ValidConfig(), valid_sets=())
    return replace(source, config=replace(source.config, data=data))


def _newest(url: str, flags: Settings) -> Source:
    run = open_source(url)
    step = run.resolve()
    root = run.root(step)
    tables: dict[str, Any] = {
        name: table for name, table in root.metadata.get("config", {}).items() if name not in BESIDE
    }
    if "model" not in tables:
        raise UserError(f"step {step} of {url} records no configuration", hint="trainer verify CONFIG.toml")
    tables["train"] = {**tables.get("train", {}), "gradient_accumulation_steps": 0}  # which follows from the layout
    name = f"step {step} of {url}"
    config = config_from(tables, flags, source=f"the configuration in {name}", world_size=None, written=())
    return Source(with_saved_vocabulary(config, root), name, SavedStep(url, step))
