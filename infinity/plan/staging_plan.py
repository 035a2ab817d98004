"""What models under construction, and activations that wait, take of the host budget; what is left to the engines."""

from __future__ import annotations

from typing import Final

from infinity.config import Config
from infinity.errors import BudgetError
from infinity.plan.memory_plan import MemoryPlan
from io_daemon.shared.protocol import PAGE_BYTES

_BUDGET_SHARE: Final = 8
"""Each of these arenas takes 1/n of the host budget at most; the engine's arena gets the rest, so that the sum stays
inside."""
_CHUNKS_MAX: Final = 1 << 18
_STAGING_FRAMES: Final = 4
_STAGING_BYTES_MAX: Final = 16 << 20
"""A model is staged piece by piece, once, while the engine's arena lacks these frames for as long as it trains."""
_ACTIVATION_FRAMES: Final = 8
_ACTIVATION_BYTES_MAX: Final = 64 << 20
PIECE_BYTES_MAX: Final = _STAGING_BYTES_MAX // _STAGING_FRAMES
"""The most that is staged at a time."""


def staging_plan(config: Config, local_world_size: int) -> MemoryPlan:
    """The arena of one rank's staging area, which ``initialize`` leaves out of the engine's budget."""
    return _plan(config, local_world_size, num_frames=_STAGING_FRAMES, bytes_max=_STAGING_BYTES_MAX)


def activations_plan(config: Config, local_world_size: int) -> MemoryPlan:
    """The arena of one rank's waiting activations, likewise."""
    return _plan(config, local_world_size, num_frames=_ACTIVATION_FRAMES, bytes_max=_ACTIVATION_BYTES_MAX)


def activation_bytes(config: Config, local_world_size: int) -> int:
    """The arenas of all ranks of the node for activations that wait in the daemon."""
    if not config.io_daemon.activation_checkpoints:
        return 0
    return activations_plan(config, local_world_size).arena_bytes * local_world_size


def _plan(config: Config, local_world_size: int, *, num_frames: int, bytes_max: int) -> MemoryPlan:
    share = config.io_daemon.host_budget_bytes // _BUDGET_SHARE // local_world_size
    piece_bytes = max(PAGE_BYTES, min(share, bytes_max) // num_frames // PAGE_BYTES * PAGE_BYTES)
    return MemoryPlan(
        chunk_numel=piece_bytes,
        frame_bytes=piece_bytes,
        num_frames=num_frames,
        pinned_frames=0,
        demand_frames=1,
        swap_bytes=0,
        chunks_max=_CHUNKS_MAX,
    )


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
