"""Length, batch sizes, precision and device of a run."""

from dataclasses import dataclass
from typing import Literal

from threefold.options import option


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """`[train]`: how long, how much a step, in which precision, on which device."""

    train_steps: int = option(100, "the step at which the run ends", minimum=1, flags=["--train-steps"])
    seq_length: int = option(256, "tokens a sample", minimum=1, flags=["--seq-length"])
    micro_batch_size: int = option(1, "samples a forward pass of one rank", minimum=1, flags=["--micro-batch-size"])
    global_batch_size: int = option(8, "samples a step of all ranks", minimum=1, flags=["--global-batch-size"])
    gradient_accumulation_steps: int = option(
        0,
        "micro-batches a step of one rank; 0 derives it, any other value is checked: "
        "global_batch_size / (micro_batch_size * dp)",
        minimum=0,
        flags=["--gradient-accumulation-steps"],
    )
    seed: int = option(0, "seed of weights, dropout and sample order", minimum=0, maximum=2**63 - 1, flags=["--seed"])
    precision: Literal["fp64", "fp32", "bf16"] = option(
        "fp32", "dtype of the arithmetic; bf16 keeps an fp32 master", shorthands={"--bf16": "bf16"}
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes CUDA if a GPU is usable")
    deterministic: bool = option(
        False,
        "on GPUs, take kernels alone that repeat their bits, at some cost",
        shorthands={"--deterministic": "true"},
    )
    recompute: Literal["none", "full"] = option(
        "none", "full keeps a layer's input alone for the backward, and computes the rest of the layer again"
    )
    eval_interval: int = option(0, "evaluate on [data.valid] every so many steps; 0 never", minimum=0)
