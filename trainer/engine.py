"""Engine: one rank's part of the model and its state, and the training step over the whole mesh.

Loss, gradient norm and updates do not depend on the layout: the loss is the sum of token losses over the unmasked
tokens of the global batch, whose count is known before the first backward; the norm counts each global element once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from ckptkit import rank_stages
from trainer.config import Config
from trainer.config.resolve import cuts_tokens, gathers_keys, schedule_of, settled
from trainer.linear.fp8 import CastCounts
from trainer.mesh.group import Group
from trainer.mesh.mesh import ProcessMesh
from trainer.model.balance import Balance
from trainer.model.chunk import Chunk
from trainer.model.microbatch import Batch, DropoutKey, MicroBatch, Scale, sums_by
from trainer.model.op_choices import choose_attention, choose_gradients, first_choices
from trainer.model.table import local_runs, parameter_table
from trainer.ops.dtypes import wide_dtype
from trainer.parallel.context import ContextParallel
from trainer.parallel.expert_parts import choose_expert_parts
from trainer.parallel.token_parts import choose_token_parts
from trainer.pipeline.actions import Action, most_sends
from trainer.pipeline.executor import Executor
from trainer.pipeline.graph import PassGraph
from trainer.pipeline.schedules import rank_actions
from trainer.store.lr import learning_rate
from trainer.store.norms import LayerNorms
from trainer.store.options import StoreOptions
from trainer.store.store import ParameterStore
from trainer.store.window import Streaming, streaming_of
from trainer.verdict import Outcome, PendingStats, StepStats, Verdict

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Engine:
    """The live state of one rank: zeros until `initialise` or a restore; owned by the training thread.

    `with_optimizer=False` leaves gradients, masters and moments out.
    """

    def __init__(
        self, config: Config, mesh: ProcessMesh, *, with_optimizer: bool = True, streaming: Streaming | None = None
    ) -> None:
        self.config, self.mesh, self.with_optimizer = settled(config), mesh, with_optimizer
        self.dtype = DTYPES[config.train.precision]
        self.table = parameter_table(config)
        runs = local_runs(config, self.table, mesh.layout, mesh.coords)
        options = StoreOptions.of(config, self.dtype, with_optimizer=with_optimizer)
        self.moments, self.store = (
            options.moments,
            ParameterStore(
                self.table, runs, mesh, options, streaming or streaming_of(config, mesh, with_optimizer=with_optimizer)
            ),
        )
        self.verdict = Verdict.of(config, mesh.device)
        self.choices = first_choices(config, mesh, self.dtype)
        self.balance = Balance(config, mesh, wide_dtype(self.dtype))
        self.casts = CastCounts(config.fp8, config.model.num_layers, mesh.device)
        if mesh.layout.ep > 1:
            limit = self.balance.limit
            self.verdict.causes.append(lambda loss, norm: limit.is_exceeded(mesh.world) * Outcome.REPEATED)
        self.context = ContextParallel(mesh.cp, gathers_keys(config))
        self.chunks = {
            stage: Chunk(config, self.store, mesh, self.choices, self.balance, self.casts, stage)
            for stage in rank_stages(mesh.layout, mesh.coords.pp)
        }
        self._shape_TD = 0, config.model.hidden_size  # of what stages hand over, of the micro-batches in work
        self._num_microbatches = 0
        self.pipeline: Executor[MicroBatch] = Executor(
            self.link_of,
            lambda: torch.empty(self._shape_TD, dtype=self.dtype, device=mesh.device),
            self.store.wgrads,
            max_sends=most_sends(mesh.layout.pp, mesh.layout.num_stages),
        )
        self.pipeline.around = self._around
        self.norms = LayerNorms(self.store, config.log.norms_interval)
        is_recorded = config.train.cuda_graphs and mesh.device.type == "cuda"
        self.graph = PassGraph(self._passes, self.store.expire) if is_recorded else None
        if mesh.page is not None:
            self.pipeline.note = mesh.page.act

    def initialise(self) -> None:
        """Draw the initial values of all parameters."""
        self.store.initialise(self.config.train.seed)

    def choose_ops(self, recorded: Mapping[str, str], *, by_timing: bool) -> None:
        """Take the forms of ops that a run recorded, or choose them: on GPUs by timing, if asked to."""
        choices, ours = self.choices, (self.config, self.mesh, self.dtype, recorded)
        choices.attention = choose_attention(*ours, by_timing=by_timing)
        choices.expert_gradients = choose_gradients(*ours)
        choices.token_parts = choose_token_parts(*ours, by_timing=by_timing)
        choices.expert_parts = choose_expert_parts(
            *ours, choices.forms.experts, choices.expert_gradients, by_timing=by_timing
        )

    def train_step(self, step: int, batch: Batch) -> StepStats:
        """Take the step that follows `step` steps; UserError if the loss or the gradient norm is not finite."""
        return self.start_step(step, batch).read()

    def start_step(
        self, step: int, batch: Batch, *, before_update: Callable[[], object] = lambda: None
    ) -> PendingStats:
        """Start the step that follows `step` steps; on a GPU it is only enqueued, and the host waits for nothing.

        `before_update` is called once all gradients are there, or will be, and before any of the state changes. A step
        whose loss or gradient norm is not finite changes nothing, nor does any after it: reading it raises. A void step
        changes nothing either: AdamW counts updates, not steps, and the learning rate goes on by steps.
        """
        mesh, optim = self.mesh, self.config.optim
        mesh.clock.take()
        counting = mesh.dp.start("all_reduce", batch.loss_mask.sum(dtype=torch.float64), "sum")
        num_tokens = cache(counting.wait)  # by the first loss: it is behind the gathers, which the forward is beside
        scale = cache(lambda: self.verdict.scaled(1 / num_tokens().clamp(min=1)).to(wide_dtype(self.dtype)))
        self.balance.begin_step(step)
        self.casts.begin_step(step)
        if self.graph is None:
            loss, squares = self._passes(step, batch, scale)
        else:  # which waits for nothing outside of it
            self.store.rest()
            loss, squares = self.graph.run(step, batch, scale)
        # each tensor-parallel rank of the last stage has its data-parallel share of the loss
        share = loss if mesh.coords.tp == 0 else torch.zeros_like(loss)
        parts = share.view(1), squares, self.balance.counts_LE.flatten(), self.casts.sums.flatten()
        sums = mesh.world.all_reduce(torch.cat(parts)).split([len(part) for part in parts])
        norms = self.norms.of_step(step + 1, sums[1], self.verdict.scale)
        factor = self.verdict.judge(step + 1, sums[0][0], sums[1], num_tokens())
        before_update()
        self.balance.update(sums[2], self.verdict.is_void)
        lr, form = learning_rate(optim, step), self.choices.forms.adamw
        updates, late = step - self.verdict.known_voids, self.verdict.late_voids()
        self.store.update(optim, lr, updates, factor=factor, is_bad=self.verdict.is_void, late=late, form=form)
        others = self.balance.loads, self.casts.shares(sums[3]), norms
        return PendingStats(self.verdict.numbers, lr, mesh.clock.take(), self.verdict.noting(), others)

    def _passes(self, step: int, batch: Batch, scale: Scale) -> tuple[Tensor, Tensor]:
        """Run the passes of a step; return its loss and the squared norms of its gradients: this rank's share."""
        self.store.begin_step(step)
        loss = self._run(
            schedule_of(self.config),
            self._microbatches(step, batch, scale=scale),
            lambda loss_T, microbatch: (loss_T * microbatch.loss_mask_S).sum() * scale(),
        )
        self.pipeline.note("U", 0, 0)
        squares = self.store.finish_reduce()
        if self.graph is not None:  # nor does anything outside wait for what is in it
            self.store.rest()
        return loss, squares

    @torch.no_grad()
    def eval_batch(self, batch: Batch) -> tuple[float, ...]:
        """Return the sum of the token losses and the number of unmasked tokens over all data-parallel ranks.

        Behind these come both of each of the batch's groups. None are numbers where a rank's batch is spoilt.
        """
        mesh, size, parts = self.mesh, batch.num_groups, self._microbatches(0, batch)
        losses = self._run(
            "forward", parts, lambda loss_T, part: sums_by(loss_T * part.loss_mask_S, part.groups_S, size)
        )
        counts = sums_by(batch.loss_mask.flatten(), None if batch.groups is None else batch.groups.flatten(), size)
        counts_here = mesh.coords.pp == mesh.layout.pp - 1 and mesh.coords.tp == 0
        own = counts * (mesh.cp.index == 0)  # they are of all of its samples' tokens
        share = torch.stack([losses.expand(1 + size), own], 1).flatten()
        return tuple(mesh.world.all_reduce(share * float(counts_here)).tolist())

    def close(self) -> None:
        """Let go of what keeps groups from ending; the state stays."""
        if self.graph is not None:
            self.graph.close()

    @torch.no_grad()
    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits of the token after each row, [B, vocabulary]; for a model on one pipeline stage."""
        tokens, seq_length = tokens_BS.flatten(), tokens_BS.shape[1]
        places = torch.arange(len(tokens), device=tokens.device)
        batch = MicroBatch(tokens, tokens, places % seq_length, places, seq_length, (range(len(tokens)),), None)
        return self.chunks[0].logits(None, batch, places[seq_length - 1 :: seq_length])

    def _run(
        self, schedule: str, batches: Sequence[MicroBatch], reduce_loss: Callable[[Tensor, MicroBatch], Tensor]
    ) -> Tensor:
        """Return the sum of `reduce_loss` of the token losses over the micro-batches, float64; 0 off the last stage."""

        def forward(chunk: Chunk) -> Callable[[Tensor | None, MicroBatch], Tensor]:
            if chunk.head is None:
                return chunk.forward
            return lambda received_TD, batch: reduce_loss(chunk.forward(received_TD, batch), batch)

        layout, rank = self.mesh.layout, self.mesh.coords.pp
        num_parts = layout.tp if cuts_tokens(self.config) else 1
        self._shape_TD = len(batches[0].tokens_S) // num_parts, self.config.model.hidden_size
        self._num_microbatches = len(batches)
        actions = rank_actions(schedule, layout.pp, len(batches), layout.virtual, rank)
        losses = self.pipeline.run(actions, {stage: forward(chunk) for stage, chunk in self.chunks.items()}, batches)
        return sum(losses, torch.zeros((), dtype=torch.float64, device=self.mesh.device))

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        """Count the time of a pass, and note where it ends in the work of a GPU.

        The waits in the passes of one micro-batch count for all: of one in the middle, whose ranks are in step.
        """
        clock, times = self.mesh.clock, self._num_microbatches
        with clock.span(action.kind), clock.sampling(times if action.microbatch == times // 2 else 0):
            yield
        if self.mesh.page is not None:
            self.mesh.page.mark(self.mesh.clock.last, *action)

    def link_of(self, transfer: Action) -> Group:
        """Return the group of two ranks that a transfer takes."""
        to_next = {"SF": self.mesh.activations.following, "RF": self.mesh.activations.previous,
                   "SB": self.mesh.gradients.previous, "RB": self.mesh.gradients.following}  # fmt: skip
        link = to_next[transfer.kind]
        assert link is not None, f"{transfer} has a stage at its other end"
        return link

    def _microbatches(self, step: int, batch: Batch, *, scale: Scale | None = None) -> list[MicroBatch]:
        """Return the micro-batches of a step, whose loss is `scale` times that of all tokens, or of an evaluation."""
        train, model = self.config.train, self.config.model
        drops = scale is not None and (model.dropout or model.attention_dropout)
        key = DropoutKey(model.dropout, train.seed, step, model.attention_dropout) if drops else None
        rows = zip(batch.tokens, batch.labels, batch.positions, batch.loss_mask, strict=True)
        microbatches, seq_length = [], batch.tokens.shape[-1]
        for number, parts in enumerate(rows):
            place = number * self.mesh.dp.size + self.mesh.dp.index
            first = (batch.first_sample + place * train.micro_batch_size) * seq_length
            tokens, labels, positions, loss_mask = (part.flatten() for part in parts)
            documents = None if batch.documents is None else batch.documents[number]
            arrays = tokens, labels, positions, loss_mask
            runs = (range(first, first + len(tokens)),)
            groups_S = None if batch.groups is None else batch.groups[number].flatten()
            whole = MicroBatch(*arrays, seq_length, runs, key, scale, documents=documents, groups_S=groups_S)
            microbatches.append(whole.part(self.context.own_runs(runs[0], seq_length)))
        return microbatches
