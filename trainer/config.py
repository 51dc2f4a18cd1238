"""The run's configuration: frozen dataclasses, one a TOML table; `trainer.config_file` fills them from TOML and flags.

Nothing here imports torch: `trainer --help` and `trainer plan` read this file.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`[model]`: the shape of the GPT; `num_kv_heads` and `ffn_hidden_size` of 0 mean num_heads and 4 * hidden_size."""

    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 4
    num_kv_heads: int = 0
    ffn_hidden_size: int = 0
    vocab_size: int = 0
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    position: Literal["rope", "learned", "none"] = "rope"
    rope_theta: float = 10000.0
    activation: Literal["swiglu", "gelu"] = "swiglu"
    bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    dropout: float = 0.0
    init_std: float = 0.02


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """`[parallel]`: sizes of the mesh axes; dp of 0 means all ranks that tp and pp leave over."""

    tp: int = 1
    pp: int = 1
    dp: int = 0
    zero_stage: Literal[0, 1] = 1
    bucket_mib: int = 64


@dataclass(frozen=True, slots=True)
class ValidConfig:
    """`[data.valid]`: the stores of the validation set and how many fixed samples of it an evaluation reads."""

    stores: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    num_samples: int = 64


@dataclass(frozen=True, slots=True)
class DataConfig:
    """`[data]`: token stores and their blend; equal `weights` when empty; `max_epochs` of 0 means no end."""

    stores: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    tokenizer: str = ""
    mask_eod_loss: bool = False
    reset_positions: bool = False
    max_epochs: int = 0
    valid: ValidConfig = field(default_factory=ValidConfig)


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """`[optim]`: AdamW with a warm-up and cosine schedule; `decay_steps` of 0 means train.train_steps."""

    lr: float = 3e-4
    min_lr: float = 3e-5
    warmup_steps: int = 0
    decay_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """`[train]`: how long, how much a step, in which precision, on which device."""

    train_steps: int = 100
    seq_length: int = 256
    micro_batch_size: int = 1
    global_batch_size: int = 8
    seed: int = 0
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    eval_interval: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """`[checkpoint]`: run URLs to save to and to seed from; `save_interval` of 0 saves only at the end."""

    save: str = ""
    load: str = ""
    save_interval: int = 0
    max_failed_saves: int = 3
    deadline_s: float = 600.0


@dataclass(frozen=True, slots=True)
class LogConfig:
    """`[log]`: metrics file (one JSON line a step) and console interval in steps."""

    metrics: str = ""
    interval: int = 1


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
