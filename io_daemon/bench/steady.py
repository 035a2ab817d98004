"""When a rate is steady, by SNIA's Performance Test Specification: range 20 %, slope 10 % of the mean at most.

Pure. Drives write at the rate of their cache first and of their cells later, and slow down again when they are hot; a
mean over both says neither. The specification looks at five rounds; here the measured time is cut into rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from io_daemon.bench.result import SteadyState

NUM_ROUNDS: Final = 20
STEADY_ROUNDS_MIN: Final = 5
STEADY_S_MIN: Final = 5.0
"""Less measured time says nothing about a state."""
RANGE_MAX: Final = 0.20
SLOPE_MAX: Final = 0.10


def find_steady_state(rates: Sequence[float], interval_s: float) -> SteadyState:
    """``rates``: bytes a second over equal intervals of the measured time."""
    rounds = _rounds(np.asarray(rates, dtype=float))
    if rounds.size < STEADY_ROUNDS_MIN or interval_s * len(rates) < STEADY_S_MIN:
        return SteadyState(reached=False, begin_s=None, bw_bytes=None, burst_bw_bytes=None)
    round_s = interval_s * len(rates) / rounds.size
    for begin in range(rounds.size - STEADY_ROUNDS_MIN + 1):
        if _is_steady(rounds[begin:]):
            return SteadyState(
                reached=True,
                begin_s=begin * round_s,
                bw_bytes=float(rounds[begin:].mean()),
                burst_bw_bytes=float(rounds[:begin].mean()) if begin else None,
            )
    return SteadyState(reached=False, begin_s=None, bw_bytes=None, burst_bw_bytes=None)


def _rounds(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over equal parts, about ``NUM_ROUNDS`` of them; what is left over goes to the first."""
    per_round = max(1, rates.size // NUM_ROUNDS)
    num_rounds = rates.size // per_round
    if num_rounds == 0:
        return rates
    first = rates.size - (num_rounds - 1) * per_round
    rest = rates[first:].reshape(-1, per_round).mean(axis=1) if num_rounds > 1 else rates[:0]
    return np.concatenate([[rates[:first].mean()], rest])


def _is_steady(rounds: NDArray[np.float64]) -> bool:
    mean = float(rounds.mean())
    if mean <= 0:
        return False
    slope = float(np.polyfit(np.arange(rounds.size), rounds, 1)[0]) * (rounds.size - 1)
    return bool(np.ptp(rounds) <= RANGE_MAX * mean and abs(slope) <= SLOPE_MAX * mean)
