"""Which form of an op a rank's layers take: forms differ in speed and in their last bits, so a run records them."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from threefold.errors import UserError
from trainer.config import Config, OpsConfig
from trainer.config.resolve import gathers_keys, layer_windows, longest_row
from trainer.linear.grouped import gradient_kernels
from trainer.mesh.mesh import ProcessMesh
from trainer.ops import native
from trainer.ops.attention.choose import BACKENDS, REPEATING, backend_named, choose
from trainer.ops.attention.seam import Backend, Mask
from trainer.ops.forms import package
from trainer.parallel import expert_parts, token_parts
from trainer.parallel.context import ContextParallel

GRADIENTS = "expert-gradients"  # under which a run records the kernel
KERNELS = ("quack", "triton", None)  # that all ranks have if one has the one before
ALIGNED = 8  # elements of bf16 that rows of a grouped product begin at a multiple of: 16 bytes


@dataclass(slots=True)
class OpChoices:
    """The forms in use, shared by a rank's layers; owned by the training thread.

    `windows` are those of all layers of the model. `attention` has a backend for each `Mask.kind` of theirs. Tokens
    travel to experts of other ranks in `expert_parts`, if any do, and over tp in `token_parts`, if they are cut.
    Gradients of experts are the kernel of that name.
    """

    attention: dict[str, Backend]
    forms: OpsConfig
    windows: tuple[int | None, ...]
    token_parts: int | None
    expert_parts: int | None
    expert_gradients: str | None

    @property
    def names(self) -> dict[str, str]:
        """Return the name of each op's form, without those that are csrc; attention is an op a kind of mask."""
        forms = {op: name for op, name in asdict(self.forms).items() if op != "attention" and name != "csrc"}
        numbers = {token_parts.NAME: self.token_parts, expert_parts.NAME: self.expert_parts}
        parts = {name: str(number) for name, number in numbers.items() if number}
        parts |= {GRADIENTS: self.expert_gradients} if self.expert_gradients else {}
        return forms | parts | {_op(kind): backend.name for kind, backend in self.attention.items()}


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
    if config.model.num_experts and mesh.device.type == "cuda":
        check_experts(config, mesh, dtype)
    attention = choose_attention(config, mesh, dtype, {}, by_timing=False)
    kernel = choose_gradients(config, mesh, dtype, {})
    of_tokens = token_parts.choose_token_parts(config, mesh, dtype, {}, by_timing=False)
    of_experts = expert_parts.choose_expert_parts(config, mesh, dtype, {}, forms.experts, kernel, by_timing=False)
    return OpChoices(attention, forms, layer_windows(config), of_tokens, of_experts, kernel)


def choose_gradients(config: Config, mesh: ProcessMesh, dtype: torch.dtype, recorded: Mapping[str, str]) -> str | None:
    """Return the kernel of experts' gradients, which all ranks have; None for the loop, or without experts.

    It is the recorded one, of a run that recorded none Triton's, or else the first that the device has.
    """
    if not config.model.num_experts or mesh.device.type != "cuda":
        return None
    usable = gradient_kernels(mesh.device, dtype)
    known = recorded.get(GRADIENTS, "triton" if recorded else "")
    here = KERNELS.index(known if known in usable else usable[0] if usable else None)
    return KERNELS[int(mesh.world.all_reduce(torch.tensor(here, device=mesh.device), "max"))]


def check_experts(config: Config, mesh: ProcessMesh, dtype: torch.dtype) -> None:
    """Raise UserError if torch's grouped products do not take experts of this size; warn once if not this dtype."""
    if dtype != torch.bfloat16:
        if mesh.world.index == 0:
            text = f"products of experts are a loop on {mesh.device} for which the host waits: torch groups bf16 alone"
            warnings.warn(text, stacklevel=2)
        return
    tp = mesh.layout.tp
    for name, parts in (("expert_ffn_hidden_size", tp), ("hidden_size", 1)):
        size = getattr(config.model, name)
        if size // parts % ALIGNED:
            fits = -(-size // (ALIGNED * parts)) * ALIGNED * parts
            text = f"model.{name} {size}: grouped products of bf16 take a multiple of {ALIGNED * parts}"
            raise UserError(text, hint=f"--model.{name.replace('_', '-')} {fits}")


def choose_attention(
    config: Config, mesh: ProcessMesh, dtype: torch.dtype, recorded: Mapping[str, str], *, by_timing: bool
) -> dict[str, Backend]:
    """Return the backend that the configuration names; else the recorded one if the device can take it; else another.

    Weights are dropped by one alone, which is named then.

    There is one for each kind of mask in the model, whichever layers a rank has. On GPUs another is the fastest with
    the longest rows if `by_timing`, or the first by a rule. All ranks call it: the first one chooses for all. Raises
    UserError if the named one does not take the run's tensors.
    """
    model, like = config.model, _mask_like(config, mesh.device)
    num_queries = num_keys = config.train.micro_batch_size * longest_row(config)
    num_ranks = mesh.layout.tp * mesh.layout.cp
    if gathers_keys(config):  # a half of this rank's tokens
        tokens_T = torch.empty(num_keys // mesh.layout.cp, device=mesh.device)
        documents = None if like.cu_q is None else (like.cu_q, like.max_q)
        like = ContextParallel(mesh.cp, gathers_keys=True).halves(tokens_T, documents, longest_row(config))[-1]
        num_queries, num_ranks = len(tokens_T) // 2, mesh.layout.tp
        num_keys = num_keys if like.cu_k is not None else like.max_k
    q_TNH, k_TKH = (
        torch.empty(number, max(heads // num_ranks, 1), model.head_size, dtype=dtype, device=mesh.device)
        for number, heads in ((num_queries, model.num_heads), (num_keys, model.num_kv_heads))
    )
    slopes = torch.zeros(q_TNH.shape[1], device=mesh.device) if model.position == "alibi" else None
    masks = [replace(like, window=window, alibi=slopes) for window in dict.fromkeys(layer_windows(config))]
    named = "reference" if model.attention_dropout else config.ops.attention
    if named != "auto":
        backend = backend_named(named)
        for mask in masks:
            refusal = backend.refusal(q_TNH, k_TKH, mask)
            if refusal is not None:
                raise UserError(f"ops.attention {named}: {refusal}", hint="--ops.attention auto")
        return {mask.kind: backend for mask in masks}
    names, backends = [], [each for each in BACKENDS if each.name in REPEATING or not config.train.deterministic]
    for mask in masks:
        usable = [backend.name for backend in backends if backend.refusal(q_TNH, k_TKH, mask) is None]
        name = recorded.get(_op(mask.kind))
        names.append(name if name in usable else choose(q_TNH, k_TKH, mask, deterministic=not by_timing))
    numbers = torch.tensor([BACKENDS.index(backend_named(name)) for name in names], device=mesh.device)
    chosen = mesh.world.broadcast(numbers).tolist()
    return {mask.kind: BACKENDS[number] for mask, number in zip(masks, chosen, strict=True)}


def _op(kind: str) -> str:
    """Return under which name a run records the attention of a kind of mask: `attention`, `attention-window-4096`."""
    return f"attention-{kind}" if kind else "attention"


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
