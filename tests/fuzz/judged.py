"""Judge many programs a process; a crash or a hang costs that one program, and is told by its seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self, TypeVar

from tests.support.forked import Child, Say
from tests.support.judge import Verdict

PROGRAM_TIMEOUT_S = 60.0
RANKS_TIMEOUT_S = 50.0
"""For ranks that one process starts and waits for."""
PEER_TIMEOUT_S = 20.0
"""How long a rank waits for the others in a collective."""
PROGRAMS_A_PROCESS = 200
"""A fresh process now and then, so that nothing adds up."""


class Candidate(Protocol):
    """A random program, or a random walk."""

    @property
    def seed(self) -> int: ...

    @property
    def setting(self) -> object: ...

    @property
    def source(self) -> str:
        """It as a script that runs."""

    def judged(self) -> Verdict:
        """What it did, in this process."""

    def smaller(self) -> Iterator[Self]:
        """The same with one thing less, the boldest first."""


Some = TypeVar("Some", bound=Candidate)


def judged(seeds: Sequence[int], make: Callable[[int], Some]) -> Iterator[tuple[Some, Verdict]]:
    """Every seed's verdict, in order."""
    remaining = list(seeds)
    while remaining:
        mine = remaining[:PROGRAMS_A_PROCESS]
        child = Child(lambda say, mine=mine: _judge_all(mine, make, say))  # type: ignore[misc]
        while mine:
            line = child.read_line(PROGRAM_TIMEOUT_S)
            if line is None:
                break
            yield make(mine.pop(0)), Verdict(**json.loads(line))
            remaining.pop(0)
        end = child.end()
        if mine:
            culprit = make(mine[0])
            remaining.pop(0)
            yield culprit, _failed(culprit, end)


def judged_alone(candidate: Candidate) -> Verdict:
    """In a process of its own."""
    child = Child(lambda say: say(json.dumps(candidate.judged().as_json())))
    line = child.read_line(PROGRAM_TIMEOUT_S)
    end = child.end()
    return _failed(candidate, end) if line is None else Verdict(**json.loads(line))


def shrunk(failing: Some, verdict: Verdict, *, tries_max: int = 200) -> tuple[Some, Verdict]:
    """The smallest found that fails the same way, each tried in a process of its own."""
    tries = 0
    smaller = iter(failing.smaller())
    while tries < tries_max and (candidate := next(smaller, None)) is not None:
        tries += 1
        found = judged_alone(candidate)
        if found.outcome == "failed" and _kind(found) == _kind(verdict):
            failing, verdict, smaller = candidate, found, iter(candidate.smaller())
    return failing, verdict


def _kind(verdict: Verdict) -> tuple[str, str]:
    """What must stay the same while a program shrinks: the type of error, or that bits differ, or the signal."""
    return verdict.error_type, "" if verdict.error_type else verdict.message.splitlines()[0].split(":")[0][:12]


def _judge_all(seeds: Sequence[int], make: Callable[[int], Some], say: Say) -> None:
    for seed in seeds:
        say(json.dumps(make(seed).judged().as_json()))


def _failed(candidate: Candidate, message: str) -> Verdict:
    return Verdict(script=f"seed {candidate.seed}", setting=str(candidate.setting), outcome="failed", message=message)
