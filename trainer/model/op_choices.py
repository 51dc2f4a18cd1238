"""Which form of an op a rank's layers take: forms differ in speed and in their last bits, so a run records them."""

import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from threefold.errors import UserError
from trainer.config import Config, OpsConfig
from trainer.config.resolve import longest_row
from trainer.mesh.mesh import ProcessMesh
from trainer.ops import native
from trainer.ops.attention.choose import BACKENDS, backend_named, choose
from trainer.ops.attention.seam import Backend, Mask
from trainer.ops.forms import package


@dataclass(slots=True)
class OpChoices:
    """The forms in use, shared by a rank's layers; owned by the training thread."""

    attention: Backend
    forms: OpsConfig

    @property
    def names(self) -> dict[str, str]:
        """Return the name of each op's form, without those that are csrc."""
        names = {**asdict(self.forms), "attention": self.attention.name}
        return {op: name for op, name in names.items() if name != "csrc"}


def first_choices(config: Config, mesh: ProcessMesh, dtype: torch.dtype) -> OpChoices:
    """Return the configured forms, with attention by a rule; UserError if the device or the installation lacks one.

    Where the device cannot run the native kernels plain torch takes their place, with one warning.
    """
    forms = config.ops
    reason = native.lacks_kernels(mesh.device)
    if reason is not None:
        replaced: Any = {op: "torch" for op, form in asdict(forms).items() if form == "csrc"}
        forms = replace(forms, **replaced)
        if mesh.world.index == 0:
            warnings.warn(f"plain torch takes the place of the native ops on {mesh.device}: {reason}", stacklevel=2)
    for op, module in (("norm", "fused_layer_norm_cuda"), ("adamw", "amp_C")):
        if getattr(config.ops, op) == "apex":
            if mesh.device.type != "cuda":
                raise UserError(f"ops.{op} apex runs on CUDA, not on {mesh.device}", hint=f"--ops.{op} csrc")
            package(module)
    return OpChoices(choose_attention(config, mesh, dtype, None, by_timing=False), forms)


def choose_attention(
    config: Config, mesh: ProcessMesh, dtype: torch.dtype, recorded: str | None, *, by_timing: bool
) -> Backend:
    """Return the backend that the configuration names; else the recorded one if the device can take it; else another.

    On GPUs that is the fastest with the longest rows if `by_timing`, or the first by a rule. All ranks call it: the
    first one chooses for all. Raises UserError if the named one does not take the run's tensors.
    """
    model, tp, head_size = config.model, mesh.layout.tp, config.model.head_size
    num_tokens = config.train.micro_batch_size * longest_row(config)
    q_TNH, k_TKH = (
        torch.empty(num_tokens, max(heads // tp, 1), head_size, dtype=dtype, device=mesh.device)
        for heads in (model.num_heads, model.num_kv_heads)
    )
    mask = _mask_like(config, mesh.device)
    named = config.ops.attention
    if named != "auto":
        backend = backend_named(named)
        refusal = backend.refusal(q_TNH, k_TKH, mask)
        if refusal is not None:
            raise UserError(f"ops.attention {named}: {refusal}", hint="--ops.attention auto")
        return backend
    usable = [backend.name for backend in BACKENDS if backend.refusal(q_TNH, k_TKH, mask) is None]
    name = recorded if recorded in usable else choose(q_TNH, k_TKH, mask, deterministic=not by_timing)
    number = torch.tensor([BACKENDS.index(backend_named(name))], device=mesh.device)
    return BACKENDS[int(mesh.world.broadcast(number))]


def _mask_like(config: Config, device: torch.device) -> Mask:
    """Return a mask like those of the run: if attention does not cross documents, rows of four equal ones."""
    num_rows, row_length = config.train.micro_batch_size, longest_row(config)
    if not config.data.document_mask:
        return Mask.of_rows(row_length)
    length = -(-row_length // 4)
    rows = [row * row_length for row in range(num_rows)]
    bounds = [start for row in rows for start in range(row, row + row_length, length)]
    bounds.append(num_rows * row_length)
    return Mask.of_documents(torch.tensor(bounds, dtype=torch.int32, device=device), length)
