"""Memory in which a chunk's gradients become what the optimizer takes, cast or multiplied, and small weights one run.

One piece for all chunks, since they are stepped one after the other. What is as large as a chunk would otherwise come
from the kernel and go back to it each time, and be faulted in anew.
"""

from __future__ import annotations

import torch

from infinity.tiers.inference import outside_inference


class Scratch:
    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, *, of: str) -> torch.Tensor:
        """[numel] of undefined contents, until somebody asks again for memory ``of`` the same."""
        memory = self._memory.get(of)
        if memory is None or memory.numel() < numel or (memory.dtype, memory.device) != (dtype, device):
            self._memory.pop(of, None)
            del memory  # the old one goes first
            with outside_inference():
                self._memory[of] = memory = torch.empty(numel, dtype=dtype, device=device)
        return memory[:numel]
