"""Config: all tables of one run. `trainer.config.walk` fills them from TOML and flags.

Every field carries its help, its range and its short flags: the command line, the checks and the errors are made
from them. Nothing here imports torch: `trainer --help` reads these files.
"""

from dataclasses import dataclass, field

from threefold.options import option
from trainer.config.checkpoint import CheckpointConfig
from trainer.config.data import DataConfig
from trainer.config.log import LogConfig
from trainer.config.model import ModelConfig
from trainer.config.ops import OpsConfig
from trainer.config.optim import OptimConfig
from trainer.config.parallel import ParallelConfig
from trainer.config.train import TrainConfig


@dataclass(frozen=True, slots=True)
class Config:
    """All tables of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    ops: OpsConfig = option(OpsConfig, "the forms that ran are recorded, and compared themselves", keeps_bits=True)
    checkpoint: CheckpointConfig = option(CheckpointConfig, "where and when state is saved", keeps_bits=True)
    log: LogConfig = option(LogConfig, "what is reported", keeps_bits=True)
