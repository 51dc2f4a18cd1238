"""A mixture of experts: in place of one MLP many, of which a router picks some for each token; none is left out.

Source: Shazeer and others 2017; that no token is dropped: MegaBlocks (Gale and others, 2022, arXiv 2211.15841).
"""

from torch import Tensor

from trainer.config import ModelConfig
from trainer.linear.grouped import GroupedGemm
from trainer.model.balance import Balance
from trainer.model.microbatch import MicroBatch
from trainer.model.mlp import MLP
from trainer.model.op_choices import OpChoices
from trainer.model.router import Router
from trainer.parallel.cuts import Cuts
from trainer.parallel.expert import ExpertParallel
from trainer.store.unit import Unit


class MoE:
    """Router, experts, and maybe shared ones, one MLP that each token goes through too.

    `widen` and `narrow` are as those of MLP: up to what the last products read, and from there on.
    """

    def __init__(
        self,
        model: ModelConfig,
        unit: Unit,
        layer: int,
        cuts: Cuts,
        choices: OpChoices,
        balance: Balance,
    ) -> None:
        self.num_experts, self.k, self.layer, self.balance = model.num_experts, model.experts_per_token, layer, balance
        prefix = f"layers.{layer}.mlp"
        self.choices, self.parallel = choices, cuts.experts
        self.router = Router(model, unit, f"{prefix}.router", balance.of(layer, cuts.tensor))
        self.up = GroupedGemm(unit.weight(*(f"{prefix}.experts.{name}.weight" for name in ("gate", "up"))), 2)
        self.down = GroupedGemm(unit.weight(f"{prefix}.experts.down.weight"))
        self.shared = MLP(model, unit, f"{prefix}.shared", cuts.tensor, choices) if model.num_shared_experts else None

    @property
    def experts(self) -> ExpertParallel:
        """Return the ops of experts in the form that is chosen by now."""
        return self.parallel.in_form(self.choices.forms.experts)

    @property
    def is_crowded(self) -> bool:
        """Return whether what is kept for the backward would not fit."""
        return self.balance.limit.is_crowded

    def widen(self, x_TD: Tensor, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the packed gate|up of all rows, the weights of a token's experts, these, and the way of rows.

        Behind them is the packed gate|up of shared experts.
        """
        weights_TK, experts_TK = self.router(x_TD, batch)
        routes = self.experts.routes(experts_TK, self.num_experts)
        shared = () if self.shared is None else self.shared.widen(x_TD, batch)
        packed_R2F = self.experts.widen(x_TD, self.up, routes, self.k)
        return packed_R2F, weights_TK, experts_TK, *routes, *shared

    def narrow(self, packed_R2F: Tensor, weights_TK: Tensor, experts_TK: Tensor, *others: Tensor) -> Tensor:
        """Return the output for them, and count the tokens of experts."""
        self.balance.count(self.layer, experts_TK)
        count = self.experts.dispatch.num_routes
        routes, shared = others[:count], others[count:]
        y_TD = self.experts.narrow(packed_R2F, weights_TK, self.down, routes)
        return y_TD if self.shared is None else y_TD + self.shared.narrow(*shared)
