"""Where a benchmark was taken: the facts of ``io-daemon bench``, and torch's version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from io_daemon.machine import facts


def describe_machine(swap_dir: Path) -> dict[str, Any]:
    """As JSON."""
    described = facts.describe_machine([swap_dir])
    return {"torch": torch.__version__, **described.model_dump(mode="json")}
