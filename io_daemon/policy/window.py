"""How far prefetch runs ahead of a rank, and what that leaves for objects that stay. Pure."""

from __future__ import annotations

from typing import Final

READY_AHEAD_DEPTHS: Final = 4
"""The window is so many queue depths' worth of bytes on every device."""
WINDOW_FRAMES_MIN: Final = 2


def ahead_bytes(queue_depth: int, block_bytes: int, num_devices: int) -> int:
    """Prefetch may have readied so much ahead, given an arena large enough."""
    return READY_AHEAD_DEPTHS * queue_depth * block_bytes * num_devices


def window_frames(num_frames: int, frame_bytes: int, ahead_bytes: int) -> int:
    """Frames of the prefetch window: half the arena at most."""
    return max(WINDOW_FRAMES_MIN, min(num_frames // 2, -(-ahead_bytes // frame_bytes)))


def frames_to_plan(usable_frames: int, window_frames: int, demand_frames: int) -> int:
    """Frames that a plan may fill with what stays: what is not pinned, less the window and one lease, which stream."""
    return max(usable_frames - window_frames - demand_frames, usable_frames // 2)
