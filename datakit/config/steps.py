"""Steps: which samples each step of a run reads, where a checkpoint says how far the run was at a step.

With 8 samples a step the run reads samples 0 to 7 in step 1. If a checkpoint says that 48 samples were read at step 6,
and a step has 4 samples now, step 7 reads samples 48 to 51. What single steps read up to step 6 is known if steps as
they are now had read as many by then, and else not.
"""

from dataclasses import dataclass

from datakit.order.batch_sizes import BatchSizes
from threefold.errors import UserError


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of such sizes, after a step at which `recorded_samples` were read."""

    sizes: BatchSizes
    recorded_step: int = 0
    recorded_samples: int = 0

    @property
    def first_known(self) -> int:
        """The first step, counted from 0, of which it is known how many samples were read once it was over."""
        return self._begin[0]

    @property
    def _begin(self) -> tuple[int, int]:
        """The first step that is known, and the samples that were read by then."""
        counted = self.sizes.samples_after(0, self.recorded_step)
        return (0, 0) if counted == self.recorded_samples else (self.recorded_step, self.recorded_samples)

    def num_samples(self, step: int) -> int:
        """Return how many samples are read once a step is over; UserError if steps had other batch sizes then."""
        if step < self.first_known:
            text = (
                f"steps up to {self.recorded_step:,} had another batch size: {self.recorded_samples:,} samples were "
                f"read by then, {self.recorded_samples / self.recorded_step:g} a step"
            )
            usual, rest = divmod(self.recorded_samples, self.recorded_step)
            is_usual = not rest and not self.sizes.rampup
            flag = f"--global-batch-size {usual} if it was that from the start, or " if is_usual else ""
            raise UserError(text, hint=f"{flag}--recorded of a checkpoint from before it changed")
        return self.num_counted(step)

    def num_counted(self, step: int) -> int:
        """Return how many samples are read once a step is over, if steps before it were as they are now."""
        known, samples = self._begin
        return self.sizes.samples_after(samples, step - known)

    def num_whole(self, samples: int) -> int:
        """Return how many steps are over once the run has read so many samples."""
        known, before = self._begin
        return known + self.sizes.steps_before(before, samples)

    def samples(self, step: int) -> range:
        """Return the global samples that a step reads; as in a metrics file the first step is step 1."""
        return range(self.num_samples(step - 1), self.num_samples(step))

    def step_of(self, sample: int) -> int | None:
        """Return the step that reads a sample, None if it is one of those with other batch sizes."""
        step = self.num_whole(sample) + 1
        return step if step > self.first_known else None

    def text_of(self, sample: int) -> str:
        """Return the step that reads a sample for a reader, "1 to 6" if only that is known."""
        step = self.step_of(sample)
        return f"1 to {self.recorded_step:,}" if step is None else f"{step:,}"
