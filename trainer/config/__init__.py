"""A run's settings: frozen dataclasses, one a table of its TOML file, which `trainer.config.walk` fills.

Every field carries its help, its range and its short flags: the command line, the checks and the errors are made
from them. Nothing of the tables imports torch: `trainer --help` reads these files.
"""

from dataclasses import dataclass, field

from threefold.options import option
from trainer.config.checkpoint import CheckpointConfig as CheckpointConfig
from trainer.config.data import DataConfig as DataConfig
from trainer.config.data import ValidConfig as ValidConfig
from trainer.config.data import ValidSetConfig as ValidSetConfig
from trainer.config.fp8 import Fp8Config as Fp8Config
from trainer.config.health import HealthConfig as HealthConfig
from trainer.config.log import LogConfig as LogConfig
from trainer.config.model import ModelConfig as ModelConfig
from trainer.config.optim import OptimConfig as OptimConfig
from trainer.config.parallel import ParallelConfig as ParallelConfig
from trainer.config.profile import ProfileConfig as ProfileConfig
from trainer.config.train import OpsConfig as OpsConfig
from trainer.config.train import TrainConfig as TrainConfig


@dataclass(frozen=True, slots=True)
class Config:
    """All tables of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    ops: OpsConfig = option(OpsConfig, "the forms that ran are recorded, and compared themselves", keeps_bits=True)
    checkpoint: CheckpointConfig = option(CheckpointConfig, "where and when state is saved", keeps_bits=True)
    log: LogConfig = option(LogConfig, "what is reported", keeps_bits=True)
    health: HealthConfig = option(HealthConfig, "what is watched of ranks", keeps_bits=True)
    profile: ProfileConfig = option(ProfileConfig, "what is profiled of some steps", keeps_bits=True)
