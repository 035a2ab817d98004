"""Moments that the store has in fewer bits, rounded where a step has made them.

Second moments move by a thousandth a step. bf16 tells values four to eight thousandths apart, so that to the nearest
one they would grow and never fall again, and 8 bits tell less; by chance, they are right on the average. Numbers are
drawn from the parameter, the state, the count of steps and the element's place in the parameter: the same at every
tier, budget and number of ranks, and again after a checkpoint. What is left for the store to round to the nearest are
first moments, which move by a tenth a step, and what users write.
"""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import torch

from infinity.plan.narrow import Narrow
from infinity.tiers.narrow import round_by_chance
from infinity.update.rule import History
from io_daemon.shared.protocol import ObjectKind


class Rounding:
    """``forms``: the states that are rounded, and to what."""

    def __init__(self, forms: Mapping[ObjectKind, Narrow]) -> None:
        self.forms = forms

    def apply(self, values: torch.Tensor, kind: ObjectKind, *, param: int, first: int, history: History) -> None:
        """Round in place.

        Args:
            values: fp32, 1-D and contiguous: elements of the state of that kind.
            param: index of the parameter.
            first: the first element's place in the whole parameter, flattened.
            history: of the parameter, after the step that made the values.
        """
        seed = crc32(repr((param, int(kind), history)).encode())
        round_by_chance(values, self.forms[kind], seed=seed, first=first)
