"""What models under construction, and activations that wait, take of the host budget; what is left to the engines."""

from __future__ import annotations

from typing import Final

from infinity.config import Config
from infinity.errors import BudgetError
from infinity.plan.memory_plan import MemoryPlan
from io_daemon.shared.protocol import PAGE_BYTES

_NUM_FRAMES: Final = 8
_ARENA_BYTES_MAX: Final = 64 << 20
_BUDGET_SHARE: Final = 8
"""The staging arena takes 1/n of the host budget; the engine's arena gets the rest, so that the sum stays inside."""
_CHUNKS_MAX: Final = 1 << 18
PIECE_BYTES_MAX: Final = _ARENA_BYTES_MAX // _NUM_FRAMES
"""The most that is staged at a time."""


def staging_plan(config: Config, local_world_size: int) -> MemoryPlan:
    """The arena of one rank's staging area, or of its waiting activations; ``initialize`` leaves both out of the
    engine's budget."""
    share = config.io_daemon.host_budget_bytes // _BUDGET_SHARE // local_world_size
    piece_bytes = max(PAGE_BYTES, min(share, _ARENA_BYTES_MAX) // _NUM_FRAMES // PAGE_BYTES * PAGE_BYTES)
    return MemoryPlan(
        chunk_numel=piece_bytes,
        frame_bytes=piece_bytes,
        num_frames=_NUM_FRAMES,
        pinned_frames=0,
        demand_frames=1,
        swap_bytes=0,
        chunks_max=_CHUNKS_MAX,
    )


def activation_bytes(config: Config, local_world_size: int) -> int:
    """The arenas of all ranks of the node for activations that wait in the daemon."""
    if not config.io_daemon.activation_checkpoints:
        return 0
    return staging_plan(config, local_world_size).arena_bytes * local_world_size


def budget_beside(staging_bytes: int, config: Config) -> int:
    """What is left of the host budget for the engines' arenas beside ``staging_bytes`` of the node's ranks.

    Raises BudgetError if nothing is.
    """
    budget_bytes = config.io_daemon.host_budget_bytes
    if staging_bytes >= budget_bytes:
        raise BudgetError(
            key="io_daemon.host_budget_bytes",
            budget_bytes=budget_bytes,
            smallest_bytes=2 * staging_bytes,
            reason=f"models under construction and activations have {staging_bytes} bytes of arenas",
        )
    return budget_bytes - staging_bytes
