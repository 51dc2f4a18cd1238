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
from trainer.linear.weight import Access, Weight, Wgrads
from trainer.mesh.layout import Axis
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.dtypes import wide_dtype
from trainer.store.bucket import Bucket, StoreOptions
from trainer.store.leases import LEASES, Leases
from trainer.store.muon import matrix_updates
from trainer.store.optimizers import Updates
from trainer.store.parameter import Parameter, initial_values
from trainer.store.plan import ParameterRun, plan_buckets
from trainer.store.residence import Residence, size_of
from trainer.store.unit import Unit


class ParameterStore:
    """The live parameters of one rank; owned by the training thread, all ranks make the same calls."""

    def __init__(
        self, table: Mapping[str, Parameter], runs: Sequence[ParameterRun], mesh: ProcessMesh, options: StoreOptions
    ) -> None:
        self.table, self.mesh, self.options = table, mesh, options
        self.buckets, access = list[Bucket](), dict[str, Access]()
        for plan in plan_buckets(runs, options.bucket_bytes, options.dtype.itemsize):
            shared = access.setdefault(plan.runs[0].unit, Access(reads=False, adds=False))
            self.buckets.append(Bucket(plan, options, mesh, shared))
        self.residences = self._residences(access)
        self.wgrads, self._found = Wgrads(), dict[str, tuple[Weight, Residence]]()
        for bucket in self.buckets:
            for run in bucket.plan.runs:
                weight = self._handle(bucket, run)
                bucket.add_weight(weight)
                self._found[run.names[0]] = weight, self.residences[run.unit]
        # views that never change, made once
        self._owned = self._intervals(self.buckets, of_owned=True)
        parts = [[bucket] for bucket in self.buckets] if options.overlaps_gather else [self.buckets]
        self._updated = [(part, self._intervals(part)) for part in parts]
        takes_whole = [bucket for bucket in self.buckets if options.with_optimizer and bucket.optimizer.update is None]
        self._matrices = matrix_updates(takes_whole, table, mesh)
        is_beside = options.overlaps_gather and options.with_optimizer and mesh.device.type == "cuda"
        self._beside = torch.cuda.Stream(mesh.device) if is_beside else None

    def _residences(self, access: Mapping[str, Access]) -> dict[str, Residence]:
        """Return where the buckets of each unit of the plan reside, in the order of depth."""
        of_unit = {unit: [bucket for bucket in self.buckets if bucket.plan.runs[0].unit == unit] for unit in access}
        wide, device = wide_dtype(self.options.dtype), self.mesh.device
        sizes = [size_of([each for each in buckets if each.cuts_parameters]) for buckets in of_unit.values()]
        most = len(sizes) if self.options.keeps_gathered else LEASES
        self.parameter_leases = Leases(sizes, self.options.dtype, device, most)
        sizes = [size_of([each for each in buckets if each.cuts_gradients]) for buckets in of_unit.values()]
        self.gradient_leases = Leases(sizes, wide, device, LEASES)
        found = {
            unit: Residence(self.parameter_leases, self.gradient_leases, buckets, access[unit])
            for unit, buckets in of_unit.items()
        }
        for residences, link in ((list(found.values()), "previous"), (list(found.values())[::-1], "following")):
            latest: Residence | None = None
            for residence in residences:
                setattr(residence, link, latest)
                latest = residence if residence.is_gathered else latest
        return found

    def _intervals(self, buckets: Sequence[Bucket], *, of_owned: bool = False) -> Updates:
        """Return what this rank owns of buckets, or updates of them."""
        numbers, found = {name: number for number, name in enumerate(self.table)}, []
        for bucket in buckets if self.options.with_optimizer else ():
            if not of_owned and bucket.optimizer.update is None:
                continue
            first = bucket.owned[0] if of_owned else bucket.updated[0]
            for segment in bucket.owned_segments if of_owned else bucket.updated_segments:
                row = self.table[segment.name]
                part = bucket.part(segment, first, decays=row.decay > 0, row=numbers[segment.name])
                found.append((replace(row, rate=1.0, decay=1.0) if of_owned else row, part))  # a norm has no factors
        return Updates(found)

    def _handle(self, bucket: Bucket, run: ParameterRun) -> Weight:
        first, name = self.table[run.names[0]], " + ".join(run.names)
        values = torch.empty(run.shape, dtype=self.options.dtype, device="meta")  # until the bucket shows what there is
        contributes = first.contributes_on(self.mesh.layout, self.mesh.coords)
        return Weight(
            name, values, None, contributes=contributes, wgrads=self.wgrads, access=bucket.access,
            at_end=lambda: self._end(bucket), ends_each_pass=bucket.cuts_gradients,
        )  # fmt: skip

    def unit(self, name: str, *, reads_backward: bool = True) -> Unit:
        """Return a unit of the model, which asks for its weights; no two have one name."""
        return Unit(name, self._found.get, self.wgrads, reads_backward=reads_backward)

    @property
    def weights(self) -> list[Weight]:
        """Return the handles of all weights of this rank."""
        return [weight for weight, _ in self._found.values()]

    def _end(self, bucket: Bucket) -> None:
        """Begin the sum of a bucket if all its gradients are in, those of a pass if they are cut.

        Holders on two stages are not at the same passes: on a GPU the kernel of the one that is first would wait for
        the other, which waits for what the first has yet to send, and nothing that waits for all kernels could go on.
        """
        if bucket.late:
            return
        if bucket.cuts_gradients:
            bucket.start_reduce(ends_step=self.wgrads.is_last)
            if not self.options.overlaps_reduce:
                bucket.finish_reduce()
        elif self.options.overlaps_reduce and Axis.ENDS not in bucket.group.axes:
            bucket.start_reduce()

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter of this rank and its live values in the compute dtype."""
        for bucket in self.buckets:
            whole = bucket.gathered()
            for name, shape, offset in bucket.plan.parameters():
                yield name, whole[offset : offset + math.prod(shape)].view(shape)

    # --- steps

    def begin_step(self, step: int) -> None:
        """Let the first contribution to each gradient overwrite what is there, and gather what is read first.

        The step is the one that follows `step` steps.
        """
        for bucket in self.buckets:
            bucket.begin_step(step)
        self.parameter_leases.begin_step()
        self.gradient_leases.begin_step()
        for residence in [each for each in self.residences.values() if each.is_gathered][:1]:
            residence.prefetch()

    def finish_reduce(self) -> Tensor:
        """Sum the gradients into their owners; return the squared norm of what this rank owns of each parameter.

        The result has one float64 number for each row of the table, in its order: sums over ranks and rows have the
        same order under every pipeline layout.
        """
        late = [name for bucket in self.buckets for name in bucket.late]
        assert not late, f"the last gradient of {', '.join(late)} has not come"
        for bucket in self.buckets:
            if not bucket.is_reducing and not bucket.cuts_gradients:
                bucket.start_reduce()
            if not self.options.overlaps_reduce:
                bucket.finish_step()
        for bucket in self.buckets:
            bucket.finish_reduce()
        for bucket in self.buckets:
            bucket.finish_step()
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
        with torch.cuda.stream(self._beside), self.mesh.clock.span("update"):  # of no stream, the first does nothing
            for matrices in self._matrices:
                matrices.update(optim, lr, factor=factor, is_bad=is_bad)
            for buckets, intervals in self._updated:
                intervals.update(optim, lr, updates, factor=factor, is_bad=is_bad, late=late, form=form)
                for bucket in buckets:
                    bucket.start_gather()
            for bucket in self.buckets:
                bucket.start_inner_gather()
        self.parameter_leases.forget()
        self.expire()
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
        self.parameter_leases.forget()
        self.expire()
        self.join()

    def expire(self) -> None:
        """Let what was made of the values before be out of date."""
        for weight in self.weights:
            weight.epoch += 1

    # --- initial values

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the initial values: those of each element depend on the seed, the name and its place alone."""
        wide = wide_dtype(self.options.dtype)
        for bucket in self.buckets:
            kept = (bucket.parameters, bucket.resident_segments), (bucket.master, bucket.updated_segments)
            for name, shape, _ in bucket.plan.parameters():
                mesh = self.mesh
                place = (shape, mesh.layout, mesh.coords, seed, wide, mesh.device)
                whole = initial_values(name, self.table[name], *place).flatten()
                for tensor, segments in kept:
                    for segment in (each for each in segments if each.name == name):
                        part = whole[segment.start : segment.stop]
                        tensor[segment.offset :][: len(part)].copy_(part)
            bucket.publish_masters()
        self.expire()
