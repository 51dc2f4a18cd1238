"""ParameterStore: this rank's parameters, their gradients and their optimizer state.

Units of the model ask it for weights, and hand their gradients to them. After a unit's last pass of a step these are
summed into their owners, the owners update, and all holders take the result. The ranks that hold a parameter own equal
parts of it, so the squared norm of the gradients is a plain sum over owned elements, and so are the pieces of a
checkpoint.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count

import torch
from torch import Tensor

from trainer.config import OptimConfig
from trainer.linear.weight import Access, Weight, Wgrads
from trainer.mesh.layout import Axis
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.dtypes import wide_dtype
from trainer.ops.squares import Squares
from trainer.store.bucket import Bucket, StateParts
from trainer.store.leases import LEASES, Leases
from trainer.store.muon import matrix_updates
from trainer.store.optimizers import OPTIMIZERS, Updates
from trainer.store.options import StoreOptions
from trainer.store.parameter import Parameter, initial_values
from trainer.store.plan import BucketPlan, ParameterRun, plan_buckets
from trainer.store.residence import Residence, size_of
from trainer.store.unit import Unit
from trainer.store.window import Streaming, Window, cuts_of


class ParameterStore:
    """The live parameters of one rank; owned by the training thread, all ranks make the same calls."""

    def __init__(
        self,
        table: Mapping[str, Parameter],
        runs: Sequence[ParameterRun],
        mesh: ProcessMesh,
        options: StoreOptions,
        streaming: Streaming | None = None,
    ) -> None:
        """Make the buckets; with `streaming` updates take masters and states from host memory."""
        self.table, self.mesh, self.options = table, mesh, options
        new_state = partial(_on_device, mesh.device) if streaming is None else streaming.new_state
        self.buckets, access = list[Bucket](), dict[str, Access]()
        plans = plan_buckets(runs, options.bucket_bytes, options.dtype.itemsize)
        if streaming is not None:
            streaming.reserve(sum(self._state_bytes(plan) for plan in plans))
        for plan in plans:
            shared = access.setdefault(plan.runs[0].unit, Access(reads=False, adds=False))
            self.buckets.append(Bucket(plan, options, mesh, shared, new_state))
        self.residences = self._residences(access)
        self.wgrads, self._found = Wgrads(), dict[str, tuple[Weight, Residence]]()
        for bucket in self.buckets:
            for run in bucket.plan.runs:
                weight = self._handle(bucket, run)
                bucket.add_weight(weight)
                self._found[run.names[0]] = weight, self.residences[run.unit]
        # views that never change, made once
        self._squares = self._squares_of(self.buckets if options.with_optimizer else ())
        takes_whole = [bucket for bucket in self.buckets if options.with_optimizer and bucket.optimizer.update is None]
        self._matrices = matrix_updates(takes_whole, table, mesh)
        self._window: Window | None = None
        self._updated = self._updates() if streaming is None else self._streamed_updates(streaming)
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

    def _state_bytes(self, plan: BucketPlan) -> int:
        """Return the bytes of masters that are apart and states that this rank has of a bucket."""
        options, num_holders = self.options, self.mesh.along(plan.runs[0].holders).size
        wide = wide_dtype(options.dtype)
        master = 0 if wide == options.dtype else 2 if options.splits_master else wide.itemsize
        states = len(OPTIMIZERS[plan.runs[0].optimizer].states) * options.moments.itemsize
        return plan.size(num_holders) // (num_holders if options.sharded else 1) * (master + states)

    def _updates(self) -> list[tuple[list[Bucket], list[Updates]]]:
        """Return updates of what is on the device, each with the buckets that may be gathered behind it."""
        others = [bucket for bucket in self.buckets if bucket.optimizer.update is not None]
        some = [[bucket] for bucket in others] if self.options.overlaps_gather else [others]
        parts = [[(bucket, *bucket.updated, bucket.state) for bucket in buckets] for buckets in some]
        return [(buckets, [self._intervals(each)]) for buckets, each in zip(some, parts, strict=True)]

    def _streamed_updates(self, streaming: Streaming) -> list[tuple[list[Bucket], list[Updates]]]:
        """Return updates of pieces of what is in host memory, in the order of the window's."""
        pieces = list[tuple[Bucket, int, int, dict[str, Tensor]]]()
        for bucket in self.buckets:
            streamed = bucket.streamed
            size = sum(tensor.itemsize for tensor in streamed.values())
            for start, stop in cuts_of(len(bucket.master), size, streaming.piece_bytes):
                pieces.append((bucket, start, stop, {name: part[start:stop] for name, part in streamed.items()}))
        self._window = Window([list(parts.values()) for *_, parts in pieces], streaming, self.mesh.device)
        updates = {id(bucket): list[Updates]() for bucket in self.buckets}
        for (bucket, start, stop, parts), views in zip(pieces, self._window.views, strict=True):
            live = dict(zip(parts, views, strict=True))
            first = bucket.updated[0] + start
            state = StateParts(first, live.pop("", bucket.master[start:stop]), live)
            updates[id(bucket)].append(self._intervals([(bucket, first, bucket.updated[0] + stop, state)]))
        return [([bucket], updates[id(bucket)]) for bucket in self.buckets]

    def _intervals(self, parts: Sequence[tuple[Bucket, int, int, StateParts]]) -> Updates:
        """Return updates of the positions [start, stop) of buckets, whose masters and states are in their parts."""
        numbers, found = {name: number for number, name in enumerate(self.table)}, []
        for bucket, start, stop, state in parts if self.options.with_optimizer else ():
            for segment in bucket.plan.segments(start, stop) if bucket.optimizer.update is not None else ():
                row = self.table[segment.name]
                part = bucket.part(segment, start, state, decays=row.decay > 0, row=numbers[segment.name])
                found.append((row, part))
        return Updates(found)

    def _squares_of(self, buckets: Sequence[Bucket]) -> Squares:
        """Return the squared norms of what this rank owns of the gradients of buckets."""
        numbers = {name: number for number, name in enumerate(self.table)}
        owned = [(bucket, segment) for bucket in buckets for segment in bucket.owned_segments]
        gradients = [bucket.tensors(segment, bucket.owned[0], bucket.state).gradient for bucket, segment in owned]
        return Squares(gradients, [numbers[segment.name] for _, segment in owned])

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
        if self._window is not None:
            self._window.begin_step()
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
        self._squares.write(squares)
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
            numbers = count()
            for buckets, parts in self._updated:
                for intervals in parts:
                    with nullcontext() if self._window is None else self._window.updating(next(numbers)):
                        intervals.update(optim, lr, updates, factor=factor, is_bad=is_bad, late=late, form=form)
                for bucket in buckets:
                    bucket.start_gather()
            for matrices in self._matrices:
                for bucket in matrices.update(optim, lr, factor=factor, is_bad=is_bad, form=form):
                    bucket.start_gather()
            for bucket in self.buckets:
                bucket.start_inner_gather()
        self.expire()
        if not self.options.overlaps_gather:
            self.join()

    def join(self) -> None:
        """Wait until all state is up to date; on CUDA the current stream waits, not the host."""
        for bucket in self.buckets:
            bucket.arrive()

    def rest(self) -> None:
        """Wait as `join`, and for what was gathered ahead and sums of passes: then nothing is under way here."""
        self.join()
        for leases in (self.parameter_leases, self.gradient_leases):
            leases.settle()

    def join_masters(self) -> None:
        """Put split masters together where the gradients are, for a save; without them, only wait as `join`.

        The host waits for what it has of the state itself.
        """
        self.join()
        self._settle()
        for bucket in self.buckets:
            bucket.join_masters()

    def _settle(self) -> None:
        if self._window is not None:
            self._window.settle()

    def clear_moments(self) -> None:
        """Set the moments to zero, as they are before the first step."""
        self.join()
        self._settle()
        for bucket in self.buckets:
            for state in bucket.states.values():
                state.zero_()

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the parameters of all holders up to date with the masters of their owners, after a restore."""
        self._settle()
        for bucket in self.buckets:
            bucket.publish_masters()
            bucket.start_gather()
        self.expire()
        self.join()

    def expire(self) -> None:
        """Let what was made of the values before, or gathered of them, be out of date."""
        self.parameter_leases.forget()
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


def _on_device(device: torch.device, size: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)
