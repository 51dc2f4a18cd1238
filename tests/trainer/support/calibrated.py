"""A calibration with the figures of a data sheet."""

from trainer.plan.calibration import Calibration, PartRate
from trainer.plan.probes import BOTH, LINEAR
from trainer.plan.rates import KERNELS, LAUNCH_S, Rates

KERNEL_PARTS = ("rmsnorm", "layernorm", "rope", "swiglu", "gelu", "cross_entropy", "copy", "update", "norms", "bias")


def calibration_of(sheet: Rates) -> Calibration:
    """One that says what a sheet says."""
    figures = [PartRate("product", way, "bf16", (64, 64, 64), sheet.flops, 1.0) for way in LINEAR]
    figures += [PartRate("attention", way, "bf16", (64, 64, 1), sheet.flops, 1.0) for way in BOTH]
    figures += [PartRate(part, way, "any", (64,), sheet.memory, 1.0) for part in KERNEL_PARTS for way in BOTH]
    host = {kind: number * LAUNCH_S for kind, number in KERNELS.items()}
    return Calibration("H100", {}, sheet.capacity, LAUNCH_S, host, tuple(figures))
