"""Configuration: the DeepSpeed JSON dialect, checked whole before anything is built."""

from infinity.config.environment import Environment, read_environment
from infinity.config.parse import parse_config, refuse_unsupported
from infinity.config.sections import (
    Config,
    IoDaemon,
    OffloadOptimizer,
    OffloadParam,
    Optimizer,
    Scheduler,
    ZeroOptimization,
)

__all__ = [
    "Config",
    "Environment",
    "IoDaemon",
    "OffloadOptimizer",
    "OffloadParam",
    "Optimizer",
    "Scheduler",
    "ZeroOptimization",
    "parse_config",
    "read_environment",
    "refuse_unsupported",
]
