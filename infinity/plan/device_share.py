"""Which chunks keep their optimizer state on the device though it is offloaded: ``offload_optimizer.ratio``. Pure."""

from __future__ import annotations


class DeviceShare:
    """What is left of the elements whose states stay; chunks take from it in their order, whoever counts them."""

    def __init__(self, numel: int, ratio: float) -> None:
        """``numel``: elements that are trained; ``ratio``: the part of them whose states are offloaded."""
        self._left = numel - round(ratio * numel)

    def take(self, chunk_numel: int, count: int = 1) -> int:
        """How many of ``count`` chunks stay."""
        taken = min(count, self._left // chunk_numel)
        self._left -= taken * chunk_numel
        return taken
