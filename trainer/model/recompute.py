"""What of a layer is made again in the backward pass, and the region of a layer that is.

A region begins with a norm and ends before a linear. Kept is the residual stream that the norm reads; the linear keeps
the region in place of its input. The linear's backward is the first that needs this input. Then the region runs once
more, with a graph of its own, and the region's backward is the backward of that graph. So no product is made again that
the backward does not read: the linear's own is outside. Nothing random is kept, as dropout masks are a function of a
token's place. Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from trainer.config import TrainConfig
from trainer.model.host_inputs import HostInputs, LayerInput
from trainer.model.norm import Norm
from trainer.ops.once import differentiable_once

# from a norm and the stream: the stream, a linear's input, and what else the linear reads
Inner = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
Outer = Callable[..., Tensor]  # a linear, and what follows it


@dataclass(frozen=True, slots=True)
class Recompute:
    """What is made again: the `modules` of a layer, or all of it if it `is_full`, which may spare attention's result.

    Norms are made again with any module. A full one's input may go to `host`, or as the last of its stage it `stays`.
    """

    modules: frozenset[str] = frozenset()
    is_full: bool = False
    keeps_attention: bool = False
    host: HostInputs | None = None
    stays: bool = False

    @classmethod
    def of_layer(cls, train: TrainConfig, place: int) -> "Recompute":
        """Return what is made again of the layer at a place of its stage."""
        if train.recompute == "none" or 0 < train.recompute_num_layers <= place:
            return cls()
        if train.recompute == "full":
            return cls(is_full=True, keeps_attention=train.recompute_keep == "attention")
        return cls(frozenset({"norms", *train.recompute_modules}))


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A norm and what follows it up to a linear's input.

    `results` passes results of attention that are not made again: out of the first run, and into the second. `keep`
    takes the stream in place of the graph, if a backward follows.
    """

    norm: Norm
    inner: Inner
    results: list[Tensor] = field(default_factory=list)
    keep: Callable[[Tensor], LayerInput] | None = None

    def run(self, x_TD: Tensor, branch_TD: Tensor | None, outer: Outer) -> tuple[Tensor, Tensor]:
        """Return the stream, and what `outer` makes of the linear's input, which is made again in the backward."""
        region = self if torch.is_grad_enabled() else replace(self, keep=None)
        x_TD, *reads = _MadeAgain.apply(x_TD, branch_TD, region)
        with _kept_as_node(reads):
            return x_TD, outer(*reads)


@contextmanager
def _kept_as_node(reads: Sequence[Tensor]) -> Iterator[None]:
    """Let what saves one of these tensors inside keep the node of the graph that makes them again."""
    node = reads[0].grad_fn
    numbers = {_place(read): number for number, read in enumerate(reads)}

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        number = numbers.get(_place(saved)) if saved.numel() else None  # else all are at one place
        return saved if number is None else partial(_read, node, number)

    with saved_tensors_hooks(pack, lambda packed: packed if isinstance(packed, Tensor) else packed()):
        yield


def _place(tensor: Tensor) -> tuple[int, object, torch.Size]:
    """Return where a tensor is; what has only a shape has a storage without an address."""
    if tensor.is_meta:
        return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape
    return tensor.data_ptr(), 0, tensor.shape


def _read(node: Any, number: int) -> Tensor:
    """Return the linear's input, number 0, or another of what it reads."""
    _, (_, *reads) = _made(node)
    return reads[number].detach()


def _made(node: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the stream that a region begins with and what the region made of it, which runs if it has not yet."""
    if node.made is None:
        region: Region = node.region
        saved = [tensor.detach() for tensor in node.saved_tensors]
        x_TD, *region.results[:] = saved if node.input is None else [node.input.read(), *saved]
        with torch.enable_grad():
            h_TD, sum_TD = region.norm(x_TD.requires_grad_())
            node.made = x_TD, region.inner(h_TD, sum_TD)
        region.results.clear()
    return node.made


class _MadeAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, branch_TD: Tensor | None, region: Region) -> tuple[Tensor, ...]:
        h_TD, x_TD = region.norm(x_TD, branch_TD)
        outputs = region.inner(h_TD, x_TD)
        ctx.input = None if region.keep is None else region.keep(x_TD)
        ctx.save_for_backward(*([x_TD] if ctx.input is None else []), *region.results)
        region.results.clear()
        ctx.mark_non_differentiable(*(out for out in outputs if not out.is_floating_point()))
        ctx.region, ctx.made = region, None
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, outputs = _made(ctx)
        ctx.made = None
        read_by = [number for number, out in enumerate(outputs) if out.requires_grad]
        (dx_TD,) = torch.autograd.grad(
            [outputs[number] for number in read_by], (x_TD,), [gradients[number] for number in read_by]
        )
        return dx_TD, dx_TD if ctx.needs_input_grad[1] else None, None
