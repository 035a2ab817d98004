"""Ranks as threads of one process: collectives without torch.distributed, in milliseconds, under a deadline."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any, TypeVar

import torch

from infinity.tiers.collectives import Collectives

DEADLINE_S = 30.0
Result = TypeVar("Result")


class Meeting:
    """Where ranks leave values for each other: the nth of a channel belongs to the nth of every other rank."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._left: dict[tuple[str, int], dict[int, Any]] = {}
        self._counts: Counter[tuple[str, int]] = Counter()
        self._changed = threading.Condition()
        self.passed: list[Queue[torch.Tensor]] = [Queue() for _ in range(world_size)]
        """What each rank is sent by the one before."""

    def leave(self, channel: str, rank: int, value: Any) -> int:
        with self._changed:
            number = self._counts[channel, rank]
            self._counts[channel, rank] += 1
            self._left.setdefault((channel, number), {})[rank] = value
            self._changed.notify_all()
            return number

    def is_complete(self, channel: str, number: int) -> bool:
        return len(self._left[channel, number]) == self.world_size

    def collect(self, channel: str, number: int) -> list[Any]:
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_complete(channel, number), DEADLINE_S):
                raise TimeoutError(f"{channel} {number}: only ranks {sorted(self._left[channel, number])} came")
            return [self._left[channel, number][rank] for rank in range(self.world_size)]

    def exchange(self, channel: str, rank: int, value: Any) -> list[Any]:
        return self.collect(channel, self.leave(channel, rank, value))


class Work:
    """A reduction under way."""

    def __init__(self, meeting: Meeting, rank: int, output: torch.Tensor, full: torch.Tensor) -> None:
        self._meeting, self._rank, self._output = meeting, rank, output
        self._number = meeting.leave("reductions", rank, full.clone())
        output.fill_(torch.nan)

    def is_completed(self) -> bool:
        return self._meeting.is_complete("reductions", self._number)

    def wait(self) -> None:
        fulls = self._meeting.collect("reductions", self._number)
        parts = [full.view(self._meeting.world_size, -1)[self._rank] for full in fulls]
        self._output.copy_(torch.stack(parts).sum(0))


class ThreadedCollectives(Collectives):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(None)
        self.rank, self.world_size = rank, meeting.world_size
        self.said: list[str] = []
        """What this rank was about to do, in order."""
        self.sent: list[Any] = []
        """The objects that it gave to the others, in order."""
        self.reduced: list[torch.Tensor] = []
        """What it gave to reductions, in order."""
        self._meeting = meeting

    def agree(self, what: str, failure: str = "") -> None:
        self.said.append(what)
        words = set(self._meeting.exchange("words", self.rank, what + failure))
        if len(words) > 1:
            raise AssertionError(f"the ranks diverge: {sorted(words)}")

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        output.copy_(torch.cat(self._meeting.exchange("data", self.rank, shard.clone())))

    def reduce_scatter_mean(self, output: torch.Tensor, full: torch.Tensor) -> Any:
        full.div_(self.world_size)
        self.reduced.append(full.clone())
        return Work(self._meeting, self.rank, output, full)

    @property
    def num_reductions(self) -> int:
        return len(self.reduced)

    def receive_from_previous(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._meeting.passed[self.rank].get(timeout=DEADLINE_S))

    def send_to_next(self, tensor: torch.Tensor) -> None:
        self._meeting.passed[self.rank + 1].put(tensor.clone())

    def broadcast(self, tensor: torch.Tensor, what: str, *, source: int = 0) -> None:
        self.agree(what)
        tensor.copy_(self._meeting.exchange("control", self.rank, tensor.clone())[source])

    def broadcast_object(self, value: object, what: str) -> Any:
        return self.gather_objects(value, what)[0]

    def gather_objects(self, value: object, what: str) -> list[Any]:
        self.sent.append(value)
        return self._exchange(value, what)

    def _exchange(self, value: object, what: str) -> list[Any]:
        self.agree(what)
        return self._meeting.exchange("control", self.rank, value)

    def sum(self, tensor: torch.Tensor, what: str) -> None:
        tensor.copy_(torch.stack(self._exchange(tensor.clone(), what)).sum(0))

    def max(self, tensor: torch.Tensor, what: str) -> None:
        tensor.copy_(torch.stack(self._exchange(tensor.clone(), what)).amax(0))


def on_ranks(world_size: int, work: Callable[[ThreadedCollectives], Result]) -> Sequence[Result]:
    """``work`` on every rank at once; what each returned, in rank order."""
    meeting = Meeting(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(work, ThreadedCollectives(meeting, rank)) for rank in range(world_size)]
        return [future.result(DEADLINE_S) for future in futures]
