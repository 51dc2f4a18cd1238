"""The checks of a device: what it computes at the run's true width, held to float64 on the same device.

Bounds are of the norm of a difference over that of the float64 result. An op may round twice, a layer with all that is
before it eight times. Sums have the wide dtype's rounding once for each of some hundred numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from time import perf_counter

import torch

from threefold.errors import UserError
from trainer.config import Config
from trainer.ops.dtypes import wide_dtype
from trainer.verify.device_ops import attention_pairs, op_pairs, product_pairs
from trainer.verify.difference import Different, require_equal
from trainer.verify.host_waits import no_host_waits, watching_tensors
from trainer.verify.result import Figure, NotNeeded, NotRun, Result
from trainer.verify.shrink import Shrunk
from trainer.verify.true_width import ROW, Wide, true_width

OF_OP, OF_ATTENTION, OF_LAYERS, SUMS = 2, 4, 8, 2**8  # roundings of the dtype, and of the wide one
OF_EIGHT_BITS = 0.25  # of gradients behind products in eight bits: two casts of a sixteenth or an eighth, and a layer
NEAR_TIES = 0.25  # with experts: a token near a tie goes to another one than in float64


def layers(wide: Wide) -> Figure:
    """Compare the loss and each gradient of a step with those of the model that is written apart, in float64."""
    config = wide.config
    bound = OF_LAYERS * rounding(wide) + OF_EIGHT_BITS * (config.fp8.recipe != "off")
    bound += NEAR_TIES * bool(config.model.num_experts)
    expected, reference = wide.reference  # of the weights before the step
    loss, gradients = wide.step(wide.engine)
    if not abs(loss - expected) <= bound * abs(expected):
        raise Different(f"the loss is {loss:.9g}, and {expected:.9g} in float64")
    require_equal(gradients.keys() == reference.keys(), "some parameters have no gradient")
    return figure_of(((f"the gradient of {name}", gradients[name], reference[name]) for name in gradients), bound)


def linears(wide: Wide) -> Figure:
    """Compare the products of each shape of a weight with those in float64; in eight bits of what was multiplied."""
    return figure_of(product_pairs(wide), OF_OP * rounding(wide))


def attention(wide: Wide) -> Figure:
    """Compare attention over each kind of mask with plain torch in float64."""
    return figure_of(attention_pairs(wide), OF_ATTENTION * rounding(wide))


def other_ops(wide: Wide) -> Figure:
    """Compare norms, rotation, the nonlinearity and the loss with plain torch in float64."""
    return figure_of(op_pairs(wide), OF_OP * rounding(wide))


def same_bits(wide: Wide) -> Figure:
    """Take one step with two engines of one state: a run that is deterministic has equal bits."""
    if not wide.config.train.deterministic:
        raise NotNeeded("train.deterministic is off")
    (loss, own), (loss_again, again) = (wide.step(wide.new_engine()) for _ in range(2))
    require_equal(loss == loss_again, f"a loss is {loss!r}, and {loss_again!r} once more")
    for name, gradient in own.items():
        require_equal(torch.equal(gradient, again[name]), f"the gradient of {name} has other bits once more")
    return Figure(f"{len(own)} gradients", "equal bits")


def no_waits(wide: Wide) -> Figure:
    """Take a step behind another in which each wait of the host for its device is an error."""
    on_gpu = wide.device.type == "cuda"
    if on_gpu and wide.config.model.num_experts and wide.config.train.precision != "bf16":
        raise NotNeeded("products of experts are a loop in this precision, for which the host waits")
    engine = wide.new_engine()
    engine.train_step(0, wide.batch)
    with nullcontext() if on_gpu else watching_tensors(), no_host_waits(wide.device.type):
        pending = engine.start_step(1, wide.batch)
    pending.read()
    return Figure("a step", "no wait")


DEVICE_CHECKS: dict[str, Callable[[Wide], Figure]] = {
    "layers at true width": layers,
    "linears at true width": linears,
    "attention at true width": attention,
    "other ops at true width": other_ops,
    "the same bits twice": same_bits,
    "no wait on the device": no_waits,
}


def rounding(wide: Wide) -> float:
    """Return the relative rounding of a number in the run's precision, with that of sums."""
    dtype = wide.engine.dtype
    return torch.finfo(dtype).eps + SUMS * torch.finfo(wide_dtype(dtype)).eps


def figure_of(pairs: Iterator[tuple[str, torch.Tensor, torch.Tensor]], bound: float) -> Figure:
    """Return the largest difference of results from those in float64; Different names the first beyond the bound."""
    largest = 0.0
    for name, values, expected in pairs:
        gap = float(torch.linalg.vector_norm(values.double() - expected))
        gap /= max(float(torch.linalg.vector_norm(expected)), torch.finfo(torch.float64).tiny)
        if not gap <= bound:
            raise Different(f"{name} differs by {gap:.1e} of its norm in float64, {bound:.1e} is allowed")
        largest = max(largest, gap)
    return Figure(f"{largest:.1e}", f"{bound:.0e} of the norm")


def device_of(name: str) -> torch.device:
    """Return a device by its name; UserError if it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch has no usable GPU here", hint="trainer verify CONFIG.toml")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def device_results(
    config: Config, device: torch.device, deadline: float, *, row: int = ROW
) -> tuple[Shrunk, Iterator[Result]]:
    """Return the run at true width, and what became of each check of a device; none begins behind the deadline."""
    shrunk = true_width(config, device, row=row)
    wide = Wide(shrunk.config, device)
    return shrunk, (device_result(name, wide, deadline) for name in DEVICE_CHECKS)


def device_result(name: str, wide: Wide, deadline: float) -> Result:
    """Make a check unless time is over; what is not installed, or has no room, is not run."""
    begin = perf_counter()
    if begin >= deadline:
        return Result(name, "not run", text="the time was over")
    try:
        figure = DEVICE_CHECKS[name](wide)
        return Result(name, "ok", figure.difference, figure.bound, seconds=perf_counter() - begin)
    except NotNeeded as reason:
        return Result(name, "not needed", text=str(reason), seconds=perf_counter() - begin)
    except (NotRun, UserError, torch.OutOfMemoryError) as reason:
        text = str(reason).splitlines()[0]
        return Result(name, "not run", text=text, seconds=perf_counter() - begin)
    except Exception as error:
        text = str(error) if isinstance(error, Different) else f"{type(error).__name__}: {error}"
        return Result(name, "FAILED", text=text, seconds=perf_counter() - begin)
