"""Memory for whole values of a chunk, taken and given back by leases: the next ones use it again."""

from __future__ import annotations

import contextlib

import torch


class Spare:
    """``num_kept``: pieces that are kept for the next leases; more are held at a time only by threads together."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._pieces: list[torch.Tensor] = []

    def take(self, numel: int, device: torch.device) -> torch.Tensor:
        """[numel or more] fp32 of undefined contents. ``numel``: of the largest chunk, the same each time."""
        with contextlib.suppress(IndexError):  # another thread may take the last
            piece = self._pieces.pop()
            if piece.device == device and piece.numel() >= numel:
                return piece
        return torch.empty(numel, dtype=torch.float32, device=device)

    def give_back(self, piece: torch.Tensor) -> None:
        """It came from ``take``, and is not used any more."""
        if len(self._pieces) < self._num_kept:
            self._pieces.append(piece)

    def clear(self) -> None:
        self._pieces.clear()
