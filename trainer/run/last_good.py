"""LastGood: the last step of a run that counts, which every end of the run saves, whatever ends it.

What all ranks learn of at the same step is saved as any step is: a loss that is not finite, a batch that one rank could
not read. What a rank meets alone leaves the others in a collective that it will not join. So it posts the step on the
job's board, has its own part saved, and ends; the others meet the end of its connections, read the board, and save
their parts. No save needs a collective.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from threefold.cli import log
from trainer.checkpoint.progress import Progress
from trainer.checkpoint.saver import Saver
from trainer.job.ranks import Ranks
from trainer.job.whereabouts import POSTED, RankLost


class LastGood:
    """Progress and loss of the last step that was found to count; owned by the training thread."""

    def __init__(self, ranks: Ranks, saver: Saver, progress: Progress, loss: float) -> None:
        """Begin with the step that a run was resumed from, or with none."""
        self._ranks, self._saver = ranks, saver
        self.progress, self.loss = progress, loss
        self._is_changing = self._is_over = False

    def note(self, progress: Progress, loss: float) -> None:
        """Note that a run goes on after a step; the loss of one that is void may not be finite, and is left out."""
        self.progress = progress
        self.loss = loss if math.isfinite(loss) else self.loss

    @property
    def _has_trained(self) -> bool:
        """Whether a step was ever trained: before it the same command begins again, and finds nothing in its way."""
        return self.progress.cursor is not None

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Enclose a step: what raises inside, from `begin_change` on, leaves a state that belongs to no step."""
        self._is_changing = False
        yield
        self._is_changing = False

    def begin_change(self) -> None:
        """Note that the state is no longer that of the last good step, until the step ends."""
        self._saver.wait_until_copied()
        self._is_changing = True

    def save_together(self) -> None:
        """Save it on all ranks, which make this call at the same step, and report how that went."""
        self._is_over = True
        self._saver.wait()
        if not self._has_trained:
            return
        failure = self._saver.finish(self.progress, self.loss)
        if failure is not None:
            self._ranks.say(f"warning: step {self.progress.step}, the last good one, is not saved: {failure.message}")

    def save_after(self, fault: Exception) -> None:
        """Save this rank's part of it after what this rank alone met, or after another rank was lost to such a fault.

        A rank that was killed posted nothing, so nobody waits for its part.
        """
        if self._is_over or not self._saver.saves:
            return
        self._is_over, is_alone = True, self._ranks.world_size == 1
        if self._is_changing or not self._has_trained:
            if is_alone:
                self._saver.wait()
            return
        if is_alone:
            self.save_together()
            return
        step = self.progress.step
        if isinstance(fault, RankLost) and self._ranks.board.read(POSTED) != str(step):
            return
        self._ranks.board.post(POSTED, str(step))
        self._saver.save_part(self.progress, self.loss)
        if isinstance(fault, RankLost):
            self._saver.wait()
        else:  # the others save theirs once this rank is gone
            log(f"{self._ranks.where([self._ranks.rank])}ends by a fault; step {step} is left to the writers to save")
