"""Chunk: the contiguous layers of one pipeline stage, with the embedding on the first and the head on the last."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from torch import Tensor

from trainer.config import Config
from trainer.config.resolve import cuts_tokens, gathers_keys
from trainer.linear.fp8 import CastCounts
from trainer.mesh.mesh import ProcessMesh
from trainer.model.balance import Balance
from trainer.model.block import Block
from trainer.model.embedding import anchor, embed_tokens, lookup
from trainer.model.fp8 import multiply_in_eight_bits
from trainer.model.head import Head
from trainer.model.host_inputs import HostInputs, host_inputs
from trainer.model.microbatch import MicroBatch
from trainer.model.op_choices import OpChoices
from trainer.model.recompute import Recompute
from trainer.model.stages import stage_ranges
from trainer.ops.attention.slopes import alibi_slopes
from trainer.ops.rope import rotary_frequencies, turns_at
from trainer.parallel.context import ContextParallel
from trainer.parallel.cuts import Cuts
from trainer.parallel.tensor import TensorParallel
from trainer.store.store import ParameterStore
from trainer.store.unit import Border, Unit


def unmarked(_number: int) -> AbstractContextManager[object]:
    """Leave a layer without a mark."""
    return nullcontext()


class Chunk:
    """A model chunk: one of the parts of the model on this rank; owned by the training thread.

    `around_layer` encloses the forward pass of each layer, by its number.
    """

    def __init__(
        self,
        config: Config,
        store: ParameterStore,
        mesh: ProcessMesh,
        choices: OpChoices,
        balance: Balance,
        casts: CastCounts,
        stage: int,
    ) -> None:
        self.config = config
        self.tensor = TensorParallel(mesh.tp, cuts_tokens(config), lambda: choices.token_parts or 1)
        self.context = ContextParallel(mesh.cp, gathers_keys(config))
        model, num_stages = config.model, mesh.layout.num_stages
        cuts = Cuts(self.tensor, self.context, balance.ranks(self.tensor))
        before: Unit | None = None
        if stage == 0:
            before = store.unit("embed", reads_backward=False)
            self.begin = Border(None, before)
            self.embed = before.weight("embed.weight")
            self.positions = before.weight_if_any("pos.weight")
        self.blocks = list[Block]()
        layers = stage_ranges(config, store.table, num_stages)[stage]
        multiply_in_eight_bits(config, mesh, store, casts, layers)
        for place, number in enumerate(layers):
            again = Recompute.of_layer(config.train, place)
            block = Block(model, store, number, cuts, choices, before, again, balance)
            self.blocks.append(block)
            before = self.blocks[-1].unit
        self.host: HostInputs | None = None
        if (host := host_inputs(config, mesh)) is not None:
            self.keep_inputs(host)
        self.around_layer: Callable[[int], AbstractContextManager[object]] = unmarked
        self.end = Border(before, None)  # of a stage without a head
        self.head = Head(config, store, self.tensor, choices, before) if stage == num_stages - 1 else None

    def keep_inputs(self, host: HostInputs) -> None:
        """Let the inputs of layers that are made again be in host memory until then, but for the last of them."""
        self.host = host
        again = [block for block in self.blocks if block.recompute.is_full]
        for block in again:
            block.recompute = replace(block.recompute, host=host, stays=block is again[-1])

    def forward(self, received_TD: Tensor | None, batch: MicroBatch) -> Tensor:
        """Return the activations for the next stage, [T, D]; on the last stage the loss of each token, [S]."""
        x_TD, branch_TD = self.hidden(received_TD, batch)
        if self.head is not None:
            return self.head.losses(x_TD, branch_TD, batch.labels_S, batch.weights_S)
        return self.end.cross(x_TD if branch_TD is None else x_TD + branch_TD)

    def hidden(self, received_TD: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream after this stage's layers, and the branch that is yet to be added to it."""
        halves = self.context.halves(batch.tokens_S, batch.documents, batch.seq_length)
        seen = self.context.seen_runs(batch.runs)
        batch = replace(batch, own_runs=self.tensor.own_runs(batch.runs), halves=halves, seen_runs=seen)
        x_TD = received_TD
        if x_TD is None:
            start = self.begin.cross(anchor(batch.tokens_S.device))
            x_TD = embed_tokens(batch.tokens_S, self.embed, self.tensor, start)
            if self.positions is not None:
                x_TD = x_TD + lookup(batch.own(batch.positions_S), self.positions, start)
            x_TD = batch.drop(x_TD, layer=self.config.model.num_layers, site=0)
        branch_TD: Tensor | None = None
        model = self.config.model
        if model.position == "rope":
            frequencies_H = rotary_frequencies(model, device=x_TD.device)
            batch = replace(batch, turns_SH=turns_at(batch.positions_S, frequencies_H, x_TD.dtype))
        elif model.position == "alibi":
            batch = replace(batch, slopes_N=alibi_slopes(model.num_heads, device=x_TD.device))
        if self.host is not None:
            self.host.begin_pass()
        for block in self.blocks:
            with self.around_layer(block.number):
                x_TD, branch_TD = block(x_TD, branch_TD, batch)
        return x_TD, branch_TD

    def logits(self, received_TD: Tensor | None, batch: MicroBatch, last_B: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary of some tokens, for the last stage."""
        assert self.head is not None, "the last stage has the head"
        assert not self.tensor.cuts_tokens, "the last token of each row is on every rank"
        x_TD, branch_TD = self.hidden(received_TD, batch)
        return self.head.logits(x_TD[last_B], None if branch_TD is None else branch_TD[last_B])
