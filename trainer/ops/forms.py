"""Forms of an op beside its native kernels: its reference in plain torch, the same compiled, and Apex's kernel.

A form is a function of tensors that autograd can differentiate. It is used as kernels are: a forward that keeps
nothing, and a backward that is handed the inputs again and makes what it needs of the forward once more, which the
compiler fuses with the rest.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from threefold.errors import UserError

Function = Callable[..., tuple[Tensor, ...]]


def forward(form: str, function: Function, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a function of tensors and constants, in this form."""
    with torch.no_grad():
        return _compiled(function)(*inputs) if form == "compile" else function(*inputs)


def backward(
    form: str, function: Function, places: Sequence[int], gradients: Sequence[Tensor], *inputs: Any,
    with_outputs: bool = False,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
    """Return the gradients of those inputs in these places, for the outputs' gradients, and the outputs.

    The outputs are () unless `with_outputs`.
    """
    step = _compiled(_pulled_back) if form == "compile" else _differentiated
    return step(function, tuple(places), with_outputs, tuple(gradients), *inputs)


def package(name: str) -> Any:
    """Return a module of NVIDIA Apex, or one of its extensions; UserError if it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        hint = "install NVIDIA Apex with its CUDA extensions (PyPI's apex is another package), or take the form csrc"
        raise UserError(f"the form apex needs {name}: {error}", hint=hint) from None


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    limits: Any = torch._dynamo.config  # of how often one function is compiled: here for each op, dtype and shape
    limits.recompile_limit = max(limits.recompile_limit, 64)
    return torch.compile(function, fullgraph=True, dynamic=False)


def _pulled_back(function: Function, places: Sequence[int], with_outputs: bool, gradients: Any, *inputs: Any) -> Any:
    def of_changed(*changed: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for place, value in zip(places, changed, strict=True):
            values[place] = value
        return function(*values)

    found: Any = torch.func.vjp(of_changed, *(inputs[place] for place in places))
    outputs, pull = found
    return pull(gradients), outputs if with_outputs else ()


def _differentiated(function: Function, places: Sequence[int], with_outputs: bool, gradients: Any, *inputs: Any) -> Any:
    values = list(inputs)
    for place in places:
        values[place] = values[place].detach().requires_grad_()
    with torch.enable_grad():
        outputs = function(*values)
    found = torch.autograd.grad(outputs, [values[place] for place in places], gradients)
    return found, tuple(each.detach() for each in outputs) if with_outputs else ()
