"""Bucket: one flat buffer of parameters with their gradients, and what this rank keeps of them and of their state.

Its gradients are summed over the holders once the last ones of a step are in, beside the rest of the backward. Its
parameters are gathered beside what follows; a unit waits for them before it reads them. Of a bucket that is cut a rank
keeps an interval, and whole buffers are leased for a pass: then gradients are summed at the end of each pass. Those who
cut it may be some of the holders, whose other groups are replicas. These are summed over once a step, and each of the
holders owns a part of the interval that it keeps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.linear.weight import Access, Weight, add_or_write
from trainer.mesh.group import Group, Work
from trainer.mesh.layout import nested
from trainer.mesh.mesh import ProcessMesh
from trainer.ops import rounding, split
from trainer.ops.dtypes import wide_dtype
from trainer.ops.philox import MASK, philox4x32, tensor_key
from trainer.store.optimizers import OPTIMIZERS
from trainer.store.options import StoreOptions
from trainer.store.plan import BucketPlan, Segment

NewState = Callable[[int, torch.dtype], Tensor]  # memory of so many elements, of zeros


@dataclass(frozen=True, slots=True)
class SegmentTensors:
    """What a rank has of some elements of a parameter; `published` is None if the master is the weight itself."""

    gradient: Tensor
    master: Tensor
    published: Tensor | None
    states: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class StateParts:
    """Masters, or their low bits, and states of what a rank updates of a bucket, from position `first` on."""

    first: int
    master: Tensor
    states: dict[str, Tensor]


class Bucket:
    """One flat buffer of parameters; owned by the training thread.

    `group` are all holders; `inner` are those who cut the bucket if it is cut, and `outer` this rank with those of
    other replicas that keep the same interval: of inner rank 1 and outer rank 0, of 2 and 2, this is the third quarter,
    and the rank owns the first half of that.

    `parameters` and `gradients` cover the padded bucket, or the interval `kept` if they are cut. `master` and the
    `states` of its optimizer, by name, cover what this rank updates, the states in the dtype `moments`, the others in
    the wide one: the owned interval if `sharded`, else all of it. If the parameters have the wide dtype themselves,
    `master` is a view of them. Without an optimizer there are no gradients, no copies, and states without elements.

    `weights` are its handles; what the units that use them may do is in `access`, which others of the unit share.

    With `splits_master` only the `low` bits of masters are kept beside the parameters. Then `master` is memory of the
    gradients, which are not in use between two steps: `join_masters` puts the masters there.

    `new_state` makes the memory of masters and states, of zeros, which may be that of the host.
    """

    def __init__(
        self, plan: BucketPlan, options: StoreOptions, mesh: ProcessMesh, access: Access, new_state: NewState
    ) -> None:
        self.plan, self.options, self.access = plan, options, access
        axes, device = plan.runs[0].holders, mesh.device
        self.group, (self.inner, self.outer) = mesh.along(axes), mesh.nest(axes)
        size, wide = plan.size(self.group.size), wide_dtype(options.dtype)
        is_cut = plan.is_cut(self.group.size, self.inner.size, options.whole_bytes)
        self.cuts_parameters = is_cut and options.zero_stage >= 3
        self.cuts_gradients = is_cut and options.zero_stage >= 2 and options.with_optimizer
        if not (self.cuts_parameters or self.cuts_gradients):
            self.inner, self.outer = self.group, mesh.alone
        length, place = size // self.group.size, self.inner.index * self.outer.size
        self.kept = place * length, (place + self.outer.size) * length
        self.owned = plan.interval(self.group.size, place + self.outer.index)
        self.updated = self.owned if options.sharded else (0, size)
        self._resident = self.kept if self.cuts_parameters else (0, size)
        self._summed = self.kept if self.cuts_gradients else (0, size)
        self.parameters = torch.zeros(_length(self._resident), dtype=options.dtype, device=device)
        self.gradients = torch.zeros(_length(self._summed) * options.with_optimizer, dtype=wide, device=device)
        self._whole_gradients = self.gradients  # or a lease
        self._weights = _part(self.parameters, self._resident, self.updated)
        self.low: Tensor | None = None
        if not options.with_optimizer or options.dtype == wide:
            self.master = self._weights
        elif options.splits_master:
            self.master = _part(self.gradients, self._summed, self.updated)
            self.low = new_state(len(self._weights), split.LOW)
        else:
            self.master = new_state(len(self._weights), wide)
        self.optimizer = OPTIMIZERS[plan.runs[0].optimizer]
        length = len(self.master) * options.with_optimizer
        self.states = {name: new_state(length, options.moments) for name in self.optimizer.states}
        self.weights = list[Weight]()
        self._num_sums, self._ends_step, self._step = 0, True, 0
        self._reducing: Work | None = None
        self._reducing_outer: Work | None = None
        self._gathering: Work | None = None
        self._to_gather = list[tuple[Group, Tensor]]()  # behind it
        self._is_written: torch.cuda.Event | None = None
        self.owned_segments = plan.segments(*self.owned)
        self.updated_segments = plan.segments(*self.updated)
        self.gaps = plan.gaps(self.group.size)
        self.resident_segments = plan.segments(*self._resident)

    def begin_step(self, step: int) -> None:
        """Let the first contribution to each gradient, or the first sum, overwrite what is there."""
        self._num_sums, self._step = 0, step
        for weight in self.weights:
            weight.begin_sum()

    def begin_pass(self, whole: Tensor) -> None:
        """Let a pass's contributions to gradients that are cut overwrite a leased buffer."""
        self._whole_gradients = whole
        self._attach(gradients=whole)
        for weight in self.weights:
            weight.begin_sum()

    def add_weight(self, weight: Weight) -> None:
        """Take the next handle, and show it what is not cut."""
        self.weights.append(weight)
        if len(self.weights) == len(self.plan.runs):
            if not self.cuts_parameters:
                self._attach(values=self.parameters)
            if not self.cuts_gradients and self.options.with_optimizer:
                self._attach(gradients=self.gradients)

    def _attach(self, *, values: Tensor | None = None, gradients: Tensor | None = None) -> None:
        for weight, offset in zip(self.weights, self.plan.offsets, strict=True):
            part = slice(offset, offset + weight.shape.numel())
            if values is not None:
                weight.show(values=values[part])
            if gradients is not None:
                weight.show(gradient=gradients[part])

    @property
    def late(self) -> list[str]:
        """Return the weights that gradients are yet to come of: of the step, or of the pass if they are cut."""
        return [weight.name for weight in self.weights if weight.is_late]

    @property
    def is_reducing(self) -> bool:
        """Return whether the sum of the gradients over the holders has begun."""
        return self._reducing is not None

    def start_reduce(self, *, ends_step: bool = True) -> None:
        """Begin to sum the gradients over the holders, or those of a pass over who cuts them: maybe a step's last."""
        for weight in self.weights:
            weight.finish_sum()
        self._ends_step = ends_step
        self._reducing = self._start_sum(self.inner, self._whole_gradients)

    def _start_sum(self, group: Group, gradients: Tensor) -> Work:
        """Begin a sum over a group, rounded to travel if `summed` is not the gradients' dtype."""
        if self.options.summed != gradients.dtype and group.size > 1:
            is_packed = self.options.summed == torch.int8
            sent = self._packed(group, gradients) if is_packed else gradients.to(self.options.summed)
            return group.start_exchange(sent)
        if self.options.sharded:
            return group.start("reduce_scatter", gradients)
        return group.start("all_reduce", gradients, "sum")

    def _packed(self, group: Group, gradients: Tensor) -> Tensor:
        """Round what this rank has for a sum of a step, by places: of each element, and of this rank in the group."""
        key = tensor_key(self.options.seed, f"sum of {self.plan.runs[0].names[0]}")
        key0, key1, _, _ = philox4x32([self._step & MASK, self._step >> 32, 0, 0], key & MASK, key >> 32)
        is_first = group is self.inner
        for start, stop in self.gaps if is_first else ():
            gradients[start:stop].zero_()  # a lease may hold anything there
        words = self._num_sums, group.index, 0 if is_first else 1
        first = 0 if is_first else self._summed[0]
        return rounding.packed(gradients, group.size, first=first, key=(key0, key1), words=words)

    def finish_reduce(self) -> None:
        """Wait for the sum, if one has begun, and begin that over replicas behind the last of a step."""
        if self._reducing is None:
            return
        kept = self._whole_gradients[slice(*self.kept)]
        _finish_sum(self._reducing, kept)
        self._reducing = None
        if self.cuts_gradients:
            add_or_write(kept)(self.gradients, self._num_sums == 0)
        self._num_sums += 1
        if self._ends_step and self.outer.size > 1:
            self._reducing_outer = self._start_sum(self.outer, self.gradients)

    def finish_step(self) -> None:
        """Wait for the sums of a step; at least the part that this rank updates is valid afterwards."""
        self.finish_reduce()
        if self._reducing_outer is not None:
            _finish_sum(self._reducing_outer, _part(self.gradients, self._summed, self.owned))
            self._reducing_outer = None

    @property
    def state(self) -> StateParts:
        """Return masters and states where they are kept."""
        return StateParts(self.updated[0], self.master if self.low is None else self.low, self.states)

    @property
    def streamed(self) -> dict[str, Tensor]:
        """Return what of masters and states is kept beside the weights: the states by name, masters under none."""
        apart = {} if self.low is None and self.master.dtype == self.parameters.dtype else {"": self.state.master}
        return apart | self.states

    def part(self, segment: Segment, first: int, state: StateParts, *, decays: bool, row: int) -> Any:
        """Return a segment of the interval from position `first` on, as the optimizer takes it, with its states."""
        live = self.tensors(segment, first, state)
        return self.optimizer.part(
            gradient=live.gradient,
            master=live.master,
            published=live.published,
            decays=decays,
            row=row,
            **live.states,
        )

    def tensors(self, segment: Segment, first: int, state: StateParts) -> SegmentTensors:
        """Return the tensors of a segment of the interval from position `first` on."""
        start = first + segment.offset
        live = slice(start, start + segment.stop - segment.start)
        own = slice(live.start - state.first, live.stop - state.first)
        states = {name: whole[own] for name, whole in state.states.items()}
        interval = live.start, live.stop
        is_apart = self.master.dtype != self.parameters.dtype
        published = _part(self.parameters, self._resident, interval) if is_apart else None
        return SegmentTensors(_part(self.gradients, self._summed, interval), state.master[own], published, states)

    def owned_by(self, mesh: ProcessMesh, rank: int) -> tuple[int, int]:
        """Return the positions that a holder of the bucket, or of its part on another tp rank, owns."""
        axes = self.plan.runs[0].holders
        inner, outer = nested(axes)
        if self.inner is self.group:
            place = mesh.place(axes, rank)
        else:
            place = mesh.place(inner, rank) * self.outer.size + mesh.place(outer, rank)
        return self.plan.interval(self.group.size, place)

    @property
    def owned_parameters(self) -> Tensor:
        """Return what this rank owns of the parameters."""
        return _part(self.parameters, self._resident, self.owned)

    def join_masters(self) -> None:
        """Put split masters together, where the gradients are: nobody may need these any more."""
        if self.low is not None:
            split.joined(self._weights, self.low.to(self._weights.device), out=self.master)

    def publish_masters(self) -> None:
        """Round the masters on this rank to its parameters, and split them; an update does so itself."""
        if self.low is not None:
            split.split_into(self._weights, self.low, self.master)
        elif self.master.dtype != self.parameters.dtype:
            self._weights.copy_(self.master)

    def start_gather(self) -> None:
        """Begin to bring what holders keep of the parameters up to date with those of their owners: replicas first."""
        if self.parameters.is_cuda:  # they may have been written on another stream
            self._is_written = torch.cuda.Event()
            self._is_written.record()
        if self.options.sharded:
            parts = [(self.outer, _part(self.parameters, self._resident, self.kept))]
            parts += [] if self.cuts_parameters else [(self.inner, self.parameters)]
            self._to_gather = [(group, part) for group, part in parts if group.size > 1]
            self._start_next()

    def start_inner_gather(self) -> None:
        """Begin the gather behind that of replicas, if there is one: on CUDA the current stream waits for these."""
        if self._to_gather:
            self._start_next()

    def _start_next(self) -> None:
        """Wait for the gather under way, and begin the next."""
        if self._gathering is not None:
            self._gathering.wait()
        self._gathering = None
        if self._to_gather:
            group, part = self._to_gather.pop(0)
            self._gathering = group.start("all_gather", part)

    def read_from(self, whole: Tensor) -> None:
        """Let weights read a leased buffer, into which parameters that are cut are gathered once up to date."""
        self.arrive()
        self._attach(values=whole)

    def gathered(self) -> Tensor:
        """Return the parameters of the padded bucket: of one that is cut, memory of their own."""
        self.arrive()
        return self.inner.start_gather(self.parameters).wait() if self.cuts_parameters else self.parameters

    def arrive(self) -> None:
        """Wait until the parameters are up to date; on CUDA the current stream waits, not the host."""
        if self._is_written is not None:
            torch.cuda.current_stream(self.parameters.device).wait_event(self._is_written)
            self._is_written = None
        while self._gathering is not None:
            self._start_next()


def _finish_sum(work: Work, own: Tensor) -> None:
    """Wait for a sum over a group; if it was rounded to travel, add what each rank has for this one, in `own`."""
    found = work.wait()
    if found.dtype == torch.int8:
        rounding.sum_packed(found, work.group.size, own)
    elif found.dtype != own.dtype:
        torch.sum(found.view(work.group.size, -1), 0, dtype=own.dtype, out=own)


def _length(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]


def _part(kept: Tensor, interval: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """Return the positions `wanted` of a bucket, of which the tensor has those of `interval`."""
    return kept[wanted[0] - interval[0] : wanted[1] - interval[0]]
