"""Seat: one writer's place in one try at a step, and the keys of what it writes there."""

from dataclasses import dataclass

from ckptkit.format.keys import part_keys, step_folder


@dataclass(frozen=True, slots=True)
class Seat:
    """Which writer of how many, in which try (`attempt`) at which step of the run at `url`.

    The writers of a try count from `first_writer` on, which leads: it commits the step.
    """

    url: str
    step: int
    attempt: str
    writer: int = 0
    num_writers: int = 1
    first_writer: int = 0

    @property
    def folder(self) -> str:
        """The key of the step's folder."""
        return step_folder(self.step)

    @property
    def leads(self) -> bool:
        """Whether this writer commits."""
        return self.writer == self.first_writer

    @property
    def writers(self) -> range:
        """All writers of the try."""
        return range(self.first_writer, self.first_writer + self.num_writers)

    @property
    def failed_key(self) -> str:
        """The key under which this writer says why it failed."""
        return f"{self.folder}/{self.attempt}/part-{self.writer:05d}.failed"

    @property
    def copying_key(self) -> str:
        """The key by which the leader says that it brings this try here, so that the others bring their parts."""
        return f"{self.folder}/{self.attempt}/copying"

    def keys(self, number: int) -> tuple[str, str]:
        """Return the keys of the writer's n-th data file and of its index."""
        data, index = part_keys(self.attempt, self.writer, number)
        return f"{self.folder}/{data}", f"{self.folder}/{index}"
