"""ParameterStore: this rank's parameters, their gradients and their optimizer state.

Units of the model ask it for weights, and hand their gradients to them. After a unit's last pass of a step these are
summed into their owners, the owners update, and all holders take the result. The ranks that hold a parameter own equal
parts of it, so the squared norm of the gradients is a plain sum over owned elements, and so are the pieces of a
checkpoint.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainer.config import OptimConfig
from trainer.linear.weight import Weight, Wgrads
from trainer.mesh.layout import Axis
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.dtypes import wide_dtype
from trainer.store.bucket import Bucket, StoreOptions
from trainer.store.optimizers import Updates
from trainer.store.parameter import Parameter, initial_values
from trainer.store.plan import ParameterRun, plan_buckets
from trainer.store.unit import Unit


class ParameterStore:
    """The live parameters of one rank; owned by the training thread, all ranks make the same calls."""

    def __init__(
        self, table: Mapping[str, Parameter], runs: Sequence[ParameterRun], mesh: ProcessMesh, options: StoreOptions
    ) -> None:
        self.table, self.mesh, self.options = table, mesh, options
        self.buckets = [
            Bucket(plan, options, mesh.device, mesh.along(plan.runs[0].holders))
            for plan in plan_buckets(runs, options.bucket_bytes, options.dtype.itemsize)
        ]
        self.wgrads, self._found = Wgrads(), dict[str, tuple[Weight, Bucket]]()
        for bucket in self.buckets:
            for run, offset in zip(bucket.plan.runs, bucket.plan.offsets, strict=True):
                bucket.weights.append(self._handle(bucket, run, offset))
                self._found[run.names[0]] = bucket.weights[-1], bucket
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

    def _handle(self, bucket: Bucket, run: ParameterRun, offset: int) -> Weight:
        first = self.table[run.names[0]]
        part = slice(offset, offset + run.numel)
        gradient = bucket.gradients[part].view(run.shape) if self.options.with_optimizer else None
        name, values = " + ".join(run.names), bucket.parameters[part].view(run.shape)
        contributes = first.contributes_on(self.mesh.layout, self.mesh.coords)
        return Weight(
            name, values, gradient, contributes=contributes, wgrads=self.wgrads, access=bucket.access,
            at_end=lambda: self._end(bucket),
        )  # fmt: skip

    def unit(self, name: str) -> Unit:
        """Return a unit of the model, which asks for its weights; no two have one name."""
        return Unit(name, self._found.get, self.wgrads)

    def _end(self, bucket: Bucket) -> None:
        """Begin the sum of a bucket if all its gradients are in.

        Holders on two stages are not at the same passes: on a GPU the kernel of the one that is first would wait for
        the other, which waits for what the first has yet to send, and nothing that waits for all kernels could go on.
        """
        if self.options.overlaps_reduce and Axis.ENDS not in bucket.group.axes and not bucket.late:
            bucket.start_reduce()

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter of this rank and its live values in the compute dtype."""
        self.join()
        for bucket in self.buckets:
            for name, shape, offset in bucket.plan.parameters():
                yield name, bucket.parameters[offset : offset + math.prod(shape)].view(shape)

    # --- steps

    def begin_step(self) -> None:
        """Let the first contribution to each gradient overwrite what is there."""
        for bucket in self.buckets:
            bucket.begin_step()

    def finish_reduce(self) -> Tensor:
        """Sum the gradients into their owners; return the squared norm of what this rank owns of each parameter.

        The result has one float64 number for each row of the table, in its order: sums over ranks and rows have the
        same order under every pipeline layout.
        """
        late = [name for bucket in self.buckets for name in bucket.late]
        assert not late, f"the last gradient of {', '.join(late)} has not come"
        for bucket in self.buckets:
            if not bucket.is_reducing:
                bucket.start_reduce()
            if not self.options.overlaps_reduce:
                bucket.finish_reduce()
        for bucket in self.buckets:
            if bucket.is_reducing:
                bucket.finish_reduce()
        squares = torch.zeros(len(self.table), dtype=torch.float64, device=self.mesh.device)
        self._owned.write_squared_norms(squares)
        return squares

    def update(
        self,
        optim: OptimConfig,
        lr: float,
        updates: int,
        *,
        factor: Tensor,
        is_bad: Tensor,
        late: tuple[Tensor, int] | None = None,
        form: str = "csrc",
    ) -> None:
        """Make one more update with the gradients scaled by `factor`; none where `is_bad` is 1.

        There were `updates` before it, less a number on the device that is `late`, with the most that it can be.
        All holders take the result. If that overlaps with what follows, a weight's values wait for it, and whoever
        reads any other state calls `join` first.
        """
        self.join()
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self.mesh.device))
            for number in (factor, is_bad) if late is None else (factor, is_bad, late[0]):
                number.record_stream(self._beside)
        with torch.cuda.stream(self._beside):  # of None, it does nothing
            for buckets, intervals in self._updated:
                intervals.update(optim, lr, updates, factor=factor, is_bad=is_bad, late=late, form=form)
                for bucket in buckets:
                    bucket.start_gather()
        for weight, _ in self._found.values():
            weight.epoch += 1
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
