"""A job that is stopped, and goes on: time in which it did not run is nobody's fault."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from infinity.tiers import snapshot as snapshots
from infinity.tiers.base import Lease
from infinity.tiers.snapshot import Snapshot


class SlowLease(Lease):
    """It is granted when the writer has looked for it twice."""

    chunk = 0

    def __init__(self, granted: threading.Event) -> None:
        self._granted = granted

    def wait(self) -> None:
        assert self._granted.wait(30.0)

    def pieces(self, kind: int) -> list[torch.Tensor]:
        return []

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        """It is given back."""


def test_a_reader_is_not_given_up_for_time_in_which_the_job_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    granted, looks, now_s = threading.Event(), 0, 0.0

    class Store:
        def acquire(self, chunk: int, **_: int) -> Lease:
            return SlowLease(granted)

    store: Any = Store()
    snapshot = Snapshot(store, {0: 1}, set(), when_made=lambda: None)
    wait = threading.Condition.wait

    def stopped_meanwhile(condition: threading.Condition, timeout_s: float | None = None) -> bool:
        """An hour passes within the first look."""
        nonlocal looks, now_s
        if condition is not snapshot._changed or timeout_s is None:
            return wait(condition, timeout_s)
        looks += 1
        now_s += 3600.0 if looks == 1 else 0.01
        if looks == 2:
            granted.set()
        return wait(condition, 0.01)

    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr(threading.Condition, "wait", stopped_meanwhile)
    reader = threading.Thread(target=snapshot.read_all, args=(lambda _lease: None,))
    reader.start()
    snapshot.wait_read(0)
    granted.set()
    reader.join()
    assert not snapshot._reason
    assert looks > 1
    assert snapshots.READ_TIMEOUT_S < 3600
