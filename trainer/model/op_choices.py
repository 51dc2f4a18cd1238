"""Which form of an op a rank's layers take: forms differ in speed and in their last bits, so a run records them."""

from dataclasses import dataclass

import torch

from trainer.config import Config
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.attention.choose import BACKENDS, backend_named, choose
from trainer.ops.attention.seam import Backend, Mask


@dataclass(slots=True)
class OpChoices:
    """The forms in use, shared by a rank's layers; owned by the training thread."""

    attention: Backend

    @property
    def names(self) -> dict[str, str]:
        """Return the name of the form of each op that has several."""
        return {"attention": self.attention.name}


def choose_attention(
    config: Config, mesh: ProcessMesh, dtype: torch.dtype, recorded: str | None, *, by_timing: bool
) -> Backend:
    """Return the recorded backend if the device can take it; else, on GPUs, the fastest if `by_timing`, or by a rule.

    All ranks call it: the first one chooses for all.
    """
    model, train, tp = config.model, config.train, mesh.layout.tp
    num_tokens, head_size = train.micro_batch_size * train.seq_length, model.head_size
    q_TNH, k_TKH = (
        torch.empty(num_tokens, max(heads // tp, 1), head_size, dtype=dtype, device=mesh.device)
        for heads in (model.num_heads, model.num_kv_heads)
    )
    mask = _mask_like(config, mesh.device)
    usable = [backend.name for backend in BACKENDS if backend.refusal(q_TNH, k_TKH, mask) is None]
    name = recorded if recorded in usable else choose(q_TNH, k_TKH, mask, deterministic=not by_timing)
    number = torch.tensor([BACKENDS.index(backend_named(name))], device=mesh.device)
    return BACKENDS[int(mesh.world.broadcast(number))]


def _mask_like(config: Config, device: torch.device) -> Mask:
    """Return a mask like those of the run: if attention does not cross documents, rows of four equal ones."""
    train = config.train
    if not config.data.document_mask:
        return Mask.of_rows(train.seq_length)
    length = -(-train.seq_length // 4)
    rows = [row * train.seq_length for row in range(train.micro_batch_size)]
    bounds = [start for row in rows for start in range(row, row + train.seq_length, length)]
    bounds.append(train.micro_batch_size * train.seq_length)
    return Mask.of_documents(torch.tensor(bounds, dtype=torch.int32, device=device), length)
