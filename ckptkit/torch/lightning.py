"""LightningCheckpointIO: the checkpoints of Lightning's Trainer are steps of a run."""

import re
from typing import Any

from ckptkit.format.address import split_address
from ckptkit.loading.exchange import Alone
from ckptkit.saving.options import CheckpointerOptions
from ckptkit.torch.run import DEFAULTS, Run
from threefold.errors import UserError
from threefold.packages import needed_for

with needed_for("LightningCheckpointIO"):
    from lightning.fabric.plugins import CheckpointIO

KEY, CALLBACKS, PAIRS = "checkpoint", "callbacks", "pairs"


class LightningCheckpointIO(CheckpointIO):  # type: ignore[misc, unused-ignore]
    """A plugin that writes what Lightning saves to a run, beside the training: `Trainer(plugins=[plugin])`.

    A file `epoch=1-step=20.ckpt` of ModelCheckpoint is step 20, `trainer.fit(model, ckpt_path="RUN/step-000000020")` or
    `ckpt_path="RUN"` goes on. For strategies of which one process saves all, such as DDP: that process alone writes.
    """

    def __init__(self, url: Any, options: CheckpointerOptions = DEFAULTS) -> None:
        """Take the URL of the run, and options of saving."""
        self._url, self._options = url, options
        self._run: Run | None = None
        self._saved: set[int] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save as the step that the checkpoint is of, unless that is saved: another name for it adds nothing."""
        step = int(checkpoint["global_step"])
        if step not in self._saved:
            callbacks = {CALLBACKS: _listed(checkpoint[CALLBACKS])} if CALLBACKS in checkpoint else {}
            self._opened().save(step, {KEY: {**checkpoint, **callbacks}})
            self._saved.add(step)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what was saved as a step, by the URL of the step or of the run, or by the name of Lightning's file."""
        url, step = split_address(str(path))
        if named := re.search(r"step=(\d+)[^/]*$", url):
            url, step = str(self._url), int(named[1])
        state: dict[str, Any] = {KEY: {}}
        with Run(url, exchange=Alone()) as run:
            if run.newest() is None:
                raise UserError(f"{url} holds no step", hint='ckpt_path="RUN" or "RUN/step-000000020"')
            if self._run is not None:
                self._run.wait()
            run.load(state, step)
        found = dict(state[KEY])
        return found | ({CALLBACKS: _dicts(found[CALLBACKS])} if CALLBACKS in found else {})

    def remove_checkpoint(self, path: Any) -> None:
        """Remove the step of one of Lightning's files; the newest good one and a pinned one stay."""
        if named := re.search(r"step=(\d+)[^/]*$", str(path)):
            run = self._opened()
            run.wait()
            run.remove(int(named[1]))

    def teardown(self) -> None:
        """Wait for the last save."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def _opened(self) -> Run:
        if self._run is None:
            self._run = Run(self._url, self._options, exchange=Alone())
        return self._run


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
