"""What activations in swap files cannot be together with, key by key."""

from __future__ import annotations

from infinity.config.complaints import Complaints
from infinity.config.sections import Config

KEY = "io_daemon.activation_checkpoints"


def check_activation_checkpoints(config: Config, complaints: Complaints) -> None:
    """Complain of a second place for what waits, and of none at all."""
    if not config.io_daemon.activation_checkpoints:
        return
    if not config.swap_dirs:
        remedy = "needs a directory for swap files: write io_daemon.swap_dirs, or an nvme_path of offload_optimizer"
        complaints.add(KEY, True, remedy)
    for name in ("cpu_checkpointing", "contiguous_memory_optimization"):
        if getattr(config.activation_checkpointing, name):
            complaints.add(f"activation_checkpointing.{name}", True, f"not together with {KEY}: write false to one")
