"""What a configuration says that all ranks must read alike: what decides on a bit, or on the order of collectives."""

from __future__ import annotations

from typing import Any, Final

from infinity.config.origins import flattened
from infinity.config.sections import Config

OWN: Final = (
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "log_level",
    "tensorboard",
    "csv_monitor",
    "wandb",
    "flops_profiler",
    "comms_logger",
    "timers",
    "aio",
    "subsumed",
    "old_names",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
    "io_daemon",
)
"""Keys and sections that are each rank's own: what it logs, and where it keeps what."""
OF_ALL: Final = ("update", "update_in_backward", "master_weights", "moments", "activation_checkpoints")
"""Keys of ``io_daemon`` that are not."""


def shared_keys(config: Config) -> list[tuple[str, Any]]:
    """(dotted key, value) of what must be alike on all ranks."""
    told = config.model_dump(mode="json")
    sections = tuple(f"{own}." for own in OWN)
    found = [(key, value) for key, value in flattened(told) if key not in OWN and not key.startswith(sections)]
    return [*found, *((f"io_daemon.{key}", told["io_daemon"][key]) for key in OF_ALL)]
