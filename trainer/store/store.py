"""ParameterStore: this rank's parameters, their gradients and their optimizer state.

Layers ask it for weights, and hand their gradients to them. After the last backward of a step the gradients are summed
into their owners, the owners update, and all holders take the result. The ranks that hold a parameter own equal parts
of it, so the squared norm of the gradients is a plain sum over owned elements, and so are the pieces of a checkpoint.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.config import OptimConfig
from trainer.linear.weight import Weight
from trainer.linear.wgrads import Wgrads
from trainer.mesh.layout import Axis
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.dtypes import wide_dtype
from trainer.store.bucket import Bucket
from trainer.store.initial import initial_values
from trainer.store.optimizers import Updates
from trainer.store.parameter import Parameter
from trainer.store.plan import Run, plan_buckets


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


class ParameterStore:
    """The live parameters of one rank; owned by the training thread, all ranks make the same calls."""

    def __init__(
        self, table: Mapping[str, Parameter], runs: Sequence[Run], mesh: ProcessMesh, options: StoreOptions
    ) -> None:
        self.table, self.mesh, self.options = table, mesh, options
        self.buckets = [
            Bucket(plan, options.dtype, mesh.device, mesh.along(plan.holders), sharded=options.sharded,
                   moments=options.moments, with_optimizer=options.with_optimizer,
                   splits_master=options.splits_master)
            for plan in plan_buckets(runs, options.bucket_bytes, options.dtype.itemsize)
        ]  # fmt: skip
        self.wgrads, self._weights = Wgrads(), dict[str, Weight]()
        self._weights_of: list[list[Weight]] = []  # by bucket
        for bucket in self.buckets:
            handles = [self._handle(bucket, *run) for run in zip(bucket.plan.runs, bucket.plan.offsets, strict=True)]
            self._weights_of.append(handles)
            self._weights |= {run.names[0]: each for run, each in zip(bucket.plan.runs, handles, strict=True)}
        # views that never change, made once
        self._owned = self._intervals(self.buckets, of_owned=True)
        parts = [[bucket] for bucket in self.buckets] if options.overlaps_gather else [self.buckets]
        self._updated = [(part, self._intervals(part)) for part in parts]
        is_beside = options.overlaps_gather and options.with_optimizer and mesh.device.type == "cuda"
        self._beside = torch.cuda.Stream(mesh.device) if is_beside else None

    def _intervals(self, buckets: Sequence[Bucket], *, of_owned: bool = False) -> Updates:
        """Return what this rank owns of buckets, or updates of them."""
        numbers, found = {name: number for number, name in enumerate(self.table)}, []
        for bucket in buckets if self.options.with_optimizer else ():
            first = bucket.owned[0] if of_owned else bucket.updated[0]
            for segment in bucket.owned_segments if of_owned else bucket.updated_segments:
                row = self.table[segment.name]
                part = bucket.part(segment, first, decays=row.decay > 0, row=numbers[segment.name])
                found.append((replace(row, rate=1.0, decay=1.0) if of_owned else row, part))  # a norm has no factors
        return Updates(found)

    def _handle(self, bucket: Bucket, run: Run, offset: int) -> Weight:
        first = self.table[run.names[0]]
        part = slice(offset, offset + run.numel)
        gradient = bucket.gradients[part].view(run.shape) if self.options.with_optimizer else None
        name, values = " + ".join(run.names), bucket.parameters[part].view(run.shape)
        contributes = first.contributes_on(self.mesh.layout, self.mesh.coords)
        number = len(self._weights_of)
        return Weight(
            name, values, gradient, contributes=contributes, wgrads=self.wgrads, before_use=bucket.arrive,
            after_gradient=lambda: self._count_contribution(number),
        )  # fmt: skip

    def _count_contribution(self, number: int) -> None:
        """Note a gradient of a bucket; begin its sum if it was the last one and all holders are at the same passes.

        Holders on two stages are not: on a GPU the kernel of the one that is first would wait for the other, which
        waits for what the first has yet to send, and nothing that waits for all kernels could go on.
        """
        bucket = self.buckets[number]
        is_on_one_stage = Axis.ENDS not in bucket.group.axes
        if bucket.count_contribution() and self.options.overlaps_reduce and is_on_one_stage:
            self._start_reduce(number)

    def _start_reduce(self, number: int) -> None:
        """Begin to sum the gradients of a bucket, all of which are in."""
        for weight in self._weights_of[number]:
            weight.finish_step()
        self.buckets[number].start_reduce(self.options.summed)

    def weight(self, *names: str) -> Weight:
        """Return the handle of a parameter, or of several that were planned as one run, to one more layer that uses it.

        That layer contributes to the gradient once a micro-batch.
        """
        weight = self._weights[names[0]]
        assert weight.name == " + ".join(names), f"{names} are not one run: {weight.name}"
        weight.num_users += 1
        return weight

    def weight_if_any(self, *names: str) -> Weight | None:
        """Return the same, or None if the model has no such parameter."""
        return self.weight(*names) if names[0] in self._weights else None

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter of this rank and its live values in the compute dtype."""
        self.join()
        for bucket in self.buckets:
            for name, shape, offset in bucket.plan.parameters():
                yield name, bucket.parameters[offset : offset + math.prod(shape)].view(shape)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of optimizer state on this rank."""
        return sum(bucket.state_bytes for bucket in self.buckets)

    # --- steps

    def begin_step(self, num_microbatches: int) -> None:
        """Let the first contribution to each gradient overwrite what is there; 0 is a step whose sums never begin.

        For example a bucket of 9 weights with a user each has 36 contributions in a step of 4 micro-batches.
        """
        for bucket, weights in zip(self.buckets, self._weights_of, strict=True):
            bucket.begin_step(num_microbatches * sum(weight.num_users for weight in weights))
        for weight in self._weights.values():
            weight.begin_step()

    def finish_reduce(self) -> Tensor:
        """Sum the gradients into their owners; return the squared norm of what this rank owns of each parameter.

        The result has one float64 number for each row of the table, in its order: sums over ranks and rows have the
        same order under every pipeline layout.
        """
        for number, bucket in enumerate(self.buckets):
            if not bucket.is_reducing:
                self._start_reduce(number)
            if not self.options.overlaps_reduce:
                bucket.finish_reduce()
        for bucket in self.buckets:
            if bucket.is_reducing:
                bucket.finish_reduce()
        squares = torch.zeros(len(self.table), dtype=torch.float64, device=self.mesh.device)
        self._owned.write_squared_norms(squares)
        return squares

    def update(
        self, optim: OptimConfig, lr: float, step: int, *, factor: Tensor, is_bad: Tensor, form: str = "csrc"
    ) -> None:
        """Make one step after `step` steps with the gradients scaled by `factor`; none where `is_bad` is 1.

        All holders take the result. If that overlaps with what follows, a weight's values wait for it, and whoever
        reads any other state calls `join` first.
        """
        self.join()
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self.mesh.device))
            factor.record_stream(self._beside)
            is_bad.record_stream(self._beside)
        with torch.cuda.stream(self._beside):  # of None, it does nothing
            for buckets, intervals in self._updated:
                intervals.update(optim, lr, step, factor=factor, is_bad=is_bad, form=form)
                for bucket in buckets:
                    bucket.start_gather()
        for weight in self._weights.values():
            weight.updated()
        if not self.options.overlaps_gather:
            self.join()

    def join(self) -> None:
        """Wait until all state is up to date; on CUDA the current stream waits, not the host."""
        for bucket in self.buckets:
            bucket.arrive()

    def join_masters(self) -> None:
        """Put split masters together where the gradients are, for a save; without them, only wait as `join`."""
        self.join()
        for bucket in self.buckets:
            bucket.join_masters()

    def clear_moments(self) -> None:
        """Set the moments to zero, as they are before the first step."""
        self.join()
        for bucket in self.buckets:
            for state in bucket.states.values():
                state.zero_()

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the parameters of all holders up to date with the masters of their owners, after a restore."""
        for bucket in self.buckets:
            bucket.publish_masters()
            bucket.start_gather()
        self.join()

    # --- initial values

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the initial values: those of each element depend on the seed, the name and its place alone."""
        wide = wide_dtype(self.options.dtype)
        for bucket in self.buckets:
            for name, shape, offset in bucket.plan.parameters():
                mesh = self.mesh
                place = (shape, mesh.layout, mesh.coords, seed, wide, mesh.device)
                whole = initial_values(name, self.table[name], *place).flatten()
                bucket.parameters[offset : offset + len(whole)].copy_(whole)
                for segment in (each for each in bucket.updated_segments if each.name == name):
                    master = bucket.master[segment.offset :][: segment.stop - segment.start]
                    master.copy_(whole[segment.start : segment.stop])
            bucket.publish_masters()
