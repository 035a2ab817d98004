"""The device that models of the tests train on: the CPU, or an accelerator where ``pytest --gpu`` shows it to them."""

from __future__ import annotations

import os
from typing import Final

import torch

CPU: Final = torch.device("cpu")


def _found() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return CPU if accelerator is None else torch.device(accelerator.type, 0)


USED: Final = _found()
NUM_RANKS_MAX: Final = 1 << 10 if USED == CPU else torch.accelerator.device_count()
"""A rank has a device of its own."""


def be_deterministic() -> None:
    """Kernels of torch's that add in whatever order differ from themselves: on an accelerator others are taken."""
    if USED != CPU:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
