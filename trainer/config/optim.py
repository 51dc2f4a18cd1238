"""The optimizer and its schedule."""

from dataclasses import dataclass
from typing import Literal

from threefold.options import option

Schedule = Literal["cosine", "wsd", "linear", "constant", "inverse-sqrt"]
MuonScale = Literal["original", "match_rms"]
Shape = Literal["linear", "sqrt", "cosine", "exponential"]


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """One `[[optim.groups]]`: factors for the parameters whose names fit a pattern; of several the first counts."""

    pattern: str = option(..., 'names, such as "*.attn.q.*"; ckptkit inspect RUN shows them')
    lr_factor: float = option(1.0, "times the learning rate of each step", minimum=0)
    decay_factor: float | None = option(
        None, "times weight_decay; without it 1 for matrices, 0 for norms and biases", minimum=0
    )

    def __str__(self) -> str:
        decay = "" if self.decay_factor is None else f", decay_factor {self.decay_factor:g}"
        return f"{self.pattern} with lr_factor {self.lr_factor:g}{decay}"


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """`[optim]`: the optimizer, with a linear warm-up and a schedule."""

    name: Literal["adamw", "muon", "lion", "sgd"] = option(
        "adamw",
        "the optimizer: AdamW has two moments, Lion and SGD with momentum one; Muon has one of the matrices of layers, "
        "the rest is AdamW's",
    )
    allow_reset: bool = option(
        False,
        "go on from a step of another optimizer: states that it does not have begin at zero",
        keeps_bits=True,
    )
    lr: float = option(3e-4, "peak learning rate", minimum=0, flags=["--lr"])
    schedule: Schedule = option(
        "cosine",
        "the rate after the warm-up: cosine and linear fall to min_lr, wsd stays and falls in its last steps, "
        "inverse-sqrt falls with the root of the steps, constant stays",
    )
    wsd_decay_steps: int = option(0, "in how many steps before decay_steps the rate of wsd falls", minimum=0)
    wsd_decay: Shape = option("linear", "shape of the fall of wsd and of a cool-down; sqrt is 1 - the root of the way")
    min_lr: float = option(3e-5, "learning rate at and after the end of the schedule", minimum=0)
    warmup_steps: int = option(0, "steps of linear warm-up from 0", minimum=0)
    decay_steps: int = option(
        0,
        "step at which min_lr is reached; 0 means train.train_steps, or what a run that goes on began with",
        minimum=0,
    )
    cool_down_steps: int = option(
        0,
        "end the run so many steps behind the saved one that it goes on from, the rate falling from where it is to "
        "min_lr; 0 goes on as the run does, -1 goes back to the schedule",
        minimum=-1,
        flags=["--cool-down"],
    )
    cool_down_from: int = option(0, "the step of that, and a run's record of it; 0 is the one gone on from", minimum=0)
    cool_down_lr: float = option(0.0, "the rate there, and a run's record of it; 0 is the schedule's", minimum=0)
    beta1: float = option(
        0.9,
        "decay of the first moment; of lion: of the average whose sign is the step",
        minimum=0,
        below=1,
        needs={"optim.name": ("adamw", "muon", "lion")},
    )
    beta2: float = option(
        0.95,
        "decay of the second moment; of lion: of its only one",
        minimum=0,
        below=1,
        needs={"optim.name": ("adamw", "muon", "lion")},
    )
    eps: float = option(
        1e-8, "added to the root of the second moment", above=0, needs={"optim.name": ("adamw", "muon")}
    )
    momentum: float = option(
        0.9, "sgd: what remains of the sum of gradients each step", above=0, below=1, needs={"optim.name": "sgd"}
    )
    nesterov: bool = option(False, "sgd: step from where the momentum leads", needs={"optim.name": "sgd"})
    muon_lr: float = option(
        0.0, "muon: peak rate of matrices, on the same schedule; 0 is lr", minimum=0, needs={"optim.name": "muon"}
    )
    muon_momentum: float = option(
        0.95, "muon: decay of the average of gradients", minimum=0, below=1, needs={"optim.name": "muon"}
    )
    muon_steps: int = option(
        5, "muon: Newton-Schulz steps of a matrix", minimum=1, maximum=99, needs={"optim.name": "muon"}
    )
    muon_scale: MuonScale = option(
        "original",
        "muon: what a matrix's rate is multiplied by: original is the root of rows by columns, at least 1; match_rms "
        "makes a step as large as AdamW's",
        needs={"optim.name": "muon"},
    )
    moments: Literal["wide", "bf16"] = option(
        "wide",
        "dtype of the moments: wide is that of the masters, bf16 takes half the memory and rounds once a step",
        needs={"train.precision": ("bf16", "fp32", "fp16")},
    )
    master: Literal["wide", "split"] = option(
        "wide",
        "how fp32 masters of bf16 weights are kept; split: the low 16 bits beside the weight, half the memory",
        keeps_bits=True,
        needs={"train.precision": "bf16"},
    )
    offload: bool = option(
        False,
        "on GPUs: keep masters and moments in the host's memory, and stream them through a window of the GPU's beside "
        "the next forward",
        shorthands={"--optimizer-offload": "true"},
        keeps_bits=True,
        needs={"optim.name": ("adamw", "lion", "sgd")},
    )
    offload_window_mib: int = option(
        2048,
        "MiB of a GPU's memory through which masters and moments come from the host: what is there before an update "
        "begins is not waited for",
        minimum=16,
        keeps_bits=True,
        needs={"offload": True},
    )
    weight_decay: float = option(
        0.1,
        "weight decay of matrices, decoupled but for sgd, where it is added to gradients; norms and biases have none",
        minimum=0,
    )
    groups: tuple[GroupConfig, ...] = option((), "factors of rate and weight decay by name: [[optim.groups]]")
    clip: float = option(1.0, "largest global gradient norm; 0 means no clipping", minimum=0)
