"""ParameterStore: this rank's parameters, their gradients and their optimizer state.

Layers ask it for weights, and hand their gradients to them. After the last backward of a step the gradients are summed
into their owners, the owners update, and all holders take the result. The ranks that hold a parameter own equal parts
of it, so the squared norm of the gradients is a plain sum over owned elements, and so are the pieces of a checkpoint.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import OptimConfig
from trainer.linear.weight import Weight
from trainer.linear.wgrads import Wgrads
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.adamw import IntervalTable
from trainer.ops.dtypes import wide_dtype
from trainer.store.bucket import Bucket
from trainer.store.initial import initial_values
from trainer.store.parameter import Parameter
from trainer.store.plan import Run, plan_buckets


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store keeps its state: `sharded` cuts the optimizer state over the holders."""

    dtype: torch.dtype
    moments: torch.dtype
    bucket_bytes: int
    sharded: bool
    with_optimizer: bool


class ParameterStore:
    """The live parameters of one rank; owned by the training thread, all ranks make the same calls."""

    def __init__(
        self, table: Mapping[str, Parameter], runs: Sequence[Run], mesh: ProcessMesh, options: StoreOptions
    ) -> None:
        self.table, self.mesh, self.options = table, mesh, options
        self.buckets = [
            Bucket(plan, options.dtype, mesh.device, mesh.holders(plan.holders), sharded=options.sharded,
                   moments=options.moments, with_optimizer=options.with_optimizer)
            for plan in plan_buckets(runs, options.bucket_bytes, options.dtype.itemsize)
        ]  # fmt: skip
        self.wgrads, self._weights = Wgrads(), dict[str, Weight]()
        for bucket in self.buckets:
            for run, offset in zip(bucket.plan.runs, bucket.plan.offsets, strict=True):
                self._weights[run.names[0]] = self._handle(bucket, run, offset)
        # views that never change, made once
        numbers = {name: number for number, name in enumerate(table)}
        owned = [(bucket, segment, bucket.owned[0]) for bucket in self.buckets for segment in bucket.owned_segments]
        updated = [
            (bucket, segment, bucket.updated[0]) for bucket in self.buckets for segment in bucket.updated_segments
        ]
        self._owned, self._updated = (
            IntervalTable(
                [
                    bucket.interval(segment, first, decays=table[segment.name].decays, row=numbers[segment.name])
                    for bucket, segment, first in (parts if options.with_optimizer else [])
                ]
            )
            for parts in (owned, updated)
        )

    def _handle(self, bucket: Bucket, run: Run, offset: int) -> Weight:
        first = self.table[run.names[0]]
        part = slice(offset, offset + run.numel)
        gradient = bucket.gradients[part].view(run.shape) if self.options.with_optimizer else None
        name, values = " + ".join(run.names), bucket.parameters[part].view(run.shape)
        contributes = first.contributes_on(self.mesh.coords)
        return Weight(name, values, gradient, contributes=contributes, wgrads=self.wgrads)

    def weight(self, *names: str) -> Weight:
        """Return the handle of a parameter, or of several that were planned as one run."""
        weight = self._weights[names[0]]
        assert weight.name == " + ".join(names), f"{names} are not one run: {weight.name}"
        return weight

    def weight_if_any(self, *names: str) -> Weight | None:
        """Return the same, or None if the model has no such parameter."""
        return self.weight(*names) if names[0] in self._weights else None

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter of this rank and its live values in the compute dtype."""
        for bucket in self.buckets:
            for name, shape, offset in bucket.plan.parameters():
                yield name, bucket.parameters[offset : offset + math.prod(shape)].view(shape)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of optimizer state on this rank."""
        return sum(bucket.state_bytes for bucket in self.buckets)

    # --- steps

    def begin_step(self) -> None:
        """Let the first contribution to each gradient overwrite what is there."""
        for weight in self._weights.values():
            weight.begin_step()

    def finish_reduce(self) -> Tensor:
        """Sum the gradients into their owners; return the squared norm of what this rank owns of each parameter.

        The result has one float64 number for each row of the table, in its order: sums over ranks and rows have the
        same order under every pipeline layout.
        """
        for weight in self._weights.values():
            weight.finish_step()
        for bucket in self.buckets:
            bucket.reduce_gradients()
        squares = torch.zeros(len(self.table), dtype=torch.float64, device=self.mesh.device)
        self._owned.write_squared_norms(squares)
        return squares

    def update(
        self, optim: OptimConfig, lr: float, step: int, *, factor: Tensor, is_bad: Tensor, form: str = "csrc"
    ) -> None:
        """Make one AdamW step after `step` steps with the gradients scaled by `factor`; none where `is_bad` is 1.

        The parameters that this rank updates are up to date afterwards, those of other owners after `gather`.
        """
        self._updated.adamw(optim, lr, step, factor=factor, is_bad=is_bad, form=form)
        for weight in self._weights.values():
            weight.updated()

    def clear_moments(self) -> None:
        """Set the moments to zero, as they are before the first step."""
        for bucket in self.buckets:
            bucket.exp_avg.zero_()
            bucket.exp_avg_sq.zero_()

    def gather(self) -> None:
        """Bring the parameters of all holders up to date with those of their owners."""
        for bucket in self.buckets:
            bucket.all_gather_parameters()

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the parameters of all holders up to date with the masters of their owners, after a restore."""
        for bucket in self.buckets:
            bucket.round_masters()
        self.gather()

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
