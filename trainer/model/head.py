"""The head: the last norm, and logits over a vocabulary whose rows are cut over the tensor-parallel group."""

from torch import Tensor

from trainer.config import Config
from trainer.linear.linear import linear
from trainer.model.norm import Norm
from trainer.model.op_choices import OpChoices
from trainer.ops.cross_entropy import VocabularyPart
from trainer.ops.soft_cap import soft_cap
from trainer.parallel.cross_entropy import linear_cross_entropy, tokens_at_once, vocab_cross_entropy
from trainer.parallel.tensor import TensorParallel
from trainer.store.store import ParameterStore
from trainer.store.unit import Border, Unit


class Head:
    """Norm and output matrix, which is the embedding's if they are tied: two units behind the unit `before`.

    If logits are made in parts, the matrix's gradient is made in the forward, and the norm's in the backward.
    """

    def __init__(
        self, config: Config, store: ParameterStore, tensor: TensorParallel, choices: OpChoices, before: Unit | None
    ) -> None:
        model, group = config.model, tensor.group
        self.tensor, self.choices, self.group, self.vocab_size = tensor, choices, group, model.vocab_size
        self.cap = model.logit_softcap
        self.z_loss, self.max_bytes = config.train.z_loss, config.train.max_logits_gib * 2**30
        unit, self.matrix_unit = store.unit("norm"), store.unit("head")
        self.norm = Norm(model, unit, "norm", choices, Border(before, unit))
        self.norm_end, self.inner = Border(unit, None), Border(unit, self.matrix_unit)
        self.end = Border(self.matrix_unit, None)
        self.matrix = self.matrix_unit.weight("embed.weight" if model.tie_embeddings else "head.weight")
        num_rows = self.matrix.shape[0]
        self.first_row = group.index * num_rows
        self.num_true_rows = max(min(model.vocab_size - self.first_row, num_rows), 0)

    def losses(self, x_TD: Tensor, branch_TD: Tensor | None, labels_S: Tensor, weights_S: Tensor | None) -> Tensor:
        """Return the loss of each token, [S], the same on all ranks of the group; in training with the z-loss.

        There the step's loss is their sum times weights_S, which an evaluation leaves out.
        """
        x_SD = self.tensor.enter(self.norm(x_TD, branch_TD)[0])
        z_loss = 0.0 if weights_S is None else self.z_loss
        part = VocabularyPart(self.first_row, self.num_true_rows, self.choices.forms.cross_entropy, self.cap)
        at_once = tokens_at_once(len(x_SD), self.matrix.shape[0] * x_SD.itemsize, self.max_bytes)
        if at_once < len(x_SD):
            x_SD = self.norm_end.cross(x_SD)
            with self.matrix_unit.passing(adds=weights_S is not None):
                return linear_cross_entropy(
                    x_SD, self.matrix, labels_S, part, self.group, weights_T=weights_S, z_loss=z_loss,
                    tokens_at_once=at_once,
                )  # fmt: skip
        x_SD = self.inner.cross(x_SD)
        logits_SV = linear(x_SD, self.matrix)
        return self.end.cross(vocab_cross_entropy(logits_SV, labels_S, part, self.group, z_loss=z_loss))

    def logits(self, x_TD: Tensor, branch_TD: Tensor | None) -> Tensor:
        """Return the logits of the whole vocabulary, [T, vocabulary], which are not differentiated."""
        h_TD = self.inner.cross(self.norm(x_TD, branch_TD)[0])
        logits_TV = self.end.cross(linear(h_TD, self.matrix))
        if self.cap:
            soft_cap(logits_TV, self.cap)
        rows_RTV = self.group.all_gather_rows(logits_TV)
        return rows_RTV.movedim(0, 1).flatten(1)[:, : self.vocab_size]
