"""A run's settings: frozen dataclasses, one a table of its TOML file. Nothing of the tables imports torch."""

from trainer.config.checkpoint import CheckpointConfig as CheckpointConfig
from trainer.config.data import DataConfig as DataConfig
from trainer.config.data import ValidConfig as ValidConfig
from trainer.config.log import LogConfig as LogConfig
from trainer.config.model import ModelConfig as ModelConfig
from trainer.config.ops import OpsConfig as OpsConfig
from trainer.config.optim import OptimConfig as OptimConfig
from trainer.config.parallel import ParallelConfig as ParallelConfig
from trainer.config.tables import Config as Config
from trainer.config.train import TrainConfig as TrainConfig
