"""Configuration: the DeepSpeed JSON dialect, checked whole before anything is built."""

from infinity.config.environment import Environment, read_environment
from infinity.config.optimizer import Optimizer
from infinity.config.origins import Origin, Provenance, Resolved
from infinity.config.parse import parse_config, refuse_unsupported, resolve_config
from infinity.config.schedule import Scheduler
from infinity.config.sections import (
    Config,
    IoDaemon,
    OffloadOptimizer,
    OffloadParam,
    ZeroOptimization,
)
from infinity.config.shared import shared_keys

__all__ = [
    "Config",
    "Environment",
    "IoDaemon",
    "OffloadOptimizer",
    "OffloadParam",
    "Optimizer",
    "Origin",
    "Provenance",
    "Resolved",
    "Scheduler",
    "ZeroOptimization",
    "parse_config",
    "read_environment",
    "refuse_unsupported",
    "resolve_config",
    "shared_keys",
]
