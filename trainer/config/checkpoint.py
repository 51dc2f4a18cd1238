"""Where a run saves, how often, which steps stay, and what it resumes from."""

from dataclasses import dataclass
from typing import Literal

from threefold.needs import GIVEN
from threefold.options import option

SAVE_INTERVAL_S = 600.0  # of a run that asks for no interval


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """`[checkpoint]`: where state is saved to and resumed from."""

    save: tuple[str, ...] = option(
        (),
        "run URL to save to; a committed step in it is resumed. Repeated, fastest first, it names tiers: "
        "URL,every=N,keep_last=N (docs/guides/tiers.md)",
        flags=["--save"],
        repeats=True,
    )
    load: str = option(
        "", "run or step URL, or hf:FOLDER of Hugging Face, that seeds the run while `save` holds no step; with rewind "
        "a step of `save`",
        flags=["--load"],
    )  # fmt: skip
    rewind: bool = option(
        False, "go on from the older step of the run itself that `load` names; newer steps are set aside",
        shorthands={"--rewind": "true"}, needs={"load": GIVEN, "save": GIVEN},
    )  # fmt: skip
    save_interval: int = option(0, "save every so many steps; 0 leaves it to save_interval_s", minimum=0,
                                flags=["--save-interval"], needs={"save": GIVEN})  # fmt: skip
    save_interval_s: float = option(
        -1.0,
        "save at the first step so many seconds after the last save; 0 never; -1 means "
        f"{SAVE_INTERVAL_S:g} while save_interval is 0, else never",
        minimum=-1,
        flags=["--save-interval-s"],
    )
    max_failed_saves: int = option(3, "this many failed saves in a row end the run", minimum=1)
    deadline_s: float = option(600.0, "how long a save waits for the files of all ranks", above=0)
    keep_last: int = option(0, "keep the newest N steps after each save; with all keep_* 0 all stay", minimum=0)
    keep_every: int = option(0, "keep the first step at or after each multiple of this", minimum=0)
    keep_best: int = option(0, "keep the N steps with the smallest keep_best_metric", minimum=0)
    keep_best_metric: str = option(
        "val_loss", "val_loss, loss, or any other number in a checkpoint's metadata", needs={"keep_best": GIVEN}
    )
    keep_hourly: int = option(0, "keep the newest step of each of the last N hours that have one", minimum=0)
    stripe_count: int = option(0, "on Lustre, stripes of each file; 0 chooses, -1: one on every target", minimum=-1)
    stripe_size_bytes: int = option(0, "on Lustre, bytes of a stripe, in units of 65536; 0 chooses", minimum=0)
    strict: bool = option(
        False, "end if the newest step is damaged, instead of falling back to an older one",
        shorthands={"--strict": "true"},
    )  # fmt: skip
    exchange: Literal["node", "job", "none"] = option(
        "node", "who reads a checkpoint together at the start, each byte once: the ranks of a node, all, or nobody"
    )
    code: str = option("", "code version that checkpoints record; empty: the commit of the git tree started in")
    retry_s: float = option(60.0, "how long what the storage refuses for now is tried again", minimum=0)
    overlap: Literal["auto", "on", "off"] = option(
        "auto", "copy the state beside the next forward and backward; auto does so on CUDA"
    )
    window_mib: int = option(
        0, "host memory a rank's save passes through; 0 means all of its state: the step waits for the copy alone",
        minimum=0,
    )  # fmt: skip
    when_busy: Literal["wait", "skip", "abort"] = option(
        "wait", "if the save before still runs: wait for it, skip the new one, or abort the older"
    )
