"""Processes that save, or load, and are killed at a random moment; what they leave is judged.

The victims are forks of a process that has imported all: some milliseconds each, so that many moments can be met.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.checkpoint.directory import ASIDE, REPLACED, latest_tag
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.errors import CheckpointError
from tests.support.forked import Child, Say, warm_up
from tests.support.resumed import config_of, everything_of, started, train

READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one kill has left."""

    delay_s: float
    """The time from the victim's first whole save, or load, to its end."""
    aside: bool
    """Whether an unfinished checkpoint lay there: the kill met the writing."""
    latest: str | None
    problem: str


def killed_saves(directory: Path, *, num_kills: int, seed: int) -> Iterator[Outcome]:
    """Kill a training that saves all the time: now over one tag, now under a new one."""
    yield from _killed(directory, _save_for_ever, num_kills=num_kills, seed=seed)


def killed_late_saves(directory: Path, *, num_kills: int, seed: int) -> Iterator[Outcome]:
    """Kill a training that has a save written all the time."""
    yield from _killed(directory, _save_late_for_ever, num_kills=num_kills, seed=seed)


def killed_loads(directory: Path, *, num_kills: int, seed: int) -> Iterator[Outcome]:
    """Kill a training that loads all the time."""
    yield from _killed(directory, _load_for_ever, num_kills=num_kills, seed=seed)


def _killed(directory: Path, victim: Callable[[Path, Say], None], *, num_kills: int, seed: int) -> Iterator[Outcome]:
    warm_up()
    chance = random.Random(seed)
    for _ in range(num_kills):
        child = Child(lambda say: victim(directory, say))
        took = _said(child)
        delay = chance.random() * took * 2
        time.sleep(delay)
        os.kill(child.pid, signal.SIGKILL)
        child.end()
        aside = any(directory.glob(f"{ASIDE}*")) or any(directory.glob(f"{REPLACED}*"))
        yield Outcome(delay_s=delay, aside=aside, latest=latest_tag(directory), problem=_problem(directory))


def _said(child: Child) -> float:
    """How long a save or load takes, which the victim says when it has done one."""
    line = child.read_line(READY_TIMEOUT_S)
    if line is None:
        raise AssertionError(f"the victim ended by itself: {child.end()}")
    return float(line)


def _problem(directory: Path) -> str:
    """What is wrong with the checkpoint that ``latest`` names, and with any other that has a name."""
    try:
        with StoredCheckpoint.open(directory) as stored:
            for fault in stored.verify():
                return str(fault)
        for path in directory.iterdir():
            if path.is_dir() and not path.name.startswith((ASIDE, REPLACED)):
                StoredCheckpoint(path).close()
    except CheckpointError as error:
        return str(error)
    return ""


def _save_for_ever(directory: Path, say: Say) -> None:
    torch.set_num_threads(1)
    engine = started(config_of())
    if latest_tag(directory) is not None:
        engine.load_checkpoint(directory)
    number = 0
    while True:
        train(engine, 1)
        begun = time.monotonic()
        engine.save_checkpoint(directory, tag="again" if number % 2 else f"new{number % 6}")
        if number == 0:
            say(str(time.monotonic() - begun))
        number += 1


def _save_late_for_ever(directory: Path, say: Say) -> None:
    torch.set_num_threads(1)
    engine = started(config_of())
    if latest_tag(directory) is not None:
        engine.load_checkpoint(directory)
    number = 0
    while True:
        begun = time.monotonic()
        engine.save_checkpoint(directory, tag="again" if number % 2 else f"new{number % 6}", asynchronous=True)
        train(engine, 3)
        if number == 1:
            say(str(time.monotonic() - begun))
        number += 1


def _load_for_ever(directory: Path, say: Say) -> None:
    torch.set_num_threads(1)
    engine = started(config_of())
    if latest_tag(directory) is None:
        engine.save_checkpoint(directory)
    number = 0
    while True:
        begun = time.monotonic()
        engine.load_checkpoint(directory)
        everything_of(engine)
        if number == 0:
            say(str(time.monotonic() - begun))
        number += 1
