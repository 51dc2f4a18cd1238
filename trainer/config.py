"""The run's configuration: frozen dataclasses, one a TOML table; `trainer.config_file` fills them from TOML and flags.

Every field carries its help, its range and its short flags: the command line, the checks and the errors are made from
them. Nothing here imports torch: `trainer --help` reads this file.
"""

from dataclasses import dataclass, field
from typing import Literal

from threefold.options import option

SAVE_INTERVAL_S = 600.0  # of a run that asks for no interval


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`[model]`: the shape of the GPT."""

    num_layers: int = option(4, "transformer layers", minimum=1)
    hidden_size: int = option(256, "width of the residual stream", minimum=1)
    num_heads: int = option(4, "attention heads; must divide hidden_size", minimum=1)
    num_kv_heads: int = option(0, "key/value heads (grouped-query attention); 0 means num_heads", minimum=0)
    ffn_hidden_size: int = option(0, "width inside the MLP; 0 means 4 * hidden_size", minimum=0)
    vocab_size: int = option(0, "tokens in the vocabulary; 0 takes the tokenizer's size from the stores", minimum=0)
    norm: Literal["rmsnorm", "layernorm"] = option("rmsnorm", "normalisation before attention, MLP and head")
    norm_eps: float = option(1e-5, "added to the variance in a norm", above=0)
    position: Literal["rope", "learned", "none"] = option("rope", "how positions enter the model")
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=0)
    activation: Literal["swiglu", "gelu"] = option("swiglu", "the MLP's nonlinearity")
    bias: bool = option(False, "biases in linear layers and norms")
    qk_norm: bool = option(False, "normalise queries and keys of each head")
    tie_embeddings: bool = option(False, "use the embedding table as the output head")
    dropout: float = option(0.0, "dropout probability after embedding, attention and MLP", minimum=0, below=1)
    init_std: float = option(0.02, "standard deviation of the initial weights", above=0)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """`[parallel]`: sizes of the mesh axes; tp * pp * dp is the number of processes."""

    tp: int = option(1, "tensor-parallel size", minimum=1, flags=["--tp", "--tensor-model-parallel-size"])
    pp: int = option(1, "pipeline stages", minimum=1, flags=["--pp", "--pipeline-model-parallel-size"])
    dp: int = option(0, "data-parallel size; 0 means all ranks that tp and pp leave over", minimum=0, flags=["--dp"])
    schedule: Literal["1f1b", "gpipe"] = option(
        "1f1b", "order of the pipeline's passes; gpipe keeps the activations of all micro-batches", flags=["--schedule"]
    )
    zero_stage: Literal[0, 1] = option(1, "1 cuts the optimizer state over dp, 0 repeats it on every rank")
    bucket_mib: int = option(64, "size of a gradient bucket in MiB", minimum=1)
    timeout_s: float = option(1800.0, "how long a rank waits for the others before it gives up", above=0)


@dataclass(frozen=True, slots=True)
class ValidConfig:
    """`[data.valid]`: the validation set."""

    stores: tuple[str, ...] = option((), "token stores of the validation set")
    weights: tuple[float, ...] = option((), "one weight a store; empty means equal", above=0)
    num_samples: int = option(64, "how many fixed samples an evaluation reads", minimum=1)


@dataclass(frozen=True, slots=True)
class DataConfig:
    """`[data]`: what the run reads."""

    stores: tuple[str, ...] = option((), "token stores to train on")
    weights: tuple[float, ...] = option((), "one weight a store; empty means equal", above=0)
    tokenizer: str = option("", "tokenizer file that made the stores; checked against them, used by generate")
    mask_eod_loss: bool = option(False, "leave the loss at end-of-document tokens out")
    reset_positions: bool = option(False, "count positions from 0 after each end of document")
    max_epochs: int = option(0, "end the run, with a save, after this many epochs; 0 means no end", minimum=0)
    valid: ValidConfig = field(default_factory=ValidConfig)


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """`[optim]`: AdamW with a linear warm-up and a cosine schedule."""

    lr: float = option(3e-4, "peak learning rate", minimum=0, flags=["--lr"])
    min_lr: float = option(3e-5, "learning rate at and after the end of the schedule", minimum=0)
    warmup_steps: int = option(0, "steps of linear warm-up from 0", minimum=0)
    decay_steps: int = option(0, "step at which min_lr is reached; 0 means train.train_steps", minimum=0)
    beta1: float = option(0.9, "decay of the first moment", minimum=0, below=1)
    beta2: float = option(0.95, "decay of the second moment", minimum=0, below=1)
    eps: float = option(1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = option(0.1, "decoupled weight decay of matrices; norms and biases have none", minimum=0)
    clip: float = option(1.0, "largest global gradient norm; 0 means no clipping", minimum=0)


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
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes CUDA where a GPU is usable")
    eval_interval: int = option(0, "evaluate on [data.valid] every so many steps; 0 never", minimum=0)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """`[checkpoint]`: where state is saved to and resumed from."""

    save: tuple[str, ...] = option(
        (),
        "run URL to save to; a committed step in it is resumed. Repeated, fastest first, it names tiers: "
        "URL,every=N,keep_last=N (docs/guides/tiers.md)",
        flags=["--save"],
        repeats=True,
    )
    load: str = option("", "run or step URL that seeds the run while `save` holds no step", flags=["--load"])
    save_interval: int = option(0, "save every so many steps; 0 leaves it to save_interval_s", minimum=0,
                                flags=["--save-interval"])  # fmt: skip
    save_interval_s: float = option(
        -1.0,
        "save at the first step so many seconds after the last save; 0 never; -1 means "
        f"{SAVE_INTERVAL_S:g} while save_interval is 0, else never",
        minimum=-1,
        flags=["--save-interval-s"],
    )
    max_failed_saves: int = option(3, "this many failed saves in a row end the run", minimum=1)
    deadline_s: float = option(600.0, "how long a save waits for the files of all ranks", above=0)
    keep_last: int = option(0, "keep the newest N steps after each save; with all keep_* 0 all stay", minimum=0)
    keep_every: int = option(0, "keep the first step at or after each multiple of this", minimum=0)
    keep_best: int = option(0, "keep the N steps with the smallest keep_best_metric", minimum=0)
    keep_best_metric: str = option("val_loss", "val_loss, loss, or any other number in a checkpoint's metadata")
    keep_hourly: int = option(0, "keep the newest step of each of the last N hours that have one", minimum=0)
    stripe_count: int = option(0, "on Lustre, stripes of each file; 0 chooses, -1: one on every target", minimum=-1)
    stripe_size_bytes: int = option(0, "on Lustre, bytes of a stripe, in units of 65536; 0 chooses", minimum=0)
    strict: bool = option(
        False, "end where the newest step is damaged, instead of falling back to an older one",
        shorthands={"--strict": "true"},
    )  # fmt: skip
    exchange: Literal["node", "job", "none"] = option(
        "node", "who reads a checkpoint together at the start, each byte once: the ranks of a node, all, or nobody"
    )
    code: str = option("", "code version that checkpoints record; empty: the commit of the git tree started in")
    retry_s: float = option(60.0, "how long what the storage refuses for now is tried again", minimum=0)
    overlap: Literal["auto", "on", "off"] = option(
        "auto", "copy the state beside the next forward and backward; auto does so on CUDA"
    )
    window_mib: int = option(
        0, "host memory a rank's save passes through; 0 means all of its state: the step waits for the copy alone",
        minimum=0,
    )  # fmt: skip
    when_busy: Literal["wait", "skip", "abort"] = option(
        "wait", "where the save before still runs: wait for it, skip the new one, or abort the older"
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """`[log]`: what the run tells."""

    metrics: str = option("", "file that gets one JSON line a step", flags=["--metrics"])
    interval: int = option(1, "steps between two lines on the console", minimum=1)


@dataclass(frozen=True, slots=True)
class Config:
    """All tables of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
