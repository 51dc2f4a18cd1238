"""LightningCheckpointIO: the checkpoints of Lightning's Trainer are steps of a run.

Lightning looks at the files that it named: it counts versions, looks for the last one, links to it. So each name is a
file of a line, where Lightning's own would be, that says which step of which run it means.
"""

import json
import re
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from ckptkit.format.address import split_address
from ckptkit.saving.options import CheckpointerOptions
from ckptkit.torch.run import DEFAULTS, Run
from ckptkit.torch.trainers.named_run import NamedRun
from threefold.errors import UserError
from threefold.packages import needed_for

with needed_for("LightningCheckpointIO"):
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.fabric.utilities.cloud_io import get_filesystem

CALLBACKS, PAIRS = "callbacks", "pairs"
WEIGHTS = "weights"  # the run, inside the run, of what is saved with save_weights_only
MAX_NAME_BYTES = 65_536
AGAIN = re.compile(r"again-(\d+)")  # runs, inside the run, of steps that a training which went back saves again
STEP = re.compile(r"step=(\d+)[^/]*$")  # in names of runs that have no record of names


@dataclass(frozen=True, slots=True)
class NameFile:
    """What the file under a name of Lightning's says: the run, the step, and the name as the run knows it."""

    run: str
    step: int
    name: str


class LightningCheckpointIO(CheckpointIO):  # type: ignore[misc, unused-ignore]
    """A plugin that writes what Lightning saves to a run, beside the training: `Trainer(plugins=[plugin])`.

    ModelCheckpoint decides when to save, under which names, and which of them go; a step goes with its last name.
    `trainer.fit(model, ckpt_path=...)` takes "last", "best", a name, `RUN/step-000000020`, or `RUN` for the newest
    sound step. For strategies of which one process saves all, such as DDP: that process alone writes.
    """

    def __init__(self, url: Any, options: CheckpointerOptions = DEFAULTS) -> None:
        """Take the URL of the run, and options of saving; UserError for a retention, as ModelCheckpoint decides."""
        if isinstance(options, CheckpointerOptions) and options.retention.has_rules:
            raise UserError(
                "LightningCheckpointIO has a retention, which deletes steps that ModelCheckpoint keeps",
                hint="leave the retention out, and set save_top_k of ModelCheckpoint",
            )
        root = Run(url, options)
        if root.is_of_nodes:
            raise UserError(
                f"LightningCheckpointIO saves from one process, which has all, and {url} is each node's own",
                hint="a URL that all nodes share; or ckptkit.torch.Run in a callback, which saves each process's part",
            )
        if root.named is not None:
            raise UserError(f"{url} names one step, a run is saved to a folder of steps", hint=root.url)
        self._url, self._options = root.url, options
        self._runs: dict[tuple[str, int], NamedRun] = {}
        self._goes_on = False  # this process loaded what it trains
        self._begun: set[str] = set()  # kinds of which a step was saved
        self._moved: list[tuple[NamedRun, int, str]] = []  # names that a save takes to another run

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a step under a name, or add a name to a step that is saved."""
        if storage_options is not None:
            raise UserError("LightningCheckpointIO takes no storage_options", hint="trainer.save_checkpoint(path)")
        if not {"global_step", "state_dict"} <= checkpoint.keys():
            raise UserError(
                "LightningCheckpointIO saves checkpoints of lightning.pytorch.Trainer, which have a global_step",
                hint="in a loop of Fabric, save by ckptkit.torch.Run",
            )
        for loaded in [*self._runs.values()]:
            loaded.set_damaged_aside()
        step, name = int(checkpoint["global_step"]), _name_of(path)
        run = self._run_for("" if "optimizer_states" in checkpoint else WEIGHTS, step)
        callbacks = {CALLBACKS: _listed(checkpoint[CALLBACKS])} if CALLBACKS in checkpoint else {}
        self._drop_moved()
        kept = run.save(name, step, {**checkpoint, **callbacks})
        _point(path, NameFile(run.run.storage.url, step, name))
        self._point_again(run, kept)
        if len(self._runs) > 1:
            self._moved = [*(moved for moved in self._moved if moved[2] != name), (run, step, name)]

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what was saved under a name, as a step, as the newest of a run, or in a file of Lightning's own."""
        text = str(path)
        self._goes_on = True
        file = _pointed(text)
        if file is None and get_filesystem(text).isfile(text):
            own = {} if map_location is None else {"map_location": map_location}
            return dict(TorchCheckpointIO().load_checkpoint(path, weights_only=weights_only, **own))
        state = self._named(text, file)
        if state is None:
            state = self._addressed(text)
        return {**state, CALLBACKS: _dicts(state[CALLBACKS])} if CALLBACKS in state else state

    def remove_checkpoint(self, path: Any) -> None:
        """End a name; its step goes if no other name means it. What is gone already is passed over."""
        text, name = str(path), _name_of(path)
        filesystem = get_filesystem(text)
        is_name = _pointed(text) is not None
        if not is_name and filesystem.exists(text):
            TorchCheckpointIO().remove_checkpoint(path)
            return
        if is_name:
            filesystem.rm(text)
        self._drop_moved()
        were_names = [run.drop(name) for run in self._all()]
        if any(were_names):
            return
        run = self._run("")
        if (numbered := STEP.search(text)) and not is_name and run.run.is_committed(int(numbered[1])):
            run.names.add(name, int(numbered[1]), {})  # the run was begun before it kept names
            run.drop(name)

    def teardown(self) -> None:
        """Wait for the last save."""
        try:
            for run in [*self._runs.values()]:
                self._point_again(run, run.close())
        finally:
            self._drop_moved()

    def _run(self, kind: str, number: int = 0) -> NamedRun:
        """Return the run of a kind of checkpoints, or the one beside it of a training that went back."""
        if (kind, number) not in self._runs:
            inner = "".join([f"/{kind}" if kind else "", f"/again-{number}" if number else ""])
            tiers = tuple(replace(tier, url=f"{tier.url}{inner}") for tier in self._options.tiers)
            self._runs[kind, number] = NamedRun(f"{self._url}{inner}", replace(self._options, tiers=tiers))
        return self._runs[kind, number]

    def _all(self) -> list[NamedRun]:
        """Return all runs that are there."""
        found = []
        for kind in ("", WEIGHTS):
            found.append(self._run(kind))
            numbers = (AGAIN.fullmatch(folder) for folder in found[-1].run.storage.list_folders())
            found += [self._run(kind, int(number[1])) for number in numbers if number]
        return found

    def _run_for(self, kind: str, step: int) -> NamedRun:
        """Return the run that a step is saved to: one that has no such step of another training.

        UserError, at the first save, if the run has later steps and the training began without them.
        """
        first = self._run(kind)
        newest = None if self._goes_on or kind in self._begun else first.run.newest()
        if newest is not None and newest >= step:
            raise UserError(
                f"{first.run.url} holds step {newest}, and the training, which did not load it, saves step {step}",
                hint=f"trainer.fit(..., ckpt_path={self._url!r}), or save to another run",
            )
        self._begun.add(kind)
        return next(run for run in (self._run(kind, number) for number in count()) if not run.is_taken(step))

    def _drop_moved(self) -> None:
        """End names in the runs that they left, once what they mean now is committed."""
        moved, self._moved = self._moved, []
        for run, step, name in moved:
            if run.is_running(step):
                self._moved.append((run, step, name))
            elif run.run.is_committed(step):
                for other in [*self._runs.values()]:
                    if other is not run:
                        other.drop(name)

    def _named(self, text: str, file: NameFile | None) -> dict[str, Any] | None:
        """Return what a name means in the runs of this plugin, or in the run that the name's file says."""
        name = _name_of(text) if file is None else file.name
        for run in sorted(self._all(), key=lambda run: file is None or run.run.storage.url != file.run):
            if meaning := run.find(name):
                return run.load(*meaning)
        if file is None:
            return None
        other = NamedRun(file.run, DEFAULTS)
        step, parts = other.find(name) or (file.step, {})
        if not other.run.is_committed(step):
            newest = other.run.newest()
            hint = "save it again" if newest is None else f"ckpt_path={file.run!r} is step {newest}"
            raise UserError(f"{text} means step {step} of {file.run}, which is not there", hint=hint)
        return other.load(step, parts)

    def _addressed(self, text: str) -> dict[str, Any]:
        """Return the step of an address, or the newest of a run, or the step whose number is in a name."""
        url, step = split_address(text)
        numbered = STEP.search(url) if step is None else None
        if numbered and self._run("").run.is_committed(int(numbered[1])):
            return self._run("").load(int(numbered[1]))
        for place in (url, f"{url}/{WEIGHTS}"):
            run = next((run for run in self._all() if run.run.storage.url == Run(place).storage.url), None)
            run = NamedRun(place, DEFAULTS) if run is None else run
            if step is not None or run.run.newest() is not None:
                return run.load(step)
        raise UserError(f"{url} is not a name, and holds no step", hint='ckpt_path="RUN" or "RUN/step-000000020"')

    def _point_again(self, run: NamedRun, names: list[str]) -> None:
        """Write the files of names again that were to go after a save that failed."""
        for name in names:
            if meaning := run.find(name):
                _point(name, NameFile(run.run.storage.url, meaning[0], name))


def _name_of(path: Any) -> str:
    """Return the name that the run keeps for a path: of a local file the whole one."""
    text = str(path)
    return text if "://" in text else str(Path(text).absolute())


def _point(path: Any, file: NameFile) -> None:
    """Write the file of a name, whole or not at all."""
    text = str(path)
    filesystem = get_filesystem(text)
    filesystem.makedirs(text.rpartition("/")[0] or ".", exist_ok=True)
    with filesystem.transaction, filesystem.open(text, "wb") as opened:
        opened.write(json.dumps({"ckptkit": 1, **asdict(file)}).encode() + b"\n")


def _pointed(text: str) -> NameFile | None:
    """Return what the file under a path says, None if there is none of ours."""
    filesystem = get_filesystem(text)
    if not filesystem.isfile(text) or filesystem.size(text) > MAX_NAME_BYTES:
        return None
    try:
        document = json.loads(filesystem.cat_file(text))
        return NameFile(str(document["run"]), int(document["step"]), str(document["name"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _listed(value: Any) -> Any:
    """Return a value with its dicts as lists of pairs: keys of callbacks are paths, too long for names of tensors."""
    if isinstance(value, dict):
        return {PAIRS: [[key, _listed(each)] for key, each in value.items()]}
    return type(value)(map(_listed, value)) if type(value) in (list, tuple) else value


def _dicts(value: Any) -> Any:
    """Return a value with its dicts as they were."""
    if isinstance(value, dict):
        return {key: _dicts(each) for key, each in value[PAIRS]}
    return type(value)(map(_dicts, value)) if type(value) in (list, tuple) else value
