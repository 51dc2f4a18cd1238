"""Bucket: one flat buffer of parameters with their gradients, and the optimizer state that this rank keeps of it.

Its gradients are summed over the holders once the last ones of a step are in, beside the rest of the backward. Its
parameters are gathered beside what follows; a unit waits for them before it reads them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.linear.weight import Access, Weight
from trainer.mesh.group import Group, Work
from trainer.ops import split
from trainer.ops.dtypes import wide_dtype
from trainer.store.optimizers import OPTIMIZERS
from trainer.store.plan import BucketPlan, Segment


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store keeps its state: `sharded` cuts the optimizer state over the holders, `splits_master` keeps no fp32.

    `summed` is the dtype in which gradients travel to their owners, who add in the wide one.
    `overlaps_reduce` sums gradients beside the backward, `overlaps_gather` updates and gathers beside what follows.
    """

    dtype: torch.dtype
    moments: torch.dtype
    summed: torch.dtype
    bucket_bytes: int
    sharded: bool
    with_optimizer: bool
    splits_master: bool
    overlaps_reduce: bool
    overlaps_gather: bool


class Bucket:
    """One flat buffer of parameters; owned by the training thread.

    `parameters` and `gradients` cover the padded bucket. `master` and the `states` of its optimizer, by name, cover
    what this rank updates, the states in the dtype `moments`, the others in the wide one: the owned interval if
    `sharded`, else all of it. If the parameters have the wide dtype themselves, `master` is a view of them. Without an
    optimizer there are no gradients, no copies, and states without elements.

    `weights` are its handles; what the units that use them may do is in `access`.

    With `splits_master` only the `low` bits of masters are kept beside the parameters. Then `master` is memory of the
    gradients, which are not in use between two steps: `join_masters` puts the masters there.
    """

    def __init__(self, plan: BucketPlan, options: StoreOptions, device: torch.device, group: Group) -> None:
        self.plan, self.options, self.group = plan, options, group
        size, wide = plan.size(group.size), wide_dtype(options.dtype)
        self.owned = plan.interval(group.size, group.index)
        self.updated = self.owned if options.sharded else (0, size)
        self.parameters = torch.zeros(size, dtype=options.dtype, device=device)
        self.gradients = torch.zeros(size if options.with_optimizer else 0, dtype=wide, device=device)
        self._weights = self.parameters[slice(*self.updated)]
        self.low: Tensor | None = None
        if not options.with_optimizer or options.dtype == wide:
            self.master = self._weights
        elif options.splits_master:
            self.master = self.gradients[slice(*self.updated)]
            self.low = torch.zeros_like(self._weights, dtype=split.LOW)
        else:
            self.master = torch.zeros_like(self._weights, dtype=wide)
        self.optimizer = OPTIMIZERS[plan.runs[0].optimizer]
        like = self.master if options.with_optimizer else self.master[:0]
        self.states = {name: torch.zeros_like(like, dtype=options.moments) for name in self.optimizer.states}
        self.weights = list[Weight]()
        self.access = Access(reads=False, adds=False)
        self._reducing: Work | None = None
        self._gathering: Work | None = None
        self._is_written: torch.cuda.Event | None = None
        self.owned_segments = plan.segments(*self.owned)
        self.updated_segments = plan.segments(*self.updated)

    def begin_step(self) -> None:
        """Let the first contribution to each gradient overwrite what is there."""
        for weight in self.weights:
            weight.begin_step()

    @property
    def late(self) -> list[str]:
        """Return the weights that gradients of the step are yet to come of."""
        return [weight.name for weight in self.weights if weight.is_late]

    @property
    def is_reducing(self) -> bool:
        """Return whether the sum of the gradients over the holders has begun."""
        return self._reducing is not None

    def start_reduce(self) -> None:
        """Begin to sum the gradients over the holders, rounded to travel if `summed` is not their dtype."""
        for weight in self.weights:
            weight.finish_step()
        if self.options.summed != self.gradients.dtype and self.group.size > 1:
            self._reducing = self.group.start_exchange(self.gradients.to(self.options.summed))
        elif self.options.sharded:
            self._reducing = self.group.start("reduce_scatter", self.gradients)
        else:
            self._reducing = self.group.start("all_reduce", self.gradients, "sum")

    def finish_reduce(self) -> None:
        """Wait for the sum; at least the part that this rank updates is valid afterwards."""
        assert self._reducing is not None, "start_reduce comes first"
        found = self._reducing.wait()
        if found.dtype != self.gradients.dtype:  # what each rank has for this one, to be added in the wide dtype
            owned = self.gradients[slice(*self.owned)]
            torch.sum(found.view(self.group.size, -1), 0, dtype=owned.dtype, out=owned)
        self._reducing = None

    def part(self, segment: Segment, first: int, *, decays: bool, row: int) -> Any:
        """Return a segment of the interval from position `first` on, as the optimizer takes it, with its states."""
        start = first + segment.offset
        live = slice(start, start + segment.stop - segment.start)
        state = slice(live.start - self.updated[0], live.stop - self.updated[0])
        states = {name: whole[state] for name, whole in self.states.items()}
        published = self.parameters[live] if self.master.dtype != self.parameters.dtype else None
        master = (self.master if self.low is None else self.low)[state]
        gradient = self.gradients[live]
        return self.optimizer.part(
            gradient=gradient, master=master, published=published, decays=decays, row=row, **states
        )

    def join_masters(self) -> None:
        """Put split masters together, where the gradients are: nobody may need these any more."""
        if self.low is not None:
            split.joined(self._weights, self.low, out=self.master)

    def publish_masters(self) -> None:
        """Round the masters on this rank to its parameters, and split them; an update does so itself."""
        if self.low is not None:
            split.split_into(self._weights, self.low, self.master)
        elif self.master.dtype != self.parameters.dtype:
            self._weights.copy_(self.master)

    def start_gather(self) -> None:
        """Begin to bring the parameters of every holder up to date with those of their owners."""
        if self.parameters.is_cuda:  # they may have been written on another stream
            self._is_written = torch.cuda.Event()
            self._is_written.record()
        if self.options.sharded:
            self._gathering = self.group.start("all_gather", self.parameters)

    def arrive(self) -> None:
        """Wait until the parameters are up to date; on CUDA the current stream waits, not the host."""
        if self._is_written is not None:
            torch.cuda.current_stream(self.parameters.device).wait_event(self._is_written)
            self._is_written = None
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
