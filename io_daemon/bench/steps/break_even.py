"""How much compute hides the I/O of a step? Pure arithmetic over the figures of a replay.

Forward and backward grow with the batch, the update and the bytes do not. More compute in forward and backward hides
their own stalls one for one; it leaves the update's stalls alone, so they must become small against the step.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from io_daemon.command.units import seconds_text

STALL_SHARE_HIDDEN: Final = 0.05
"""I/O counts as hidden when a step stalls for no more than this share."""


class StepParts(NamedTuple):
    """Seconds of one step: the work of forward and backward and of the update, and the stalls in each."""

    compute_s: float
    update_s: float
    compute_stall_s: float
    update_stall_s: float


def hidden_from(parts: StepParts, share: float = STALL_SHARE_HIDDEN) -> float:
    """Seconds of forward and backward from which on stalls are at most ``share`` of the step; at least today's."""
    step_s = sum(parts)
    stall_s = parts.compute_stall_s + parts.update_stall_s
    if stall_s <= share * step_s:
        return parts.compute_s
    if parts.update_stall_s <= share * step_s:
        # while stalls shrink, the step stays as long as it is
        return parts.compute_s + stall_s - share * step_s
    return parts.update_stall_s * (1 - share) / share - parts.update_s


def break_even_note(parts: StepParts, tokens_per_step: int | None) -> str:
    """One line for people."""
    from_s = hidden_from(parts)
    share = f"{STALL_SHARE_HIDDEN:.0%}"
    if from_s <= parts.compute_s:
        return f"I/O is hidden: it costs less than {share} of a step against the same state in host memory"
    if parts.compute_s <= 0:
        return f"from {seconds_text(from_s)} of forward and backward on, I/O costs less than {share} of a step"
    factor = from_s / parts.compute_s
    batch = f"a batch {factor:.1f} times as large"
    if tokens_per_step is not None:
        batch = f"{tokens_per_step * factor:,.0f} tokens a step instead of {tokens_per_step:,}"
    return (
        f"from {seconds_text(from_s)} of forward and backward on ({batch}), I/O costs less than {share} of a step "
        "against the same state in host memory"
    )
