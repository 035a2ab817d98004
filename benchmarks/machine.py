"""Where a benchmark is taken: the facts of ``io-daemon bench`` and torch's version."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch

from io_daemon.machine import facts


def free_port() -> int:
    """A port of this machine's that nobody listens on now, for ranks to meet at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe_machine(swap_dir: Path) -> dict[str, Any]:
    """As JSON."""
    described = facts.describe_machine([swap_dir])
    return {"torch": torch.__version__, **described.model_dump(mode="json")}
