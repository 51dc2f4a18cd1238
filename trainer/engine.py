"""Engine: one rank's model, gradients and optimizer state, and the training step over the whole mesh.

Loss, gradient norm and updates do not depend on the layout: the loss is the sum of token losses over the unmasked
tokens of the global batch, whose count is known before the first backward; the norm counts each global element once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckptkit import Piece, Placement, TensorInfo
from threefold.errors import UserError
from trainer.bucket import Bucket, attach, cut_into_buckets, squared_norm, wide_dtype
from trainer.config import Config
from trainer.layers import Noise
from trainer.mesh.group import Group
from trainer.mesh.mesh import ProcessMesh
from trainer.optim import update
from trainer.parameters import Parameter, initialise, parameter_table
from trainer.pipeline.actions import Action
from trainer.pipeline.executor import Executor
from trainer.pipeline.schedules import rank_actions
from trainer.stage import MicroBatch, Stage

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32"}
MASTER, MOMENTS = "optim.master/", ("optim.exp_avg/", "optim.exp_avg_sq/")


@dataclass(frozen=True, slots=True)
class Batch:
    """A data-parallel rank's share of one step on its device: [num_microbatches, micro_batch_size, seq_length] each.

    `first_sample` is the global number of the step's first sample, over all ranks.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    loss_mask: Tensor
    first_sample: int


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step, in global terms; `comm_s` and `bubble_s` are this rank's waits in collectives and for neighbours."""

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    comm_s: float
    bubble_s: float


class Engine:
    """The live state of one rank; `trains=False` leaves gradients and moments out."""

    def __init__(self, config: Config, mesh: ProcessMesh, *, trains: bool = True) -> None:
        self.config, self.mesh, self.trains = config, mesh, trains
        self.table = parameter_table(config)
        self.stage = Stage(config, mesh)
        self.stage.train(trains)
        shapes = {name: parameter.shape for name, parameter in self.stage.named_parameters()}
        # a tied head away from its embedding is a copy: the first stage owns the values and their optimizer state
        is_copy = self.table["head.weight"].placement.tied_to is not None
        tied_shape = shapes.pop("head.weight", None) if is_copy else None
        dtype, device = self.stage.dtype, mesh.device
        self.buckets = [
            Bucket(part, dtype, device, mesh.dp, cut=config.parallel.zero_stage > 0, trains=trains)
            for part in cut_into_buckets(shapes, config.parallel.bucket_mib << 20, dtype.itemsize)
        ]
        self._gradients: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        self._tied_gradients: list[Tensor] = []
        for bucket in self.buckets:
            self._values |= dict(bucket.views(bucket.parameters))
            self._gradients |= dict(bucket.views(bucket.gradients)) if trains else {}
        if tied_shape is not None:
            self._values["head.weight"] = torch.zeros(tied_shape, dtype=dtype, device=device)
            if trains:
                self._tied_gradients = [torch.zeros(tied_shape, dtype=wide_dtype(dtype), device=device)]
                self._gradients["head.weight"] = self._tied_gradients[0]
        for name, values in self._values.items():
            attach(self.stage, name, values, self._gradients.get(name))
        self._initialise()
        train = config.train
        shape = (train.micro_batch_size, train.seq_length, config.model.hidden_size)
        self.pipeline: Executor[MicroBatch] = Executor(
            self._link_of, lambda: torch.empty(shape, dtype=dtype, device=device)
        )

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds."""
        return sum(bucket.state_bytes for bucket in self.buckets)

    # --- steps

    def train_step(self, step: int, batch: Batch, *, before_update: Callable[[], object] = lambda: None) -> StepStats:
        """Take the step that follows `step` steps; UserError where the loss or the gradient norm is not finite.

        `before_update` is called once all gradients are there and before any of the state changes.
        """
        mesh, config = self.mesh, self.config
        mesh.clock.read()
        num_tokens = mesh.dp.all_reduce(batch.loss_mask.sum(dtype=torch.float64))
        scale = 1 / num_tokens.clamp(min=1)
        for gradients in self._flat_gradients():
            gradients.zero_()
        loss = self._run_schedule(
            config.parallel.schedule,
            self._microbatches(step, batch),
            lambda losses, microbatch: (losses * microbatch.loss_mask).sum() * scale.to(losses.dtype),
        )
        self._reduce_gradients()
        # each tensor-parallel rank of the last stage holds its data-parallel share of the loss
        sums = torch.stack([loss if mesh.coords.tp == 0 else torch.zeros_like(loss), self._squared_norm()])
        total_loss, squares = mesh.world.all_reduce(sums).tolist()
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        before_update()
        if not (math.isfinite(total_loss) and math.isfinite(norm)):
            raise UserError(
                f"step {step + 1}: the loss is {total_loss}, the gradient norm {norm}",
                hint="lower --lr, or train the step in a wider --train.precision",
            )
        clip = config.optim.clip
        if clip and norm > clip:
            for bucket in self.buckets:
                bucket.owned_gradients.mul_(clip / norm)
        lr = update(self.buckets, config.optim, step, lambda name: self.table[name].decays)
        self._publish()
        waits = mesh.clock.read()
        return StepStats(
            total_loss, norm, lr, int(num_tokens), comm_s=waits.get("comm", 0.0), bubble_s=waits.get("bubble", 0.0)
        )

    @torch.no_grad()
    def eval_batch(self, batch: Batch) -> tuple[float, int]:
        """Sum of the token losses and number of unmasked tokens of a batch over all data-parallel ranks."""
        mesh = self.mesh
        loss = self._run_schedule(
            "forward",
            self._microbatches(0, batch, drops=False),
            lambda losses, microbatch: (losses * microbatch.loss_mask).sum(dtype=torch.float64),
        )
        count = batch.loss_mask.sum(dtype=torch.float64)
        counts_here = mesh.is_last_stage and mesh.coords.tp == 0
        sums = torch.stack([loss, count]) * float(counts_here)
        total_loss, num_tokens = mesh.world.all_reduce(sums).tolist()
        return total_loss, int(num_tokens)

    @torch.no_grad()
    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Logits of the token after each row, [B, vocabulary]; for a model on one pipeline stage."""
        assert self.mesh.layout.pp == 1, "generation runs on one pipeline stage"
        positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        unused = torch.empty(0)
        return self.stage.logits(MicroBatch(tokens_BS, unused, positions_BS, unused, None))

    def _link_of(self, transfer: Action) -> Group:
        links = self.mesh.activations if transfer.kind in ("SF", "RF") else self.mesh.gradients
        link = links.following if transfer.kind in ("SF", "RB") else links.previous
        assert link is not None, f"{transfer} of stage {transfer.stage} has no other end"
        return link

    def _run_schedule(
        self, name: str, microbatches: Sequence[MicroBatch], reduce_loss: Callable[[Tensor, MicroBatch], Tensor]
    ) -> Tensor:
        """Return the sum of `reduce_loss` of the token losses over the micro-batches, float64; 0 off the last stage."""
        mesh = self.mesh

        def chunk(received: Tensor | None, microbatch: MicroBatch) -> Tensor:
            out = self.stage(received, microbatch)
            return reduce_loss(out, microbatch) if mesh.is_last_stage else out

        actions = rank_actions(name, mesh.layout.pp, len(microbatches), mesh.coords.pp)
        losses = self.pipeline.run(actions, {mesh.coords.pp: chunk}, microbatches)
        return sum(losses, torch.zeros((), dtype=torch.float64, device=mesh.device))

    def _microbatches(self, step: int, batch: Batch, *, drops: bool = True) -> list[MicroBatch]:
        train, p = self.config.train, self.config.model.dropout if drops else 0.0
        rows = zip(batch.tokens, batch.labels, batch.positions, batch.loss_mask, strict=True)
        microbatches = []
        for number, (tokens, labels, positions, loss_mask) in enumerate(rows):
            place = number * self.mesh.dp.size + self.mesh.dp.index
            first_sample = batch.first_sample + place * train.micro_batch_size
            noise = Noise(p, train.seed, step, first_sample) if p else None
            microbatches.append(MicroBatch(tokens, labels, positions, loss_mask, noise))
        return microbatches

    def _flat_gradients(self) -> list[Tensor]:
        return [bucket.gradients for bucket in self.buckets] + self._tied_gradients

    @property
    def _tied_name(self) -> str:
        """The live name of the tied matrix on a first or last stage."""
        return "embed.weight" if self.mesh.is_first_stage else "head.weight"

    def _reduce_gradients(self) -> None:
        mesh = self.mesh
        for name, gradients in self._gradients.items():
            if self.table[name].is_partial:
                mesh.tp.all_reduce(gradients)
        if self.config.model.tie_embeddings and mesh.ends.size > 1:
            mesh.ends.all_reduce(self._gradients[self._tied_name])
        for bucket in self.buckets:
            bucket.reduce_gradients()

    def _squared_norm(self) -> Tensor:
        """Return this rank's part of the squared gradient norm: each global element counts on one rank only."""
        own = squared_norm(self.buckets, lambda segment: self._is_first_replica(segment.name))
        return own if self.config.parallel.zero_stage or self.mesh.dp.index == 0 else torch.zeros_like(own)

    def _publish(self) -> None:
        for bucket in self.buckets:
            bucket.publish()
        if self.config.model.tie_embeddings and self.mesh.ends.size > 1:
            self.mesh.ends.broadcast(self._values[self._tied_name])

    @torch.no_grad()
    def _initialise(self) -> None:
        mesh = self.mesh
        for bucket in self.buckets:
            wide = wide_dtype(self.stage.dtype)
            for name, values in bucket.views(bucket.parameters):
                whole = torch.empty(values.shape, dtype=wide)
                initialise(whole, name, self.table[name], mesh.layout, mesh.coords, self.config.train.seed)
                values.copy_(whole)
                for segment in bucket.segments:
                    if segment.name == name:
                        segment.of(bucket.master).copy_(whole.flatten()[segment.start : segment.stop])
        self._publish()

    # --- checkpoints

    def tensors(self) -> list[TensorInfo]:
        """Return the checkpoint's global tensor table, the same on every rank.

        Masters for bf16, else the parameters.
        """
        dtype = DTYPE_NAMES[wide_dtype(self.stage.dtype)]
        prefixes = (self._master_prefix, *MOMENTS)
        infos = []
        for prefix in prefixes:
            for name, row in self.table.items():
                placement = row.placement
                if placement.tied_to is None:
                    infos.append(TensorInfo(prefix + name, dtype, row.shape, placement))
                elif prefix == self._master_prefix:
                    infos.append(TensorInfo(prefix + name, dtype, row.shape, _tied_under(prefix, row)))
        return infos

    def pieces(self) -> list[Piece]:
        """Return what this rank saves, as views of the live state: every global element is saved by one rank."""
        if not self.config.parallel.zero_stage and self.mesh.dp.index > 0:
            return []
        return [
            piece
            for piece in self._state_pieces(self._master_prefix, moments=True)
            if self._is_first_replica(piece.name.rpartition("/")[2])
        ]

    def _is_first_replica(self, name: str) -> bool:
        return self.table[name].placement.is_first_replica(self.mesh.layout, self.mesh.coords)

    def restore_pieces(self, stored: Mapping[str, TensorInfo], *, moments: bool = True) -> list[Piece]:
        """Return what this rank reads from a checkpoint with the tensor table `stored`, as views of the live state.

        A parameter comes from `<name>` or, where the checkpoint has none, from its fp32 master. Call `after_restore`
        when they are filled.
        """
        has_parameters = "embed.weight" in stored
        other = "" if has_parameters or MASTER + "embed.weight" not in stored else MASTER
        return self._state_pieces(other, moments=moments and self.trains)

    def after_restore(self) -> None:
        """Derive all that a checkpoint does not hold: compute copies, other ranks' intervals, the tied head."""
        with torch.no_grad():
            self._publish()

    @property
    def _master_prefix(self) -> str:
        return MASTER if self.stage.dtype == torch.bfloat16 else ""

    def _state_pieces(self, master_prefix: str, *, moments: bool) -> list[Piece]:
        pieces = []
        for bucket in self.buckets:
            states = [(master_prefix, bucket.master)]
            if moments:
                states += zip(MOMENTS, (bucket.exp_avg, bucket.exp_avg_sq), strict=True)
            for segment in bucket.segments:
                row = self.table[segment.name]
                box = row.placement.local_box(segment.name, row.shape, self.mesh.layout, self.mesh.coords)
                stop = min(segment.stop, box.numel)  # vocabulary padding lies behind the box's rows
                for prefix, state in states:
                    if segment.start < stop:
                        data = segment.of(state)[: stop - segment.start]
                        pieces.append(Piece(prefix + segment.name, box, segment.start, stop, data))
        return pieces


def _tied_under(prefix: str, row: Parameter) -> Placement:
    return replace(row.placement, tied_to=prefix + str(row.placement.tied_to))
