"""Where a benchmark was taken: the facts of ``io-daemon bench``, and torch's version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from io_daemon.bench.report import machine


def describe_machine(swap_dir: Path) -> dict[str, Any]:
    """As JSON."""
    facts = machine.describe_machine([swap_dir])
    return {"torch": torch.__version__, **facts.model_dump(mode="json")}
