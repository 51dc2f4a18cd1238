"""StreamEvents: what changes along a run's stream, said where it does: length of rows, size of batches, epochs."""

from datakit import BatchSizes, Loader
from trainer.observe.metrics import Log
from trainer.run.started import Taken


class StreamEvents:
    """What the last step had; owned by the training thread."""

    def __init__(self, loader: Loader, sizes: BatchSizes, log: Log) -> None:
        """Begin behind the last sample that was read, in steps of such sizes."""
        self._blend, self._log = loader.blend, log
        num_samples = loader.cursor.num_samples
        last = max(num_samples - 1, 0)
        self.seq_length = self._blend.sources.seq_length_at(last)
        self.num_samples = sizes.at(sizes.samples_after(0, sizes.steps_before(0, last)))
        self.epochs = self._blend.epochs(num_samples)

    def begin_step(self, step: int, batch: Taken) -> None:
        """Report another length of rows, and another size of the batch."""
        if batch.length != self.seq_length:
            self._log.event("seq_length", step, seq_length=batch.length)
            self._log.say(
                f"step {step}: rows of {batch.length} tokens, was {self.seq_length}; new epochs of all stores"
            )
        if batch.num_samples != self.num_samples:
            self._log.event("batch_size", step, batch_size=batch.num_samples)
            self._log.say(f"step {step}: {batch.num_samples} samples a step, was {self.num_samples}")
        self.seq_length, self.num_samples = batch.length, batch.num_samples

    def end_step(self, step: int, batch: Taken) -> None:
        """Report each store of which another epoch is read."""
        epochs = batch.epochs or self.epochs
        for store, before, after in zip(self._blend.stores, self.epochs, epochs, strict=True):
            if after > before:
                self._log.event("epoch", step, store=store.place, epochs=after)
                self._log.say(f"step {step}: epoch {after} of {store.place} is read")
        self.epochs = epochs
