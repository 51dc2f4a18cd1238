"""SwiGLU and GELU: the csrc op beside eager torch, torch.compile and Liger, as shares of the copy rate of the same run.

    python -m benchmarks.ops.activation [--device cpu|cuda] [--shape 32768x8192] [--dtypes bf16,fp32] [--compile]

The shape is tokens x columns of the product. Forward must read x (gate and up, or GELU's one part) and write the
product. Backward must read x and the product's gradient and write x's gradient: `csrc` and the peers. `again` also
writes the product, in place, as training does. Eager and Liger take gate and up as tensors of their own.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.timing import DTYPES, Forms, arguments, medians, print_rates
from trainer.ops.activation import ACTIVATIONS, SWIGLU, Activation, activate, activate_reference

try:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
except ImportError:
    LigerSiLUMulFunction = None

Form = Callable[[list[Tensor]], Tensor]


def main() -> None:
    options = arguments("SwiGLU and GELU against torch and the copy rate", "2048x2816", "32768x8192")
    tokens, columns = options.shape
    for dtype in options.dtypes:
        kind = {"dtype": DTYPES[dtype], "device": options.device}
        for activation in ACTIVATIONS.values():
            count = activation.num_parts
            dy = torch.randn(tokens, columns, **kind)
            packed = [torch.randn(tokens, count * columns, **kind).requires_grad_()]
            parts = [part.detach().contiguous().requires_grad_() for part in packed[0].chunk(count, 1)]
            inputs = {
                name: parts if name in ("eager", "liger") else packed for name in forms(activation, options.compile)
            }
            source, target = dy.clone(), torch.empty_like(dy)
            runs: Forms = {"copy": lambda source=source, target=target: target.copy_(source)}
            later: Forms = dict(runs)
            for name, form in forms(activation, options.compile).items():
                runs[name] = lambda form=form, of=inputs[name]: form([each.detach() for each in of])
                y = form(inputs[name])
                later[name] = lambda y=y, of=inputs[name], dy=dy: torch.autograd.grad(y, of, dy, retain_graph=True)
            # on tensors that it may overwrite; its results soon are zeros, which take the same time
            scratch = packed[0].detach().clone(), dy.clone()
            later["again"] = lambda op=activation, of=scratch: op.backward(of[1], of[0])
            for direction, run in (("forward", runs), ("backward", later)):
                tensors = dict.fromkeys(run, count + 1 if direction == "forward" else 2 * count + 1)
                tensors |= {"copy": 2, "again": 2 * count + 2}
                moved = {name: tensors[name] * dy.nbytes for name in run}
                print_rates(
                    options,
                    f"{activation.name} {direction} {dtype}",
                    medians(run, options.device, options.repeats),
                    moved,
                )


def forms(activation: Activation, compiles: bool) -> dict[str, Form]:
    """Return the forms by name; each takes [packed], or gate and up where they are apart."""
    by_name: dict[str, Form] = {"csrc": lambda inputs: activate(inputs[0], activation)}
    if activation is SWIGLU:
        by_name["eager"] = lambda inputs: F.silu(inputs[0]) * inputs[1]
    else:
        by_name["eager"] = lambda inputs: F.gelu(inputs[0], approximate="tanh")
    if compiles:
        plain = torch.compile(lambda x: activate_reference(x, activation))
        by_name["compile"] = lambda inputs: plain(inputs[0])
    if LigerSiLUMulFunction is not None and activation is SWIGLU:
        by_name["liger"] = lambda inputs: LigerSiLUMulFunction.apply(*inputs)
    return by_name


if __name__ == "__main__":
    main()
