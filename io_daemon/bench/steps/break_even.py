"""How much compute hides the I/O of a step? Pure arithmetic over the figures of a replay.

Forward and backward grow with the batch, the update and the bytes do not. More compute hides stalls one for one where
it runs: that between two updates the updates' stalls, the rest those of forward and backward. Where nothing is computed
between updates (``io_daemon.update: "in_step"``) their stalls stay, and must become small against the step.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from io_daemon.command.units import seconds_text

STALL_SHARE_HIDDEN: Final = 0.05
"""I/O counts as hidden when a step stalls for no more than this share."""


class StepParts(NamedTuple):
    """Seconds of one step: the work of forward and backward, what of that is done between updates, the work of the
    update, and the stalls in each."""

    compute_s: float
    between_s: float
    update_s: float
    compute_stall_s: float
    update_stall_s: float


def hidden_from(parts: StepParts, share: float = STALL_SHARE_HIDDEN) -> float:
    """Seconds of forward and backward from which on stalls are at most ``share`` of the step; at least today's."""
    between = parts.between_s / parts.compute_s if parts.compute_s > 0 else 0.0

    def excess_s(more_s: float) -> float:
        """Of stalls over their share, with so much more forward and backward."""
        stall_s = max(0.0, parts.compute_stall_s - (1 - between) * more_s)
        stall_s += max(0.0, parts.update_stall_s - between * more_s)
        return stall_s - share * (parts.compute_s + more_s + parts.update_s + stall_s)

    more_s, left_s = 0.0, excess_s(0.0)
    if left_s <= 0:
        return parts.compute_s
    stalls = ((parts.compute_stall_s, 1 - between), (parts.update_stall_s, between))
    enough_s = (parts.compute_stall_s + parts.update_stall_s) / share  # even if it hid nothing
    bends = sorted(stall_s / rate for stall_s, rate in stalls if stall_s < rate * enough_s)
    for bend_s in (*bends, enough_s):
        left_then_s = excess_s(bend_s)
        if left_then_s <= 0:  # until then it falls evenly
            return parts.compute_s + more_s + (bend_s - more_s) * left_s / (left_s - left_then_s)
        more_s, left_s = bend_s, left_then_s
    return parts.compute_s + more_s


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
