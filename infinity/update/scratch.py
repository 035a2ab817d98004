"""Memory in which a chunk's gradients become what the optimizer takes: cast, or multiplied.

One piece for all chunks, since they are stepped one after the other. What is as large as a chunk would otherwise come
from the kernel and go back to it each time, and be faulted in anew.
"""

from __future__ import annotations

import torch


class Scratch:
    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[numel] of undefined contents, until somebody asks again."""
        memory = self._memory
        if memory is None or memory.numel() < numel or (memory.dtype, memory.device) != (dtype, device):
            self._memory = None  # the old one goes first
            with torch.inference_mode(mode=False):
                self._memory = memory = torch.empty(numel, dtype=dtype, device=device)
        return memory[:numel]
