"""Leases that copies hold are given back once these are done, and before anybody needs what they hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from infinity.tiers import under_way
from infinity.tiers.base import ChunkLayout
from infinity.tiers.due import DueStore
from infinity.tiers.layers import TracedStore
from infinity.tiers.snapshot import SnapshotStore
from infinity.tiers.under_way import Copying, UnderWay
from io_daemon.shared.protocol import ObjectKind
from tests.support.strict_store import StrictStore

GRAD = ObjectKind.GRAD.mask
NUM_CHUNKS = 4


class Event:
    """``error``: what waiting for it raises."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error


class Fixture:
    def __init__(self) -> None:
        self.under_way, self.strict = UnderWay(), StrictStore()
        snapshots = SnapshotStore(self.strict)
        self.store = DueStore(TracedStore(snapshots), snapshots, num_ahead=1, under_way=self.under_way)
        layout = ChunkLayout(numel=8, dtypes={ObjectKind.GRAD: torch.float32})
        self.store.register([layout] * NUM_CHUNKS)

    def copy(self, chunk: int, copied: Any = None, works: Any = ()) -> None:
        lease = self.store.acquire(chunk, write=GRAD)
        lease.wait()
        lease.pieces(ObjectKind.GRAD)[0].fill_(chunk + 1.0)
        event: Any = copied or Event()
        self.under_way.add(Copying(lease, event, works, dirty=GRAD))

    @property
    def released(self) -> list[int]:
        return [chunk for chunk, *_ in self.strict.released()]

    def kept(self, chunk: int) -> float:
        return float(self.strict.object(chunk, ObjectKind.GRAD)[0])


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


def test_no_more_than_so_many_are_held(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "UNDER_WAY_MAX", 2)
    for chunk in range(4):
        fixture.copy(chunk)
    assert fixture.released == [0, 1]
    fixture.under_way.settle()
    assert fixture.released == [0, 1, 2, 3]
    assert [fixture.kept(chunk) for chunk in range(4)] == [1.0, 2.0, 3.0, 4.0]


ENDS: dict[str, Callable[[DueStore], object]] = {
    "the next lease on the chunk": lambda store: store.acquire(1, read=GRAD),
    "a pass that begins": lambda store: store.mark(3),
    "a pass that is complete": lambda store: store.complete(),
    "a pass that failed": lambda store: store.abandon(),
    "chunks that go": lambda store: store.unregister(range(NUM_CHUNKS)),
    "a look at all that is due": lambda store: store.settle(),
    "a snapshot": lambda store: store.snapshot({}, lambda: None),
    "the end": lambda store: store.close(),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_needs_them_waits_for_them(end: str, fixture: Fixture) -> None:
    fixture.copy(0)
    fixture.copy(1)
    fixture.store.acquire(2, read=GRAD).release()
    assert fixture.released == [2], "another chunk's lease waits for nobody"
    ENDS[end](fixture.store)
    assert fixture.released == [2, 0, 1]


def test_what_is_done_on_the_host_belongs_to_it(fixture: Fixture) -> None:
    work: Future[None] = Future()
    fixture.copy(0, works=[work])
    waiting = threading.Thread(target=fixture.under_way.settle)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    work.set_result(None)
    waiting.join(30)
    assert fixture.released == [0]


@pytest.mark.parametrize("part", ["copy", "work"])
def test_what_fails_is_not_written_and_is_told_to_who_trains(part: str, fixture: Fixture) -> None:
    error, work = RuntimeError("the device is gone"), Future[None]()
    if part == "work":
        work.set_exception(error)
    else:
        work.set_result(None)
    fixture.copy(0, Event(error if part == "copy" else None), [work])
    fixture.copy(1)
    fixture.under_way.end_all()  # by somebody else who waits for frames
    assert (fixture.released, fixture.kept(0), fixture.kept(1)) == ([0, 1], 0.0, 2.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device is gone"):
            fixture.under_way.settle()
    fixture.under_way.forget()
    fixture.under_way.settle()


def test_an_interrupt_leaves_it_under_way(fixture: Fixture) -> None:
    event: Any = Event()
    event.error = KeyboardInterrupt()
    fixture.copy(0, event)
    with pytest.raises(KeyboardInterrupt):
        fixture.under_way.settle()
    assert fixture.released == []
    event.error = None
    fixture.under_way.settle()
    assert (fixture.released, fixture.kept(0)) == ([0], 1.0)


def test_the_end_comes_also_where_the_device_is_gone(fixture: Fixture) -> None:
    fixture.copy(0, Event(RuntimeError("the device is gone")))
    fixture.store.abandon()
    fixture.store.close()
    assert fixture.strict.closed
