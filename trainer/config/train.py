"""Length, batch sizes, precision and device of a run, and the forms of its ops."""

from dataclasses import dataclass
from typing import Literal

from datakit import StepConfig
from threefold.needs import GIVEN
from threefold.options import option

# of options of a loss scale that moves
MOVED = {"precision": "fp16", "a factor that moves, without train.loss_scale": lambda train: train.loss_scale is None}


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
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = option(
        "fp32",
        "dtype of the arithmetic; bf16 and fp16 keep fp32 masters, and fp16 scales the loss",
        shorthands={"--bf16": "bf16", "--fp16": "fp16"},
    )
    loss_scale: float | None = option(
        None,
        "fp16: what the loss is multiplied by for the backward, a power of two; without it one that is moved",
        above=0,
        flags=["--loss-scale"],
        needs={"precision": "fp16"},
    )
    initial_loss_scale: float = option(
        65536.0,
        "fp16: what it is multiplied by at first; gradients that overflow halve that, and their step is void",
        above=0,
        keeps_bits=True,
        flags=["--initial-loss-scale"],
        needs=MOVED,
    )
    min_loss_scale: float = option(
        1.0,
        "fp16: the smallest factor; 10 void steps in a row there end the run",
        above=0,
        flags=["--min-loss-scale"],
        needs=MOVED,
    )
    loss_scale_window: int = option(
        1000,
        "fp16: steps in a row that count, after which the factor is doubled",
        minimum=1,
        flags=["--loss-scale-window"],
        needs=MOVED,
    )
    hysteresis: int = option(
        2,
        "fp16: void steps since it was doubled, from which on each halves the factor",
        minimum=1,
        flags=["--hysteresis"],
        needs=MOVED,
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes CUDA if a GPU is usable")
    deterministic: bool = option(
        False,
        "on GPUs, take kernels alone that repeat their bits, at some cost",
        shorthands={"--deterministic": "true"},
    )
    cuda_graphs: bool = option(
        False,
        "on GPUs record the passes of a step in the third step of a start, and launch them by one call: for short "
        "kernels, which the host enqueues slower than they run",
        keeps_bits=True,
        shorthands={"--cuda-graphs": "true"},
        needs={"device": ("auto", "cuda")},
    )
    recompute: Literal["none", "selective", "full"] = option(
        "none",
        "what the backward makes again, to keep less: full keeps a layer's input alone, selective what is not of "
        "recompute_modules",
        keeps_bits=True,
        flags=["--recompute"],
    )
    recompute_modules: tuple[Literal["norms", "mlp", "attention"], ...] = option(
        (),
        "selective: mlp makes gate and up again, attention q, k, v and the result of its heads, each with its norm; "
        "norms alone are made again with any of them, or with none named",
        keeps_bits=True,
        needs={"recompute": "selective"},
    )
    recompute_num_layers: int = option(
        0,
        "first layers of each stage of which something is made again; 0: all",
        minimum=0,
        keeps_bits=True,
        flags=["--recompute-num-layers"],
        needs={"recompute": ("selective", "full")},
    )
    recompute_keep: Literal["nothing", "attention"] = option(
        "nothing",
        "full: attention keeps the result of its heads too, so that its kernel runs once",
        keeps_bits=True,
        flags=["--recompute-keep"],
        needs={"recompute": "full"},
    )
    recompute_offload: bool = option(
        False,
        "full, on GPUs: a layer's input is in the host's memory between its passes, and comes back one layer ahead of "
        "the backward",
        keeps_bits=True,
        shorthands={"--recompute-offload": "true"},
        needs={"recompute": "full"},
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
    memory_check: Literal["refuse", "warn", "off"] = option(
        "refuse",
        "what to do if a rank's plan takes more memory than its GPU has: end before anything starts, or say so",
        keeps_bits=True,
    )
    eval_interval: int = option(
        0, "evaluate validation sets every so many steps, and after the last one; 0 never", minimum=0, keeps_bits=True
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


AttentionName = Literal[
    "auto",
    "sdpa-cpu",
    "sdpa-flash",
    "flash-2",
    "flash-3",
    "flash-4",
    "sdpa-cudnn",
    "sdpa-cudnn-flash",
    "sdpa-efficient",
    "reference",
]
ALIBI = ("reference", "flash-2")  # backends that have it
NO_WINDOW = ("sdpa-cpu", "flash-3", "sdpa-cudnn", "sdpa-cudnn-flash", "sdpa-efficient")  # of these backends
NOT_REPEATING = ("flash-3", "sdpa-cudnn")  # those whose bits differ between two runs


@dataclass(frozen=True, slots=True)
class OpsConfig:
    """`[ops]`: csrc is this project's kernel, torch its reference, compile the reference through torch.compile."""

    attention: AttentionName = option(
        "auto", "backend of attention; auto takes the one that a resumed run recorded, else on GPUs the fastest"
    )
    norm: Literal["csrc", "compile", "torch", "apex"] = option("csrc", "RMSNorm and LayerNorm with the residual's add")
    rope: Literal["csrc", "compile", "torch"] = option("csrc", "rotary positions, with RMSNorm of heads before them")
    activation: Literal["csrc", "compile", "torch"] = option("csrc", "SwiGLU and GELU")
    cross_entropy: Literal["csrc", "compile", "torch"] = option("csrc", "the loss of a token and its gradient")
    experts: Literal["csrc", "torch"] = option(
        "csrc", "rows of experts: their order, weighted SwiGLU, sums of tokens", needs={"model.num_experts": GIVEN}
    )
    adamw: Literal["csrc", "torch", "apex"] = option(
        "csrc", "the update; torch is its fused AdamW, apex FusedAdam's", needs={"optim.name": ("adamw", "muon")}
    )
