"""The transformer block: norms, attention and MLP around the residual stream.

Letters of shapes in this folder: S tokens of a micro-batch (of those, what cp leaves
this rank), T those of them that this rank has between cut linears
(all, unless sequence parallel cuts them), D hidden size, N query heads and K key-value heads of this rank, H head size,
C = (N + 2 K) H, F feed-forward size of this rank, V vocabulary rows of this rank, E experts, K of a token also
its experts, R = S K rows of tokens, one for each expert that one goes to.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from trainer.config import ModelConfig
from trainer.config.resolve import has_experts
from trainer.model.attention import Attention
from trainer.model.balance import Balance
from trainer.model.microbatch import MicroBatch
from trainer.model.mlp import MLP
from trainer.model.moe import MoE
from trainer.model.norm import Norm
from trainer.model.op_choices import OpChoices
from trainer.model.recompute import Outer, Recompute, Region
from trainer.parallel.cuts import Cuts
from trainer.store.store import ParameterStore
from trainer.store.unit import Border, Unit

SITE_ATTENTION, SITE_MLP = 0, 1  # the dropouts of a block; the embedding counts as a layer after the last


class Block:
    """One pre-norm layer behind the unit `before`: two units; `number` is its place in the whole model.

    `recompute` says what of it the backward makes again.
    """

    def __init__(
        self,
        model: ModelConfig,
        store: ParameterStore,
        number: int,
        cuts: Cuts,
        choices: OpChoices,
        before: Unit | None,
        recompute: Recompute,
        balance: Balance,
    ) -> None:
        prefix, self.number, self.recompute = f"layers.{number}", number, recompute
        first, self.unit = store.unit(f"{prefix}.attn"), store.unit(f"{prefix}.mlp")
        self.norm1 = Norm(model, first, f"{prefix}.norm1", choices, Border(before, first))
        self.attention = Attention(model, first, number, cuts.tensor, cuts.context, choices)
        self.norm2 = Norm(model, self.unit, f"{prefix}.norm2", choices, Border(first, self.unit))
        self.mlp = (
            MoE(model, self.unit, number, cuts, choices, balance)
            if has_experts(model, number)
            else MLP(model, self.unit, f"{prefix}.mlp", cuts.tensor, choices)
        )

    def __call__(self, x_TD: Tensor, branch_TD: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the branch that is yet to be added to it, as it takes them.

        Whoever comes next adds the two: a norm in its own pass, or else the end of the stage.
        """
        if self.recompute.is_full:
            kept: list[Tensor] = []
            spared = kept if self.recompute.keeps_attention else None
            host, stays = self.recompute.host, self.recompute.stays
            keep = None if host is None else partial(host.put, stays=stays)
            region = Region(self.norm1, partial(self._up_to_down, batch=batch, spared=spared), kept, keep)
            return region.run(x_TD, branch_TD, partial(self._from_down, batch=batch))

        def attend(h_TD: Tensor) -> tuple[Tensor]:
            return (self.attention.attend(h_TD, batch),)

        x_TD, branch_TD = self._half("attention", attend, self.attention.project, x_TD, branch_TD)
        branch_TD = batch.drop(branch_TD, layer=self.number, site=SITE_ATTENTION)
        return self._half(
            "mlp", partial(self.mlp.widen, batch=batch), partial(self._from_down, batch=batch), x_TD, branch_TD
        )

    def _half(
        self,
        module: str,
        inner: Callable[[Tensor], tuple[Tensor, ...]],
        outer: Outer,
        x_TD: Tensor,
        branch_TD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the stream and the branch of attention or the MLP: outer(inner(the norm of the stream))."""
        norm = self.norm1 if module == "attention" else self.norm2
        if module in self.recompute.modules or (module == "mlp" and self.mlp.is_crowded):
            return Region(norm, lambda h_TD, x_TD: (x_TD, *inner(h_TD))).run(x_TD, branch_TD, outer)
        if self.recompute.modules:
            return Region(norm, lambda h_TD, x_TD: (x_TD, h_TD)).run(x_TD, branch_TD, lambda h_TD: outer(*inner(h_TD)))
        h_TD, x_TD = norm(x_TD, branch_TD)
        return x_TD, outer(*inner(h_TD))

    def _up_to_down(
        self, h_TD: Tensor, x_TD: Tensor, *, batch: MicroBatch, spared: list[Tensor] | None
    ) -> tuple[Tensor, ...]:
        """Return the stream after attention, and what the MLP's last linear reads, from the first norm and its sum."""
        branch_TD = self.attention.project(self.attention.attend(h_TD, batch, spared))
        h_TD, x_TD = self.norm2(x_TD, batch.drop(branch_TD, layer=self.number, site=SITE_ATTENTION))
        return x_TD, *self.mlp.widen(h_TD, batch)

    def _from_down(self, *widened: Tensor, batch: MicroBatch) -> Tensor:
        return batch.drop(self.mlp.narrow(*widened), layer=self.number, site=SITE_MLP)
