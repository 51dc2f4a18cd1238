"""A mixture of experts: in place of one MLP many, of which a router picks some for each token; none is left out.

Source: Shazeer and others 2017; that no token is dropped: MegaBlocks (Gale and others, 2022, arXiv 2211.15841).
"""

from itertools import chain

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
        up = unit.weight(*(f"{prefix}.experts.{name}.weight" for name in ("gate", "up")))
        self.up = GroupedGemm(up, 2, lambda: choices.expert_gradients)
        down = unit.weight(f"{prefix}.experts.down.weight")
        self.down = GroupedGemm(down, kernel=lambda: choices.expert_gradients)
        self.shared = MLP(model, unit, f"{prefix}.shared", cuts.tensor, choices) if model.num_shared_experts else None

    @property
    def experts(self) -> ExpertParallel:
        """Return the ops of experts in the form that is chosen by now."""
        return self.parallel.in_form(self.choices.forms.experts)

    @property
    def is_crowded(self) -> bool:
        """Return whether what is kept for the backward would not fit."""
        return self.balance.limit.is_crowded

    def num_parts(self, num_tokens: int) -> int:
        """Return in how many parts so many tokens travel to their experts."""
        return min(self.choices.expert_parts or 1, num_tokens)

    def widen(self, x_TD: Tensor, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the weights of a token's experts, these, and of each part of tokens the packed gate|up of its rows.

        Behind them are the ways of rows, and the packed gate|up of shared experts, which are beside the tokens' travel.
        """
        experts, num_parts = self.experts, self.num_parts(len(x_TD))
        coming = experts.begin(x_TD, num_parts)
        weights_TK, experts_TK = self.router(x_TD, batch)
        routes = experts.routes(experts_TK, self.num_experts, num_parts)
        shared = () if self.shared is None else self.shared.widen(x_TD, batch)
        packed = experts.widen(x_TD, coming, self.up, routes, self.k)
        return weights_TK, experts_TK, *packed, *chain(*routes), *shared

    def narrow(self, weights_TK: Tensor, experts_TK: Tensor, *others: Tensor) -> Tensor:
        """Return the output for them, and count the tokens of experts."""
        self.balance.count(self.layer, experts_TK)
        num_parts = self.num_parts(len(weights_TK))
        end = num_parts * (1 + self.experts.dispatch.num_routes)
        packed, routes, shared = others[:num_parts], others[num_parts:end], others[end:]
        y_TD = self.experts.narrow(packed, weights_TK, self.down, routes)
        return y_TD if self.shared is None else y_TD + self.shared.narrow(*shared)
