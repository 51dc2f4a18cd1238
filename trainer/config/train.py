"""Length, batch sizes, precision and device of a run."""

from dataclasses import dataclass
from typing import Literal

from datakit import StepConfig
from threefold.options import option


@dataclass(frozen=True, slots=True)
class TrainConfig(StepConfig):
    """`[train]`: how long, how much a step, in which precision, on which device."""

    micro_batch_size: int = option(1, "samples a forward pass of one rank", minimum=1, flags=["--micro-batch-size"])
    gradient_accumulation_steps: int = option(
        0,
        "micro-batches a step of one rank; 0 derives it, any other value is checked: "
        "global_batch_size / (micro_batch_size * dp)",
        minimum=0,
        keeps_bits=True,
        flags=["--gradient-accumulation-steps"],
    )
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
        "none",
        "full keeps a layer's input alone for the backward, and computes the rest of the layer again",
        keeps_bits=True,
    )
    max_logits_gib: float = option(
        1.0,
        "logits of a micro-batch that take more memory are made for some tokens at a time, their gradient with them; "
        "0 makes all at once",
        minimum=0,
    )
    z_loss: float = option(
        0.0, "times the squared log of the softmax's denominator, added to a token's loss in training", minimum=0
    )
    eval_interval: int = option(
        0, "evaluate on [data.valid] every so many steps, and after the last one; 0 never", minimum=0, keeps_bits=True
    )
    peak_tflops: float = option(
        0.0,
        "dense peak of a device in TFLOP/s, which mfu is a share of; 0 knows it by the device's name",
        minimum=0,
        keeps_bits=True,
    )
    max_time_s: float = option(
        0.0,
        "save and end after the step in which so many seconds since the start are over; 0 never",
        minimum=0,
        scaled={"--exit-duration-in-mins": 60.0},
        keeps_bits=True,
    )
