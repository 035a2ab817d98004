"""A CPU whose copies are done by another thread, later: what an accelerator's copy stream does, to be had everywhere.

What waits for copies on a device makes the caller wait here, since a CPU computes at once. Copies between host and host
stand for those in both directions.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from infinity.engine import runtime
from infinity.weights import sharded_model
from infinity.weights.streams import CopyStream

DELAY_S: Final = 0.0005


class Reached:
    """An event."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def set(self) -> None:
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        if not self._reached.wait(60):
            raise AssertionError("copies are not done")


class LateCopies(CopyStream):
    """``num_late``: copies of all of them that came later than they were asked for."""

    num_late = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self._random = random.Random(0)
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            work = self._queue.get()
            time.sleep(self._random.random() * DELAY_S)
            with torch.inference_mode(mode=False), torch.no_grad():
                work()

    @property
    def is_beside(self) -> bool:
        return True

    @contextlib.contextmanager
    def issue(self, *, after_current: bool) -> Iterator[None]:
        with _Deferred(self._queue):
            yield

    def mark(self) -> Any:
        event = Reached()
        self._queue.put(event.set)
        return event

    def join(self, used: Iterable[torch.Tensor] = ()) -> None:
        self.mark().synchronize()

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def note_given_up(self, numel: int) -> None:
        self._given_up.append((numel, self.mark()))


class _Deferred(TorchFunctionMode):
    def __init__(self, work: queue.SimpleQueue[Callable[[], None]]) -> None:
        super().__init__()
        self._queue = work

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.pop("non_blocking", False):
            LateCopies.num_late += 1
            self._queue.put(lambda: function(*args, **kwargs))
            return args[0]
        return function(*args, **kwargs)


@contextlib.contextmanager
def second_timeline() -> Iterator[None]:
    """Engines that are made inside have one."""
    with (
        mock.patch.object(runtime, "CopyStream", LateCopies),
        mock.patch.object(sharded_model, "CopyStream", LateCopies),
    ):
        yield
