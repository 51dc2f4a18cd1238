"""HfTrainerCursor: a run of the Trainer of transformers goes on at the sample that its saved step was at.

The Trainer passes over as many batches as it had, of today's size, and makes each of them again. The callback keeps the
number of samples in the Trainer's state, and lets the dataset begin there, under other rows and ranks too.
"""

from typing import Any

from datakit.data_loader.datasets import StreamDataset
from datakit.order.arguments import require
from threefold.errors import UserError
from threefold.packages import needed_for

with needed_for("HfTrainerCursor"):
    from transformers import TrainerCallback, TrainerControl, TrainerState

KEY = "datakit_stream"  # of the Trainer's state, beside the states of callbacks


class HfTrainerCursor(TrainerCallback):  # type: ignore[misc]
    """A callback that keeps the place in the stream in the Trainer's checkpoints: `Trainer(..., callbacks=[callback])`.

    It sets `ignore_data_skip`, so that the Trainer itself passes over nothing. A checkpoint that was made without it
    goes on after the batches that the Trainer had, which is exact under the same rows and ranks.
    """

    def __init__(self, dataset: StreamDataset) -> None:
        """Take the dataset that is trained on."""
        self._dataset = require("dataset", dataset, StreamDataset, 'StreamDataset(blend, 4, format="transformers")')
        self._begin_step = 0  # of this call of `train`

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Let the Trainer not pass over batches."""
        args.ignore_data_skip = True

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Let the dataset begin at the step that training goes on from."""
        if not args.ignore_data_skip:
            raise UserError(
                "the Trainer would pass over batches that the dataset has passed over",
                hint="Trainer(..., callbacks=[HfTrainerCursor(dataset)]), or TrainingArguments(ignore_data_skip=True)",
            )
        saved = state.stateful_callbacks.get(KEY)
        if saved is not None:
            self._dataset.load_state_dict(saved["cursor"])
        elif state.global_step:
            saved = {"step": 0, "step_samples": self._step_samples(args)}
        if saved is not None:  # what is saved may be of a step before, if the saving callback was called first
            num_samples = (state.global_step - saved["step"]) * saved["step_samples"]
            self._dataset.load_state_dict(self._dataset.cursor_after(num_samples))
        self._begin_step = state.global_step

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Keep the cursor after the step in the Trainer's state."""
        step_samples = self._step_samples(args)
        cursor = self._dataset.cursor_after((state.global_step - self._begin_step) * step_samples)
        state.stateful_callbacks[KEY] = {"step": state.global_step, "cursor": cursor, "step_samples": step_samples}

    def _step_samples(self, args: Any) -> int:
        """Return the samples of a step of all ranks; a dataset of one rank is shared by accelerate among processes."""
        num_sharers = args.world_size if self._dataset.dp_size == 1 else 1
        return int(args.gradient_accumulation_steps * num_sharers * self._dataset.global_batch_size)
