"""The transformer block: norms, attention and MLP around the residual stream.

Letters of shapes in this folder: S tokens of a micro-batch, T those of them that this rank has between cut linears
(all, unless sequence parallel cuts them), D hidden size, N query heads and K key-value heads of this rank, H head size,
C = (N + 2 K) H, F feed-forward size of this rank, V vocabulary rows of this rank.
"""

from torch import Tensor

from trainer.config import ModelConfig
from trainer.model.attention import Attention
from trainer.model.microbatch import MicroBatch
from trainer.model.mlp import MLP
from trainer.model.norm import Norm
from trainer.model.op_choices import OpChoices
from trainer.parallel.tensor import TensorParallel
from trainer.store.store import ParameterStore
from trainer.store.unit import Border, Unit

SITE_ATTENTION, SITE_MLP = 0, 1  # the dropouts of a block; the embedding counts as a layer after the last


class Block:
    """One pre-norm layer behind the unit `before`: two units; `number` is its place in the whole model."""

    def __init__(
        self,
        model: ModelConfig,
        store: ParameterStore,
        number: int,
        tensor: TensorParallel,
        choices: OpChoices,
        before: Unit | None,
    ) -> None:
        prefix, self.number = f"layers.{number}", number
        first, self.unit = store.unit(f"{prefix}.attn"), store.unit(f"{prefix}.mlp")
        self.norm1 = Norm(model, first, f"{prefix}.norm1", choices, Border(before, first))
        self.attention = Attention(model, first, f"{prefix}.attn", tensor, choices, choices.windows[number])
        self.norm2 = Norm(model, self.unit, f"{prefix}.norm2", choices, Border(first, self.unit))
        self.mlp = MLP(model, self.unit, f"{prefix}.mlp", tensor, choices)

    def __call__(self, x_TD: Tensor, branch_TD: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the branch that is yet to be added to it, as it takes them.

        Whoever comes next adds the two: a norm in its own pass, or else the end of the stage.
        """
        return self.after_norm(*self.norm1(x_TD, branch_TD), batch)

    def after_norm(self, h_TD: Tensor, x_TD: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the same from the stream x and its norm h."""
        branch_TD = batch.drop(self.attention(h_TD, batch), layer=self.number, site=SITE_ATTENTION)
        h_TD, x_TD = self.norm2(x_TD, branch_TD)
        return x_TD, batch.drop(self.mlp(h_TD), layer=self.number, site=SITE_MLP)
