"""What ranks said, in words for people: those who said the same stand together, of however many ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

SHOWN_MAX: Final = 8
"""Different words that one message has; of the rest it tells how many ranks' they are."""


def in_words(said: Iterable[tuple[int, str]], verb: str, verb_of_many: str = "") -> str:
    """Each text once, behind whose it is and the verb: "rank 0: a; ranks 1 to 7: b".

    Args:
        said: (rank, what it said), ranks ascending.
        verb_of_many: behind several ranks; by default the same.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in said:
        ranks_of.setdefault(text, []).append(rank)
    parts = [
        f"{_ranks(ranks)}{(len(ranks) > 1 and verb_of_many) or verb}{text}"
        for text, ranks in list(ranks_of.items())[:SHOWN_MAX]
    ]
    if others := sum(map(len, list(ranks_of.values())[SHOWN_MAX:])):
        parts.append(f"{others} more rank{'s' * (others > 1)} with other words")
    return "; ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    """Runs of three or more by their ends."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    told = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    others = f" and {len(told) - SHOWN_MAX} more runs" if len(told) > SHOWN_MAX else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(told[:SHOWN_MAX])}{others}"
