"""Configuration: the DeepSpeed JSON dialect, checked whole before anything is built."""

from infinity.config.environment import Environment, read_environment
from infinity.config.optimizer import Optimizer
from infinity.config.origins import Resolved
from infinity.config.parse import parse_config, resolve_config
from infinity.config.schedule import Scheduler
from infinity.config.sections import Config
from infinity.config.shared import shared_keys

__all__ = [
    "Config",
    "Environment",
    "Optimizer",
    "Resolved",
    "Scheduler",
    "parse_config",
    "read_environment",
    "resolve_config",
    "shared_keys",
]
