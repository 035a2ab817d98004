"""What a configuration says that all ranks must read alike: what decides on a bit, or on the order of collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

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
    found = [(key, value) for key, value in _flat(told) if not key.startswith(tuple(f"{own}." for own in OWN))]
    return [*found, *((f"io_daemon.{key}", told["io_daemon"][key]) for key in OF_ALL)]


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" not in OWN:
            yield f"{prefix}{key}", value
