"""Stage: the contiguous layers of one pipeline rank, with the embedding on the first and the head on the last."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ckptkit import stage_layers
from trainer.config import Config
from trainer.layers import Block, Noise, Norm, Rotation
from trainer.loss import vocab_cross_entropy
from trainer.mesh.mesh import ProcessMesh
from trainer.tensor_parallel import VocabMatrix, enter

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass reads: [B, S] each; `noise` is None where nothing is dropped."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    loss_mask: Tensor
    noise: Noise | None


class Stage(nn.Module):
    """The part of the model on this rank; parameters have no memory until a bucket gives them some."""

    def __init__(self, config: Config, mesh: ProcessMesh) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        model, group = config.model, mesh.tp
        self.dtype = DTYPES[config.train.precision]
        numbers = stage_layers(model.num_layers, mesh.layout.pp, mesh.coords.pp)
        with torch.device("meta"):
            if mesh.is_first_stage:
                self.embed = VocabMatrix(model.vocab_size, model.hidden_size, group=group)
                if model.position == "learned":
                    self.pos = nn.Embedding(config.train.seq_length, model.hidden_size)
            self.layers = nn.ModuleDict({str(number): Block(model, number, group) for number in numbers})
            if mesh.is_last_stage:
                self.norm = Norm(model, model.hidden_size)
                if not (mesh.is_first_stage and model.tie_embeddings):
                    self.head = VocabMatrix(model.vocab_size, model.hidden_size, group=group)

    def forward(self, received_BSD: Tensor | None, batch: MicroBatch) -> Tensor:
        """Activations for the next stage [B, S, D]; on the last stage the loss of each token [B, S]."""
        x_BSD = self.hidden(received_BSD, batch)
        if not self.mesh.is_last_stage:
            return x_BSD
        head = self._head()
        logits_BSV = head.logits(enter(self.norm(x_BSD), self.mesh.tp))
        loss_T = vocab_cross_entropy(
            logits_BSV.flatten(0, 1),
            batch.labels.flatten(),
            first_row=head.first_row,
            num_true_rows=head.num_true_rows,
            group=self.mesh.tp,
        )
        return loss_T.view_as(batch.labels)

    def hidden(self, received_BSD: Tensor | None, batch: MicroBatch) -> Tensor:
        """Return the residual stream after this stage's layers."""
        model = self.config.model
        if received_BSD is None:
            x_BSD = self.embed.embed(batch.tokens)
            if model.position == "learned":
                x_BSD = x_BSD + self.pos(batch.positions)
            if batch.noise is not None:
                x_BSD = batch.noise.apply(x_BSD, layer=model.num_layers, site=0)
        else:
            x_BSD = received_BSD
        rotation = None
        if model.position == "rope":
            head_size = model.hidden_size // model.num_heads
            rotation = Rotation.of(batch.positions, head_size, model.rope_theta, self.dtype)
        for block in self.layers.values():
            x_BSD = block(x_BSD, rotation, batch.noise)
        return x_BSD

    def logits(self, batch: MicroBatch) -> Tensor:
        """Whole-vocabulary logits of the last position [B, vocabulary]; for a model on one pipeline stage."""
        last_BD = self.norm(self.hidden(None, batch))[:, -1]
        head = self._head()
        local_BV = head.logits(last_BD)
        return torch.cat(self.mesh.tp.all_gather_rows(local_BV).unbind(), -1)[:, : self.config.model.vocab_size]

    def _head(self) -> VocabMatrix:
        return self.head if hasattr(self, "head") else self.embed
